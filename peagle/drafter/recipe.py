"""The recipe of a training: every number that a step depends on, and the documents of each step.

The order of documents is a pure function of the seed and the step, so that a resumed training and every worker process
the same documents without communication.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from peagle.drafter.loss import Weighting
from peagle.errors import ConfigError

PRECISIONS = ("bf16", "fp32")
OPTIMIZERS = ("muon", "adamw")
DEPTH_WEIGHTS = ("fixed", "dpace")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """The recipe; its defaults are the best found so far.

    Attributes:
        num_steps: optimizer steps, over which the learning rate rises and falls.
        batch_tokens: documents are added to a step until it has this many tokens.
        micro_batch_tokens: maximum tokens whose gradients are computed together; a longer document is split
            (`training.py`). Saves memory; the gradients stay the same. None: a whole step.
        num_depths: K_train.
        cod_ratio: share of chains that continue from one depth to the next.
        depth_decay: the weight of a row at depth d is depth_decay ** d.
        depth_weight: "dpace" multiplies it by the row's D-PACE weight (`loss.py`), "fixed" does not.
        optimizer: "muon" for the matrices of the layers and AdamW for the rest, or "adamw" for all.
        learning_rate: AdamW's peak.
        muon_learning_rate: Muon's peak, for updates of AdamW's size (Moonlight's scale, `match_rms_adamw`).
        final_learning_rate: share of the peak at the end of the cosine.
        warmup_steps: steps of linear rise.
        weight_decay: for matrices; norms and the mask state have none.
        clip_norm: maximum gradient norm.
        precision: "bf16" autocast or "fp32".
        seed: for data order and sampling.
    """

    num_steps: int
    batch_tokens: int = 1024
    micro_batch_tokens: int | None = None
    num_depths: int = 8
    cod_ratio: float = 0.8
    depth_decay: float = 1.0
    depth_weight: str = "fixed"
    optimizer: str = "muon"
    learning_rate: float = 7e-4
    muon_learning_rate: float = 3.5e-3
    final_learning_rate: float = 0.02
    warmup_steps: int = 50
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    precision: str = "bf16"
    seed: int = 0
    checkpoint_every_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_tokens", "num_depths", "learning_rate", "muon_learning_rate", "clip_norm"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 < self.cod_ratio <= 1:
            raise ConfigError(f"cod_ratio must be above 0 and at most 1, got {self.cod_ratio}")
        if self.micro_batch_tokens is not None and self.micro_batch_tokens < 1:
            raise ConfigError(f"micro_batch_tokens must be positive, got {self.micro_batch_tokens}")
        choices = {"precision": PRECISIONS, "optimizer": OPTIMIZERS, "depth_weight": DEPTH_WEIGHTS}
        for name, valid in choices.items():
            if getattr(self, name) not in valid:
                raise ConfigError(f"{name} must be one of {', '.join(valid)}, got {getattr(self, name)!r}")

    @property
    def weighting(self) -> Weighting:
        return Weighting(depth_decay=self.depth_decay, dpace=self.depth_weight == "dpace", cod_ratio=self.cod_ratio)

    def learning_rate_at(self, step: int) -> float:
        """Return AdamW's learning rate: a linear rise, then a cosine to `final_learning_rate` of the peak."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.learning_rate * (self.final_learning_rate + (1 - self.final_learning_rate) * cosine)


def plan_batches(num_tokens: Sequence[int], *, batch_tokens: int, seed: int) -> list[list[int]]:
    """Shuffle one epoch's documents into batches of at least `batch_tokens`; the last may be smaller.

    Args:
        num_tokens: length of each document.
    """
    order = list(range(len(num_tokens)))
    random.Random(seed).shuffle(order)
    batches: list[list[int]] = [[]]
    filled = 0
    for index in order:
        if filled >= batch_tokens:
            batches.append([])
            filled = 0
        batches[-1].append(index)
        filled += num_tokens[index]
    return batches


class EpochOrder:
    """The batches of all epochs in order, with a new shuffle per epoch.

    Args:
        num_tokens: length of each document.
    """

    def __init__(self, num_tokens: Sequence[int], *, batch_tokens: int, seed: int) -> None:
        self._num_tokens, self._batch_tokens, self._seed = num_tokens, batch_tokens, seed
        self._epochs: list[list[list[int]]] = []

    def documents(self, step: int) -> list[int]:
        """Return the indices of a step's documents; steps count through all epochs."""
        epoch = 0
        while step >= len(self._epoch(epoch)):
            step -= len(self._epoch(epoch))
            epoch += 1
        return self._epoch(epoch)[step]

    def _epoch(self, epoch: int) -> list[list[int]]:
        while len(self._epochs) <= epoch:
            seed = self._seed * 1_000_003 + len(self._epochs)
            self._epochs.append(plan_batches(self._num_tokens, batch_tokens=self._batch_tokens, seed=seed))
        return self._epochs[epoch]
