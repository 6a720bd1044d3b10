"""The training loop of a head: one process, any device, resumable at every step.

A step is a pure function of the seed and its number: which documents (`plan_batches`), which rows (COD, seeded by the
step), which learning rate. So a killed training that goes on from its checkpoint retraces the uninterrupted curve. This
file knows stored features and a head; it knows nothing of prompts, engines or Ray.
"""

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from peagle.drafter.batch import Batch, make_batch
from peagle.drafter.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from peagle.drafter.cod import sample_rows
from peagle.drafter.forward import BatchLoss, batch_loss
from peagle.drafter.store import FeatureStore
from peagle.errors import ConfigError, PeagleError

METRICS = "metrics.jsonl"
PRECISIONS = ("bf16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """How a head is trained; the defaults are the recipe of the shipped head.

    Attributes:
        num_steps: optimizer steps, over which the learning rate rises and falls.
        batch_tokens: documents are added to a batch until it holds that many tokens.
        num_depths: K_train.
        cod_ratio: share of the chains that go on from one depth to the next.
        depth_decay: weight of a row at depth d is depth_decay ** d.
        learning_rate: its peak.
        final_learning_rate: share of the peak at the end of the cosine.
        warmup_steps: of linear rise.
        weight_decay: of matrices; norms and the mask state have none.
        clip_norm: of the gradient.
        precision: "bf16" autocast or "fp32".
        seed: of data order and sampling.
        checkpoint_every_s: seconds between checkpoints.
    """

    num_steps: int
    batch_tokens: int = 2048
    num_depths: int = 8
    cod_ratio: float = 0.8
    depth_decay: float = 1.0
    learning_rate: float = 1e-3
    final_learning_rate: float = 0.02
    warmup_steps: int = 50
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    precision: str = "bf16"
    seed: int = 0
    checkpoint_every_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_tokens", "num_depths", "learning_rate", "clip_norm"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 < self.cod_ratio <= 1:
            raise ConfigError(f"cod_ratio must be above 0 and at most 1, got {self.cod_ratio}")
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")

    def learning_rate_at(self, step: int) -> float:
        """Linear rise, then a cosine down to `final_learning_rate` of the peak."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.learning_rate * (self.final_learning_rate + (1 - self.final_learning_rate) * cosine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One step, as it stands in metrics.jsonl.

    Attributes:
        accuracy: by depth, share of rows whose likeliest token is the target's; None where there were no rows.
        divergence: by depth, mean KL divergence.
        tokens_per_s: of the documents, over this attempt.
    """

    step: int
    num_steps: int
    loss: float
    accuracy: tuple[float | None, ...]
    divergence: tuple[float | None, ...]
    learning_rate: float
    gradient_norm: float
    num_tokens: int
    tokens_per_s: float
    train_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOutcome:
    """How a training ended.

    Attributes:
        finished: False when the time budget ran out first; the same call goes on.
    """

    step: int
    finished: bool
    num_tokens: int
    train_s: float


def plan_batches(num_tokens: Sequence[int], *, batch_tokens: int, seed: int) -> list[list[int]]:
    """One epoch: every document once, shuffled, cut into batches of at least `batch_tokens` but for the last.

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


def train(
    head: Any,
    store: FeatureStore,
    documents: Sequence[int],
    config: TrainingConfig,
    folder: Path,
    *,
    fingerprint: dict[str, Any],
    device: torch.device | str = "cpu",
    time_budget_s: float | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> TrainingOutcome:
    """Train `head` in place, from the checkpoint in `folder` when there is one.

    Args:
        head: from `build_head`, on `device`.
        store: features of the target that the head is for.
        documents: indices in the store to train on.
        config: the recipe.
        folder: for checkpoint.pt and metrics.jsonl.
        fingerprint: whatever else must be equal for a resume: target, features, shape of the head.
        device: of the head.
        time_budget_s: stop after that many seconds of this attempt.
        progress: called after every step.

    Raises:
        ConfigError: the folder holds another training.
        PeagleError: the loss is not finite; the last checkpoint is from before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trainer = _Trainer(head, store, documents, config, folder, fingerprint, torch.device(device))
    started = saved = time.monotonic()
    while trainer.step < config.num_steps:
        progress(trainer.advance())
        now = time.monotonic()
        out_of_time = time_budget_s is not None and now - started >= time_budget_s
        if out_of_time or now - saved >= config.checkpoint_every_s:
            trainer.save()
            saved = now
        if out_of_time:
            break
    trainer.save()
    return TrainingOutcome(
        step=trainer.step,
        finished=trainer.step >= config.num_steps,
        num_tokens=trainer.num_tokens,
        train_s=trainer.train_s,
    )


class _Trainer:
    """The state of a training: weights, optimizer, step, and the metrics file."""

    def __init__(
        self,
        head: Any,
        store: FeatureStore,
        documents: Sequence[int],
        config: TrainingConfig,
        folder: Path,
        fingerprint: dict[str, Any],
        device: torch.device,
    ) -> None:
        self.head, self.store, self.config, self.folder, self.device = head, store, config, folder, device
        self.documents = list(documents)
        recipe = {name: value for name, value in asdict(config).items() if name != "checkpoint_every_s"}
        self.fingerprint = {**fingerprint, **recipe, "documents": len(self.documents)}
        self.parameters = {name: p for name, p in head.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(_groups(self.parameters, config), betas=(0.9, 0.95))
        self.lengths = [store.num_tokens(index) for index in self.documents]
        self.step = self.num_tokens = 0
        self.train_s = 0.0
        self._epochs: dict[int, list[list[int]]] = {}
        self._restore()
        self._attempt_tokens, self._attempt_s = 0, 0.0

    def advance(self) -> Progress:
        """One optimizer step."""
        started = time.monotonic()
        learning_rate = self.config.learning_rate_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        chosen = self._documents_of(self.step)
        batch = self._batch(chosen).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            outcome = batch_loss(
                self.head, batch, num_depths=self.config.num_depths, depth_decay=self.config.depth_decay
            )
        self._check_finite(outcome.loss, chosen)
        self.optimizer.zero_grad(set_to_none=True)
        outcome.loss.backward()  # type: ignore[no-untyped-call]
        gradient_norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.clip_norm)
        self._check_finite(gradient_norm, chosen)
        self.optimizer.step()
        return self._record(outcome, batch, learning_rate, float(gradient_norm), time.monotonic() - started)

    def save(self) -> None:
        """Write the checkpoint of this step."""
        checkpoint = Checkpoint(
            step=self.step,
            weights={name: parameter.detach().cpu() for name, parameter in self.parameters.items()},
            optimizer=self.optimizer.state_dict(),
            fingerprint=self.fingerprint,
            num_tokens=self.num_tokens,
            train_s=self.train_s,
            metrics_bytes=self._metrics.stat().st_size if self._metrics.exists() else 0,
        )
        save_checkpoint(checkpoint, self.folder)

    @property
    def _metrics(self) -> Path:
        return self.folder / METRICS

    def _restore(self) -> None:
        checkpoint = load_checkpoint(self.folder, self.fingerprint)
        if checkpoint is None:
            self._metrics.write_bytes(b"")
            return
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(checkpoint.weights[name])
        self.optimizer.load_state_dict(checkpoint.optimizer)
        self.step, self.num_tokens = checkpoint.step, checkpoint.num_tokens
        self.train_s = checkpoint.train_s
        with self._metrics.open("r+b") as stream:  # steps after the checkpoint will be done again
            stream.truncate(checkpoint.metrics_bytes)

    def _documents_of(self, step: int) -> list[int]:
        """The documents of a step, counting through the epochs."""
        epoch = 0
        while True:
            if epoch not in self._epochs:
                seed = self.config.seed * 1_000_003 + epoch
                batches = plan_batches(self.lengths, batch_tokens=self.config.batch_tokens, seed=seed)
                self._epochs[epoch] = batches
            if step < len(self._epochs[epoch]):
                return [self.documents[index] for index in self._epochs[epoch][step]]
            step -= len(self._epochs[epoch])
            epoch += 1

    def _batch(self, documents: list[int]) -> Batch:
        draws = (random.Random(f"{self.config.seed} {self.step} {index}") for index in documents)
        return make_batch(
            [self.store[index] for index in documents],
            lambda mask: sample_rows(
                mask,
                num_depths=self.config.num_depths,
                ratio=self.config.cod_ratio,
                generator=torch.Generator().manual_seed(next(draws).getrandbits(63)),
            ),
        )

    def _check_finite(self, value: torch.Tensor, documents: list[int]) -> None:
        if not torch.isfinite(value):
            raise PeagleError(
                f"step {self.step}: the loss is not finite; documents {documents}",
                hint=f"the last good checkpoint stays in {self.folder}; try a lower learning rate",
            )

    def _record(
        self, outcome: BatchLoss, batch: Batch, learning_rate: float, gradient_norm: float, step_s: float
    ) -> Progress:
        self.step += 1
        self.num_tokens += batch.num_tokens
        self.train_s += step_s
        self._attempt_tokens += batch.num_tokens
        self._attempt_s += step_s
        record = Progress(
            step=self.step,
            num_steps=self.config.num_steps,
            loss=float(outcome.loss.detach()),
            accuracy=_means(outcome.correct_D, outcome.rows_D),
            divergence=_means(outcome.divergence_D, outcome.rows_D),
            learning_rate=learning_rate,
            gradient_norm=gradient_norm,
            num_tokens=self.num_tokens,
            tokens_per_s=self._attempt_tokens / self._attempt_s,
            train_s=self.train_s,
        )
        with self._metrics.open("a") as stream:
            stream.write(json.dumps(asdict(record)) + "\n")
        return record


def _groups(parameters: dict[str, torch.Tensor], config: TrainingConfig) -> list[dict[str, Any]]:
    matrices = [p for name, p in parameters.items() if p.dim() == 2]
    others = [p for name, p in parameters.items() if p.dim() != 2]
    return [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def _means(sums: torch.Tensor, counts: torch.Tensor) -> tuple[float | None, ...]:
    return tuple(s / n if n else None for s, n in zip(sums.tolist(), counts.tolist(), strict=True))
