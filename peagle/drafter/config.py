"""The keys of a training, the same in YAML and on the command line.

The defaults are the best recipe found so far; where each comes from is in benchmarks/drafter/LOG.md.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from peagle.drafter.decontamination import DEFAULT
from peagle.drafter.prompts import is_shipped_source
from peagle.economics.price_options import PriceOptions
from peagle.economics.tags import TagOptions
from peagle.storage import on_disk
from peagle.storage.s3_path import SCHEME

WAYS = ("greedy", "sampled")


class TrainConfig(PriceOptions, TagOptions):
    """One training.

    A description is the help text of its flag; an unknown key is an error.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    target: str = Field("smollm2-135m", description="catalog name, or folder, of the target that the head is for")
    prompts: list[str] = Field(
        min_length=1,
        description="a corpus as generate reads it, or a bulk run's directory; or what ships: stdlib, package:NAME,"
        " content (see `peagle prompts`)",
    )
    output: Path = Field(description="folder for features, checkpoint, metrics and the head; a training there goes on")
    features: Path | None = Field(
        None, description="folder of the target's states, to share them between trainings; default: OUTPUT/features"
    )
    on_the_fly: bool = Field(
        False, description="store no states: run the target again in each pass, where the disk cannot hold them"
    )
    verifier: str | None = Field(
        None,
        description="public name of the target to write into the head: `vllm serve HEAD` loads it by that; default: its"
        " hub id, of a folder its name",
    )

    responses: Literal["regenerate", "given"] = Field(
        "regenerate",
        description="regenerate has the target itself answer the prompts first (needs Ray); given takes the responses"
        " that --prompts has beside them",
    )
    limit: int | None = Field(
        None, ge=1, description="answer only the first prompts, so many of all sources together; default: all"
    )
    sampled_share: float = Field(
        0.5, ge=0, le=1, description="share of the prompts answered by sampling, others greedily"
    )
    temperature: float = Field(0.8, gt=0, le=2, description="of the sampled responses")
    top_p: float = Field(0.95, gt=0, le=1, description="of the sampled responses")
    max_response_tokens: int = Field(224, ge=1, description="longest response")
    engines: int = Field(1, ge=1, description="engine actors that answer")
    max_num_seqs: int = Field(64, ge=1, description="requests an engine runs at once")
    enforce_eager: bool = Field(False, description="do not compile the engines: starts sooner, answers slower")

    prompt_column: str = Field("prompt", description="column with the user's message, when there is no 'messages'")
    max_document_tokens: int = Field(2048, ge=16, description="prompt and response are cut there")
    exclude: list[str] = Field(
        default_factory=lambda: list(DEFAULT),
        min_length=1,
        description="drop rows that share 10 words in a row with this evaluation set: humaneval, a corpus "
        "of prompts, or none; default: humaneval",
    )
    held_out: float = Field(
        0.03, ge=0, lt=0.5, description="share of documents to estimate the acceptance on, never trained"
    )

    algorithm: Literal["peagle", "eagle3"] = Field(
        "peagle", description="peagle drafts all tokens in one pass, eagle3 one after the other"
    )
    num_layers: int = Field(2, ge=1, le=8, description="decoder layers of the head")
    num_key_value_heads: int | None = Field(None, ge=1, description="of its attention; default: as many as the target")
    num_depths: int = Field(8, ge=1, le=32, description="tokens it learns to draft at once (K_train)")
    aux_layers: list[int] | None = Field(None, description="target layers whose inputs it reads; default: 2, L/2, L-1")
    draft_vocab_size: int = Field(8192, ge=1, description="most frequent tokens that it can draft")
    mask_token_id: int = Field(0, ge=0, description="token that stands for those not known yet")
    init: str = Field(
        "warm",
        description="first weights: warm (the target's last layers), random, or a head (its folder, or its name in the "
        "catalog) to go on from, to which layers may be added",
    )
    further_layers: Literal["identity", "unrolled"] = Field(
        "identity",
        description="layers that the head of --init has not begin as the identity, or unrolled: each two as one more "
        "step of the EAGLE-3 head that it is",
    )
    num_frozen_layers: int = Field(
        0, ge=0, description="first layers of the head of --init that stay as they are, and with them what feeds them"
    )
    train_lm_head: bool = Field(True, description="train lm_head as well, rather than keep the target's rows")
    train_embeddings: bool = Field(
        False, description="train embeddings as well, and save them with the head, rather than share the target's"
    )

    epochs: float = Field(1.6, gt=0, description="passes over the documents")
    batch_tokens: int = Field(1024, ge=1, description="tokens of documents in a step")
    micro_batch_tokens: int | None = Field(
        None,
        ge=1,
        description="most tokens of documents to compute at once; a document of N times as many in N parts, each with"
        " its chains and all known tokens before them; default: a step at once",
    )
    cod_ratio: float = Field(0.8, gt=0, le=1, description="share of chains that go on from one depth to the next")
    depth_decay: float = Field(1.0, gt=0, le=1, description="weight of depth d in the loss is this to the power of d")
    depth_weight: Literal["fixed", "dpace"] = Field(
        "fixed",
        description="dpace weighs each row by what it adds to the length of an accepted draft (D-PACE), on top; fixed "
        "does not",
    )
    loss: Literal["kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid"] = Field(
        "kl_div",
        description="of a row, by speculators' names: kl_div (KL of the target's distribution to the head's), rkl (the "
        "other way), jsd (Jensen-Shannon), ce (cross-entropy of the target's likeliest token), tv (total variation), "
        "nla (-log of the overlap, the acceptance rate under sampling), lk_hybrid (from kl_div to tv as it grows)",
    )
    optimizer: Literal["muon", "adamw"] = Field(
        "muon", description="muon moves the layers' matrices by Muon and the rest by AdamW; adamw all by AdamW"
    )
    learning_rate: float = Field(7e-4, gt=0, description="AdamW's peak")
    muon_learning_rate: float = Field(3.5e-3, gt=0, description="Muon's peak")
    final_learning_rate: float = Field(0.02, ge=0, le=1, description="share of the peak that is left at the end")
    warmup_steps: int = Field(50, ge=0, description="steps of linear rise")
    weight_decay: float = Field(0.01, ge=0, description="of the matrices")
    clip_norm: float = Field(1.0, gt=0, description="longest gradient")
    precision: Literal["bf16", "fp32"] = Field("bf16", description="of the products; weights are float32 always")
    seed: int = Field(0, ge=0, description="of first weights, data order and sampling")

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU where there is one")
    workers: int = Field(1, ge=1, description="processes that train together under Ray Train; 1 needs no Ray")
    worker_failures: int = Field(3, ge=0, description="deaths of workers after which the training gives up")
    time_budget_s: float | None = Field(None, gt=0, description="train for that long at most; the same command goes on")
    num_speculative_tokens: int = Field(
        5, ge=1, le=32, description="K of the estimate, and of whoever serves the head without naming one"
    )

    _on_disk = field_validator("output", "features", mode="before")(on_disk)

    @field_validator("prompts", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        sources = [str(source) for source in (value if isinstance(value, list) else [value])]
        if other := [source for source in sources if "://" in source and not source.startswith(SCHEME)]:
            raise ValueError(f"{other[0]} is neither local nor in S3")
        return sources

    @field_validator("exclude", mode="before")
    @classmethod
    def _one_set_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _no_contradiction(self) -> "TrainConfig":
        shipped = [source for source in self.prompts if is_shipped_source(source)]
        if self.responses == "given" and shipped:
            raise ValueError(f"prompts: {shipped[0]} has no responses: leave --responses given out")
        if self.responses == "given" and self.limit is not None:
            raise ValueError("limit is for prompts to be answered: with --responses given all responses are taken")
        if self.on_the_fly and self.features is not None:
            raise ValueError(
                "features and on_the_fly exclude each other: the one stores the states, the other does not"
            )
        return self

    def answers(self, way: str) -> Path:
        """The bulk run in which the target answers prompts one of the `WAYS`."""
        return self.output / "responses" / way

    @property
    def response_sources(self) -> list[str]:
        """Where the finished responses are."""
        if self.responses == "given":
            return self.prompts
        runs = [self.answers(way) for way in WAYS]
        return [str(run) for run in ([run for run in runs if run.is_dir()] or runs)]
