"""The training of a head: recipe, workers, checkpoints, micro-batches, optimizer and loop.

The documents, the rows (`batch.py`) and the learning rate of a step depend only on the seed and the step. So a
training run that resumes from a checkpoint reproduces the loss curve of an uninterrupted run. Likewise, several
workers, each with a share of a step's documents, reproduce the loss curve of a single worker.

Micro-batches save memory: gradients of a step are summed over parts of at most `micro_batch_tokens`, and a longer
document is split by ranges of anchors.
"""

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from peagle.drafter.batch import Rows, TrainingBatch, make_batch, sample_blocks, sample_rows
from peagle.drafter.features import Features
from peagle.drafter.forward import BatchLoss, batch_loss
from peagle.drafter.loss import Weighting, fixed_weight
from peagle.drafter.metrics import Metrics, TrainingProgress
from peagle.errors import ConfigError, DivergedError
from peagle.files import atomic_file, converted_write_errors, remove_temporaries
from peagle.malloc import trim_malloc

# --- recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """The settings of the training loop, from the options in `TrainConfig`."""

    num_steps: int
    batch_tokens: int = 1024
    micro_batch_tokens: int | None = None
    num_depths: int = 8
    cod_ratio: float = 0.8
    anchor_share: float | None = None  # for block heads; None for other heads
    depth_decay: float = 1.0
    depth_weight: str = "fixed"
    optimizer: str = "muon"
    learning_rate: float = 7e-4
    muon_learning_rate: float = 3.5e-3
    final_learning_rate: float = 0.02  # relative to the peak
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
        """Return AdamW's learning rate: a linear rise, then a cosine to `final_learning_rate` times the peak."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.learning_rate * (self.final_learning_rate + (1 - self.final_learning_rate) * cosine)


def plan_batches(num_tokens: Sequence[int], *, batch_tokens: int, seed: int) -> list[list[int]]:
    """Shuffle one epoch's documents into batches of at least `batch_tokens`; the last may be smaller."""
    shuffled = list(range(len(num_tokens)))
    random.Random(seed).shuffle(shuffled)
    batches: list[list[int]] = [[]]
    batch_size = 0
    for index in shuffled:
        if batch_size >= batch_tokens:
            batches.append([])
            batch_size = 0
        batches[-1].append(index)
        batch_size += num_tokens[index]
    return batches


class EpochOrder:
    """The batches of all epochs in order, with a new shuffle per epoch."""

    def __init__(self, num_tokens: Sequence[int], *, batch_tokens: int, seed: int) -> None:
        self._num_tokens, self._batch_tokens, self._seed = num_tokens, batch_tokens, seed
        self._epochs: list[list[list[int]]] = []

    def batch(self, step: int) -> list[int]:
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


# --- workers


class SingleProcess:
    """Communication between the worker processes of a training run, here for a single process."""

    rank = 0
    size = 1

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor with its sum over all workers."""

    def broadcast_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor with the first worker's tensor."""

    def agree(self, stop: bool) -> bool:
        """Return the first worker's value, so that all workers stop at the same step."""
        return stop

    def barrier(self) -> None:
        """Wait until all workers have called this."""


class ProcessGroup(SingleProcess):
    """A worker of torch.distributed's default process group (gloo on CPU, nccl on CUDA)."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.rank = torch.distributed.get_rank()
        self.size = torch.distributed.get_world_size()
        self._device = torch.device(device)

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        # One message per dtype, since many small messages are slow. Dtypes are in the order of the tensors, not of a
        # set, whose order may differ between processes, so that messages would not match.
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same_dtype = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.flatten() for tensor in same_dtype])
            torch.distributed.all_reduce(flat)
            with torch.no_grad():
                sums = torch.split(flat, [tensor.numel() for tensor in same_dtype])
                for tensor, summed in zip(same_dtype, sums, strict=True):
                    tensor.copy_(summed.view_as(tensor))

    def broadcast_(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            torch.distributed.broadcast(tensor.detach(), src=0)

    def agree(self, stop: bool) -> bool:
        value = torch.tensor([float(stop)], device=self._device)
        torch.distributed.broadcast(value, src=0)
        return bool(value.item())

    def barrier(self) -> None:
        torch.distributed.barrier()


# --- checkpoints

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The state of a training run at a step."""

    step: int
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    fingerprint: dict[str, Any]  # the settings that must be equal to resume
    num_tokens: int  # in all steps so far
    train_s: float
    metrics_bytes: int

    def copy_to(self, head: Any) -> None:
        parameters = dict(head.named_parameters())
        with torch.no_grad():
            for name, weight in self.weights.items():
                parameters[name].copy_(weight)


def save_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    remove_temporaries(folder)  # large temporary files left behind by killed training runs
    with atomic_file(folder / CHECKPOINT) as stream:
        torch.save({name: getattr(checkpoint, name) for name in Checkpoint.__slots__}, stream)


def checkpoint_mtime_ns(folder: Path) -> int | None:
    """Return when the checkpoint was written; None without a checkpoint."""
    return (folder / CHECKPOINT).stat().st_mtime_ns if (folder / CHECKPOINT).is_file() else None


def load_checkpoint(folder: Path, fingerprint: dict[str, Any] | None = None) -> Checkpoint | None:
    if not (folder / CHECKPOINT).is_file():
        return None
    checkpoint = Checkpoint(**torch.load(folder / CHECKPOINT, map_location="cpu", weights_only=True))
    if fingerprint is None:
        return checkpoint
    stored = checkpoint.fingerprint
    if isinstance(stored.get("head"), dict):  # earlier versions also stored how new layers were initialised
        stored["head"].pop("further_layers", None)
    changed = sorted(name for name in stored.keys() | fingerprint.keys() if stored.get(name) != fingerprint.get(name))
    if changed:
        raise ConfigError(
            f"{folder}: the existing training run has a different {', '.join(changed)}",
            hint="use the same options to resume it, or another --output",
        )
    return checkpoint


def micro_batches(
    store: Features, documents: Sequence[int], config: TrainingConfig, *, step: int
) -> Iterator[TrainingBatch]:
    """Yield the micro-batches of a step, with at most `config.micro_batch_tokens` tokens each."""
    limit = config.micro_batch_tokens
    packed: list[int] = []
    for index in documents:
        tokens = store.num_tokens(index)
        if limit is not None and tokens > limit:
            (document,) = store.documents([index])
            rows = _sample(document.loss_mask_T, index, config, step)
            first: TrainingBatch | None = None  # all parts share its tensors of the document, to save memory
            for rows_part in partition_rows(rows, -(-tokens // limit)):
                batch = make_batch([document], [rows_part])
                first = first or batch
                yield replace(batch, token_ids_T=first.token_ids_T, aux_TAH=first.aux_TAH, last_PH=first.last_PH)
        else:
            if limit is not None and packed and tokens + sum(map(store.num_tokens, packed)) > limit:
                yield sampled_batch(store, packed, config, step)
                packed = []
            packed.append(index)
    if packed:
        yield sampled_batch(store, packed, config, step)


def partition_rows(rows: Rows, num_parts: int) -> list[Rows]:
    """Split a document's rows by ranges of anchors into parts of about equal length.

    Each part contains the rows of its anchors. Unless the rows are blocks, it also contains the known tokens before
    these anchors, which have no loss (`Rows.first_anchor`).
    """
    last_anchor = int(rows.anchor_S[-1]) if len(rows) > rows.num_known else rows.num_known - 1
    cumulative_rows = torch.bincount(rows.anchor_S, minlength=rows.num_known).cumsum(0)
    ends = torch.arange(1, num_parts) * int(cumulative_rows[-1]) // num_parts
    boundaries = [0, *torch.searchsorted(cumulative_rows, ends).add(1).tolist(), max(rows.num_known, last_anchor + 1)]
    parts = []
    for start, stop in itertools.pairwise(boundaries):
        if start < stop:
            own_rows = (rows.anchor_S >= start) & (rows.anchor_S < stop)
            known_rows = (rows.depth_S == 0) & (rows.anchor_S < start) & (not rows.is_blocks)
            chosen = torch.nonzero(own_rows | known_rows).flatten()
            parts.append(
                replace(rows, anchor_S=rows.anchor_S[chosen], depth_S=rows.depth_S[chosen], first_anchor=start)
            )
    return parts


def sampled_batch(store: Features, documents: Sequence[int], config: TrainingConfig, step: int) -> TrainingBatch:
    """Pack whole documents, with rows sampled for a step."""
    loaded = store.documents(documents)
    masks = [document.loss_mask_T for document in loaded]
    return make_batch(
        loaded, [_sample(mask, index, config, step) for index, mask in zip(documents, masks, strict=True)]
    )


def _sample(loss_mask_T: torch.Tensor, index: int, config: TrainingConfig, step: int) -> Rows:
    seed = random.Random(f"{config.seed} {step} {index}").getrandbits(63)
    generator = torch.Generator().manual_seed(seed)
    if config.anchor_share is not None:
        return sample_blocks(
            loss_mask_T[1:], num_depths=config.num_depths, share=config.anchor_share, generator=generator
        )
    return sample_rows(loss_mask_T[1:], num_depths=config.num_depths, ratio=config.cod_ratio, generator=generator)


# Matrices with a row per token of the vocabulary.
_TABLES = ("embed_tokens.weight", "lm_head.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight")


class HeadOptimizer:
    """Muon (Jordan et al. 2024) for matrices; AdamW for vectors and `_TABLES`."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], config: TrainingConfig) -> None:
        is_muon = config.optimizer == "muon"
        matrices = [p for name, p in parameters.items() if p.dim() == 2 and name not in _TABLES]
        tables = [p for name, p in parameters.items() if p.dim() == 2 and name in _TABLES]
        vectors = [p for p in parameters.values() if p.dim() != 2]
        adamw_parameters = [tables if is_muon else tables + matrices, vectors]
        decays = (config.weight_decay, 0.0)
        groups = [{"params": p, "weight_decay": d} for p, d in zip(adamw_parameters, decays, strict=True) if p]
        self._optimizers: dict[torch.optim.Optimizer, float] = {}  # with learning rates relative to AdamW's
        if groups:
            self._optimizers[torch.optim.AdamW(groups, betas=(0.9, 0.95))] = 1.0
        if is_muon and matrices:
            muon = torch.optim.Muon(matrices, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
            self._optimizers[muon] = config.muon_learning_rate / config.learning_rate

    def set_learning_rate(self, learning_rate: float) -> None:
        for optimizer, ratio in self._optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * ratio

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {type(optimizer).__name__: optimizer.state_dict() for optimizer in self._optimizers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for optimizer in self._optimizers:
            optimizer.load_state_dict(state[type(optimizer).__name__])


_DISK_FULL_HINT = "free some space, then repeat the command to resume from the last checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOutcome:
    """The result of a training run."""

    step: int
    finished: bool  # False if the time budget ran out first; the same call resumes
    num_tokens: int
    train_s: float


def train(
    head: Any,
    store: Features,
    documents: Sequence[int],
    config: TrainingConfig,
    folder: Path,
    *,
    fingerprint: dict[str, Any],
    device: torch.device | str = "cpu",
    workers: SingleProcess | None = None,
    time_budget_s: float | None = None,
    name_of: Callable[[int], str] = str,
    progress: Callable[[TrainingProgress], None] = lambda _: None,
    on_save: Callable[[], None] = lambda: None,
) -> TrainingOutcome:
    """Train `head` in place, starting from the checkpoint in `folder` if it exists.

    Args:
        fingerprint: the target, features and head shape, which must be equal to resume, as must most of `config`.
        name_of: returns a document's name for error messages.
        workers: the process group, if several processes train together, each with the same arguments.
    """
    folder.mkdir(parents=True, exist_ok=True)
    workers = workers or SingleProcess()
    trainer = _Trainer(head, store, documents, config, folder, fingerprint, torch.device(device), workers, name_of)
    started = last_save = time.monotonic()
    while trainer.step < config.num_steps:
        # Treat numbers below 1e-38 as zero. Attention to a single row produces many, and they are slow on a CPU.
        torch.set_flush_denormal(True)
        try:
            record = trainer.advance()
        finally:
            torch.set_flush_denormal(False)
        if workers.rank == 0:
            progress(record)
        now = time.monotonic()
        is_out_of_time = workers.agree(time_budget_s is not None and now - started >= time_budget_s)
        if is_out_of_time or now - last_save >= config.checkpoint_every_s:
            trainer.save()
            on_save()
            last_save = now
        if is_out_of_time:
            break
    trainer.save()
    on_save()
    return TrainingOutcome(
        step=trainer.step,
        finished=trainer.step >= config.num_steps,
        num_tokens=trainer.num_tokens,
        train_s=trainer.train_s,
    )


# These settings do not change the result of a step, so they may differ when a training run is resumed.
_NON_SEMANTIC_KEYS = ("checkpoint_every_s", "micro_batch_tokens")


class _Trainer:
    def __init__(
        self,
        head: Any,
        store: Features,
        documents: Sequence[int],
        config: TrainingConfig,
        folder: Path,
        fingerprint: dict[str, Any],
        device: torch.device,
        workers: SingleProcess,
        name_of: Callable[[int], str],
    ) -> None:
        self.head, self.store, self.config, self.folder, self.device = head, store, config, folder, device
        self.workers, self.name_of = workers, name_of
        self.documents = list(documents)
        recipe = {name: value for name, value in asdict(config).items() if name not in _NON_SEMANTIC_KEYS}
        self.fingerprint = {**fingerprint, **recipe, "documents": len(self.documents)}
        self.parameters = {name: p for name, p in head.named_parameters() if p.requires_grad}
        self.optimizer = HeadOptimizer(self.parameters, config)
        lengths = [store.num_tokens(index) for index in self.documents]
        self.epoch_order = EpochOrder(lengths, batch_tokens=config.batch_tokens, seed=config.seed)
        self.metrics = Metrics(folder)
        self.step = self.num_tokens = 0
        self.train_s = 0.0
        self._restore()
        workers.broadcast_(list(self.parameters.values()))  # initial weights differ between kinds of processors
        self._attempt_tokens, self._attempt_s = 0, 0.0  # since this process started

    def advance(self) -> TrainingProgress:
        started = time.monotonic()
        learning_rate = self.config.learning_rate_at(self.step)
        self.optimizer.set_learning_rate(learning_rate)
        self._read_ahead()
        chosen = self._documents(self.step)
        self.optimizer.zero_grad()
        outcome, num_tokens = self._accumulate_gradients(chosen)
        self._check_finite("loss", outcome.loss, chosen)
        gradient_norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.clip_norm)
        self._check_finite("gradient norm", gradient_norm, chosen)
        self.optimizer.step()
        return self._record(outcome, num_tokens, learning_rate, float(gradient_norm), time.monotonic() - started)

    def _documents(self, step: int) -> list[int]:
        return [self.documents[index] for index in self.epoch_order.batch(step)]

    def _read_ahead(self) -> None:
        """Compute the target's states for the documents of several steps together.

        The grouping depends only on the step numbers, so that a resumed training run computes the same groups.
        """
        num_steps = self.store.tokens_ahead * self.workers.size // self.config.batch_tokens
        if num_steps < 2 or not (self.step % num_steps == 0 or self._attempt_tokens == 0):
            return
        first = self.step - self.step % num_steps
        steps = range(first, min(first + num_steps, self.config.num_steps))
        self.store.read_ahead([index for step in steps for index in self._own_share(self._documents(step))])

    def _own_share(self, chosen: list[int]) -> list[int]:
        return chosen[self.workers.rank :: self.workers.size]

    def _accumulate_gradients(self, chosen: list[int]) -> tuple[BatchLoss, int]:
        batches = list(micro_batches(self.store, self._own_share(chosen), self.config, step=self.step))
        total_weight = torch.zeros((), device=self.device)
        for batch in batches:
            total_weight += fixed_weight(batch, self.config.weighting).sum().to(self.device)
        self.workers.sum_([total_weight])
        total = BatchLoss.zeros(self.config.num_depths, self.device)
        for batch in batches:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
                outcome = batch_loss(
                    self.head,
                    batch.to(self.device),
                    num_depths=self.config.num_depths,
                    weighting=self.config.weighting,
                    total_weight=total_weight,
                )
            outcome.loss.backward()  # type: ignore[no-untyped-call]
            total = total + outcome
            if len(batches) > 1 and self.device.type == "cpu":
                trim_malloc()  # tensor sizes differ between parts, which fragments memory
        num_tokens = sum(self.store.num_tokens(index) for index in chosen)
        for parameter in self.parameters.values():
            if parameter.grad is None:  # this worker has no document in this step
                parameter.grad = torch.zeros_like(parameter)
        self.workers.sum_([parameter.grad for parameter in self.parameters.values() if parameter.grad is not None])
        self.workers.sum_([total.loss, total.correct_D, total.accepted_D, total.rows_D, total.divergence_D])
        return total, num_tokens

    def save(self) -> None:
        if self.workers.rank:
            return
        checkpoint = Checkpoint(
            step=self.step,
            weights={name: parameter.detach().cpu() for name, parameter in self.parameters.items()},
            optimizer=self.optimizer.state_dict(),
            fingerprint=self.fingerprint,
            num_tokens=self.num_tokens,
            train_s=self.train_s,
            metrics_bytes=self.metrics.num_bytes,
        )
        with converted_write_errors(self.folder, RuntimeError, hint=_DISK_FULL_HINT):
            save_checkpoint(checkpoint, self.folder)

    def _restore(self) -> None:
        checkpoint = load_checkpoint(self.folder, self.fingerprint)
        self.workers.barrier()  # all workers must have read the checkpoint before a worker writes it
        if self.workers.rank == 0:
            self.metrics.truncate(checkpoint.metrics_bytes if checkpoint else 0)
        if checkpoint is None:
            return
        checkpoint.copy_to(self.head)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        self.step, self.num_tokens = checkpoint.step, checkpoint.num_tokens
        self.train_s = checkpoint.train_s

    def _check_finite(self, name: str, value: torch.Tensor, documents: list[int]) -> None:
        if not torch.isfinite(value):
            raise DivergedError(
                f"step {self.step}: the {name} is not finite; documents {', '.join(map(self.name_of, documents))}",
                hint=f"the checkpoint in {self.folder} is from an earlier step",
            )

    def _record(
        self, outcome: BatchLoss, num_tokens: int, learning_rate: float, gradient_norm: float, step_s: float
    ) -> TrainingProgress:
        self.step += 1
        self.num_tokens += num_tokens
        self.train_s += step_s
        self._attempt_tokens += num_tokens
        self._attempt_s += step_s
        record = TrainingProgress(
            step=self.step,
            num_steps=self.config.num_steps,
            loss=float(outcome.loss.detach()),
            accuracy=_means(outcome.correct_D, outcome.rows_D),
            accepted=_means(outcome.accepted_D, outcome.rows_D),
            divergence=_means(outcome.divergence_D, outcome.rows_D),
            learning_rate=learning_rate,
            gradient_norm=gradient_norm,
            num_tokens=self.num_tokens,
            tokens_per_s=self._attempt_tokens / self._attempt_s,
            train_s=self.train_s,
        )
        if self.workers.rank == 0:
            with converted_write_errors(self.folder, hint=_DISK_FULL_HINT):
                self.metrics.append(record)
        return record


def _means(sums: torch.Tensor, counts: torch.Tensor) -> tuple[float | None, ...]:
    return tuple(s / n if n else None for s, n in zip(sums.tolist(), counts.tolist(), strict=True))
