"""The training options of YAML and the command line.

The defaults are the best recipe so far; benchmarks/drafter/LOG.md has the experiments.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from peagle.drafter.decontamination import DEFAULT_SETS
from peagle.drafter.prompts import is_built_in_source
from peagle.economics.price_options import PriceOptions
from peagle.economics.tags import TagOptions
from peagle.engine.spec import BLOCK_METHODS
from peagle.storage import require_local_path
from peagle.storage.s3_path import SCHEME

DECODING_MODES = ("greedy", "sampled")


class TrainConfig(PriceOptions, TagOptions):
    """The options of `peagle train`. Descriptions are the help texts of the flags."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str = Field("smollm2-135m", description="target model: catalog name or folder")
    prompts: list[str] = Field(
        min_length=1,
        description="a corpus in any format that generate reads, the directory of a bulk run, or shipped prompts:"
        " stdlib, package:NAME, content (see `peagle prompts`)",
    )
    output: Path = Field(
        description="folder for features, checkpoint, metrics and the head; an existing training run is resumed"
    )
    features: Path | None = Field(
        None,
        description="folder of the target's hidden states, to share between training runs; default: OUTPUT/features",
    )
    on_the_fly: bool = Field(
        False, description="do not store hidden states: run the target in each pass; for small disks"
    )
    verifier: str | None = Field(
        None,
        description="public name of the target to write into the head; `vllm serve HEAD` loads the target by this name;"
        " default: its hub id or the folder's name",
    )

    responses: Literal["regenerate", "given"] = Field(
        "regenerate",
        description="regenerate: the target answers the prompts first (requires Ray); given: use the"
        " responses in --prompts",
    )
    limit: int | None = Field(
        None, ge=1, description="maximum number of prompts to answer, from all sources together; default: all"
    )
    sampled_share: float = Field(
        0.5, ge=0, le=1, description="share of the prompts answered by sampling; the others are answered greedily"
    )
    temperature: float = Field(0.8, gt=0, le=2, description="temperature of sampled responses")
    top_p: float = Field(0.95, gt=0, le=1, description="top-p of sampled responses")
    max_response_tokens: int = Field(224, ge=1, description="maximum tokens of a response")
    engines: int = Field(1, ge=1, description="engine actors that generate responses")
    max_num_seqs: int = Field(64, ge=1, description="concurrent requests per engine")
    enforce_eager: bool = Field(
        False, description="do not compile the engines; default: compile if that saves more time than it takes"
    )

    prompt_column: str = Field("prompt", description="column with the user's message, if there is no 'messages' column")
    max_document_tokens: int = Field(
        2048, ge=16, description="maximum tokens of prompt and response together; longer documents are cut"
    )
    exclude: list[str] = Field(
        default_factory=lambda: list(DEFAULT_SETS),
        min_length=1,
        description="drop rows that share 10 consecutive words with this evaluation set: humaneval, a corpus "
        "of prompts, or none; default: humaneval",
    )
    held_out: float = Field(
        0.03, ge=0, lt=0.5, description="share of documents that are not trained on, to estimate the acceptance"
    )

    algorithm: Literal["peagle", "eagle3", "dflash", "dspark"] = Field(
        "peagle",
        description="peagle drafts all tokens in one pass, eagle3 one token after another; dflash fills in a block of"
        " mask tokens in one pass, and dspark adds a Markov head and a confidence head",
    )
    num_layers: int = Field(2, ge=1, le=8, description="decoder layers of the head")
    num_key_value_heads: int | None = Field(
        None, ge=1, description="KV heads of the head's attention; default: the target's number"
    )
    num_depths: int = Field(8, ge=1, le=32, description="number of tokens the head learns to draft (K_train)")
    aux_layers: list[int] | None = Field(
        None, description="target layers; the head reads their inputs; default: 2, L/2, L-1"
    )
    draft_vocab_size: int = Field(8192, ge=1, description="size of the draft vocabulary: the most frequent tokens")
    mask_token_id: int = Field(0, ge=0, description="token that stands for positions not drafted yet")
    init: str = Field(
        "warm",
        description="initial weights: warm (the target's last layers), random, or a head to continue (its folder or "
        "catalog name); added layers start as the identity",
    )
    num_frozen_layers: int = Field(
        0,
        ge=0,
        description="do not train the first N layers of the head in --init, nor their inputs (`fc` and the mask state)",
    )
    train_lm_head: bool = Field(True, description="train lm_head; otherwise it keeps the target's rows")
    train_embeddings: bool = Field(
        False, description="train embeddings and save them with the head; otherwise the head shares the target's"
    )

    epochs: float = Field(1.6, gt=0, description="passes over the documents")
    batch_tokens: int = Field(1024, ge=1, description="tokens per step")
    micro_batch_tokens: int | None = Field(
        None,
        ge=1,
        description="maximum tokens to compute together, to save memory; longer documents are computed in parts;"
        " default: a whole step",
    )
    cod_ratio: float = Field(
        0.8,
        gt=0,
        le=1,
        description="conditional-on-distribution (COD) sampling: share of the draft chains (one per position) that"
        " continue from one depth to the next; dflash and dspark draft whole blocks, and multiply depth_decay by this"
        " value instead",
    )
    anchor_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="share of a response's tokens after which dflash and dspark draft a block, in each pass",
    )
    depth_decay: float = Field(
        1.0, gt=0, le=1, description="the weight of depth d in the loss is this value to the power of d"
    )
    depth_weight: Literal["fixed", "dpace"] = Field(
        "fixed",
        description="dpace also weighs each row by its contribution to the accepted length (D-PACE); fixed does not",
    )
    optimizer: Literal["muon", "adamw"] = Field(
        "muon", description="muon: Muon for the layers' matrices and AdamW for the rest; adamw: AdamW for everything"
    )
    learning_rate: float = Field(7e-4, gt=0, description="AdamW's peak learning rate")
    muon_learning_rate: float = Field(3.5e-3, gt=0, description="Muon's peak learning rate")
    final_learning_rate: float = Field(0.02, ge=0, le=1, description="final learning rate as a share of the peak")
    warmup_steps: int = Field(50, ge=0, description="steps over which the learning rate rises linearly")
    weight_decay: float = Field(0.01, ge=0, description="weight decay of matrices")
    clip_norm: float = Field(1.0, gt=0, description="maximum gradient norm")
    precision: Literal["bf16", "fp32"] = Field(
        "bf16", description="precision of matrix products; weights are always float32"
    )
    seed: int = Field(0, ge=0, description="seed for initial weights, data order and sampling")

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto uses a GPU if available")
    workers: int = Field(1, ge=1, description="number of training processes under Ray Train; 1 does not require Ray")
    worker_failures: int = Field(3, ge=0, description="the training fails after this many worker crashes")
    time_budget_s: float | None = Field(
        None, gt=0, description="maximum seconds of training; repeat the command to resume"
    )
    num_speculative_tokens: int = Field(
        5, ge=1, le=32, description="K of the acceptance estimate, and the default K for serving the head"
    )

    _on_disk = field_validator("output", "features", mode="before")(require_local_path)

    @field_validator("prompts", mode="before")
    @classmethod
    def _check_prompts(cls, value: Any) -> Any:
        sources = [str(source) for source in (value if isinstance(value, list) else [value])]
        if unsupported := [source for source in sources if "://" in source and not source.startswith(SCHEME)]:
            raise ValueError(f"{unsupported[0]} is neither a local path nor in S3")
        return sources

    @field_validator("exclude", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_combinations(self) -> "TrainConfig":
        shipped = [source for source in self.prompts if is_built_in_source(source)]
        if self.responses == "given" and shipped:
            raise ValueError(f"prompts: {shipped[0]} has no responses; remove --responses given")
        if self.responses == "given" and self.limit is not None:
            raise ValueError("limit cannot be combined with --responses given, which uses all responses")
        if self.algorithm in BLOCK_METHODS and self.num_speculative_tokens > self.num_depths:
            raise ValueError(
                f"num_speculative_tokens: a {self.algorithm} head with num_depths {self.num_depths} drafts at most"
                f" {self.num_depths} tokens"
            )
        if self.algorithm == "dspark" and self.num_depths == 1:
            raise ValueError("num_depths: a dspark head requires at least 2, because vLLM loads no blocks of one token")
        if self.on_the_fly and self.features is not None:
            raise ValueError("features and on_the_fly cannot be combined: on_the_fly does not store hidden states")
        return self

    def responses_folder(self, mode: str) -> Path:
        return self.output / "responses" / mode

    @property
    def response_sources(self) -> list[str]:
        """Return the corpora to train on. Before the target has answered, these are the folders for both modes."""
        if self.responses == "given":
            return self.prompts
        runs = [self.responses_folder(mode) for mode in DECODING_MODES]
        existing = [run for run in runs if run.is_dir()]
        return [str(run) for run in existing or runs]
