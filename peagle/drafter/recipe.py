"""The recipe of a training run: every number that a step depends on, and the documents of each step.

The order of documents is a pure function of the seed and the step. So a resumed training run, and every worker,
processes the same documents without communication.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from peagle.drafter.loss import Weighting


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """The numbers of a recipe, as in `TrainConfig`; None for `micro_batch_tokens` is a whole step."""

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
    """Shuffle one epoch's documents into batches of at least `batch_tokens`; the last may be smaller."""
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
    """The batches of all epochs in order, with a new shuffle per epoch."""

    def __init__(self, num_tokens: Sequence[int], *, batch_tokens: int, seed: int) -> None:
        self._num_tokens, self._batch_tokens, self._seed = num_tokens, batch_tokens, seed
        self._epochs: list[list[list[int]]] = []

    def documents(self, step: int) -> list[int]:
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
