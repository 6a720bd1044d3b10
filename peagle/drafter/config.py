"""What a user can ask of a training: one flat set of keys, the same in YAML and on the command line.

The defaults are the recipe of the shipped head; where each comes from is in benchmarks/drafter/LOG.md.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TrainConfig(BaseModel):
    """One training. A description is the help text of its flag; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str = Field("smollm2-135m", description="catalog name, or folder, of the target that the head is for")
    responses: list[Path] = Field(
        min_length=1,
        description="the target's own responses: a bulk run's directory, or JSONL or Parquet with prompt and response",
    )
    output: Path = Field(description="folder for features, checkpoint, metrics and the head; a training there goes on")
    features: Path | None = Field(
        None, description="folder of the target's states, to share them between trainings; default: OUTPUT/features"
    )
    verifier: str | None = Field(
        None, description="public name of the target to write into the head; default: --target"
    )

    prompt_column: str = Field("prompt", description="column with the user's message, when there is no 'messages'")
    max_document_tokens: int = Field(2048, ge=16, description="prompt and response are cut there")
    exclude: Literal["humaneval", "none"] = Field(
        "humaneval", description="drop rows that share 10 words in a row with this evaluation set"
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
        "warm", description="first weights: warm (the target's last layers), random, or a head's folder to go on from"
    )
    train_lm_head: bool = Field(True, description="train lm_head as well, rather than keep the target's rows")

    epochs: float = Field(1.6, gt=0, description="passes over the documents")
    batch_tokens: int = Field(1024, ge=1, description="tokens of documents in a step")
    micro_batch_tokens: int | None = Field(
        None, ge=1, description="most tokens to compute at once, longer documents in parts; default: a step at once"
    )
    cod_ratio: float = Field(0.8, gt=0, le=1, description="share of chains that go on from one depth to the next")
    depth_decay: float = Field(1.0, gt=0, le=1, description="weight of depth d in the loss is this to the power of d")
    learning_rate: float = Field(7e-4, gt=0, description="its peak")
    final_learning_rate: float = Field(0.02, ge=0, le=1, description="share of the peak that is left at the end")
    warmup_steps: int = Field(50, ge=0, description="steps of linear rise")
    weight_decay: float = Field(0.01, ge=0, description="of the matrices")
    clip_norm: float = Field(1.0, gt=0, description="longest gradient")
    precision: Literal["bf16", "fp32"] = Field("bf16", description="of the products; weights are float32 always")
    seed: int = Field(0, ge=0, description="of first weights, data order and sampling")

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU where there is one")
    workers: int = Field(1, ge=1, description="processes that train together under Ray Train; 1 needs no Ray")
    worker_failures: int = Field(3, ge=0, description="deaths of workers after which the training gives up")
    time_budget_s: float | None = Field(None, gt=0, description="stop after that long; the same command goes on")
    num_speculative_tokens: int = Field(
        5, ge=1, le=32, description="K of the estimate, and of whoever serves the head without naming one"
    )
