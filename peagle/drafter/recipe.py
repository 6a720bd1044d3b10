"""The recipe of a training: every number that a step depends on.

Also the documents that each step takes.

The order of documents is a pure function of the seed and the step, so a resumed training and every worker of several
find the same documents without being told.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from peagle.drafter.loss import DEFAULT_LOSS, LOSSES, Weighting
from peagle.errors import ConfigError

PRECISIONS = ("bf16", "fp32")
OPTIMIZERS = ("muon", "adamw")
DEPTH_WEIGHTS = ("fixed", "dpace")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """How a head is trained; the defaults are the best recipe found so far.

    Attributes:
        num_steps: optimizer steps, over which the learning rate rises and falls.
        batch_tokens: documents are added to a step until it holds that many tokens.
        micro_batch_tokens: most tokens of documents whose gradients are computed at once; a document of N times as many
            is computed in N parts (micro.py). It saves memory and changes nothing else. None: a step at once.
        num_depths: K_train.
        cod_ratio: share of the chains that go on from one depth to the next.
        depth_decay: weight of a row at depth d is depth_decay ** d.
        depth_weight: "dpace" multiplies it by what the row adds to the length of an accepted draft (weighting.py),
            "fixed" leaves it.
        loss: of a row, one of `LOSSES` (loss.py).
        optimizer: "muon" for the matrices of the layers and AdamW for the rest, or "adamw" for all.
        learning_rate: AdamW's peak.
        muon_learning_rate: Muon's peak, for updates of AdamW's size (Moonlight's scale, `match_rms_adamw`).
        final_learning_rate: share of the peak at the end of the cosine.
        warmup_steps: of linear rise.
        weight_decay: of matrices; norms and the mask state have none.
        clip_norm: of the gradient.
        precision: "bf16" autocast or "fp32".
        seed: of data order and sampling.
        checkpoint_every_s: seconds between checkpoints.
    """

    num_steps: int
    batch_tokens: int = 1024
    micro_batch_tokens: int | None = None
    num_depths: int = 8
    cod_ratio: float = 0.8
    depth_decay: float = 1.0
    depth_weight: str = "fixed"
    loss: str = DEFAULT_LOSS
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
        for name, known in (
            ("precision", PRECISIONS),
            ("optimizer", OPTIMIZERS),
            ("depth_weight", DEPTH_WEIGHTS),
            ("loss", LOSSES),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")

    @property
    def weighting(self) -> Weighting:
        """The weight of a row in the loss."""
        return Weighting(depth_decay=self.depth_decay, dpace=self.depth_weight == "dpace", cod_ratio=self.cod_ratio)

    def learning_rate_at(self, step: int) -> float:
        """AdamW's: linear rise, then a cosine down to `final_learning_rate` of the peak."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.learning_rate * (self.final_learning_rate + (1 - self.final_learning_rate) * cosine)


def plan_batches(num_tokens: Sequence[int], *, batch_tokens: int, seed: int) -> list[list[int]]:
    """One epoch's batches of at least `batch_tokens`, except the last.

    Every document once, shuffled.

    Args:
        num_tokens: length of each document.
        batch_tokens: when a batch is full.
        seed: of the order.
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
    """The batches of all epochs in order, each epoch shuffled anew.

    Args:
        num_tokens: length of each document.
        batch_tokens: when a batch is full.
        seed: of the training.
    """

    def __init__(self, num_tokens: Sequence[int], *, batch_tokens: int, seed: int) -> None:
        self._num_tokens, self._batch_tokens, self._seed = num_tokens, batch_tokens, seed
        self._epochs: list[list[list[int]]] = []

    def documents(self, step: int) -> list[int]:
        """The places of the documents of a step, counting through the epochs."""
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
