"""Training checkpoints, written whole and refused by another training.

A checkpoint holds the trained weights, the optimizer and the step; data order and sampling follow from the seed and
the step, so nothing else is needed for the resumed curve to be the uninterrupted one.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peagle.errors import ConfigError

FILE = "checkpoint.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A training at a step.

    Attributes:
        step: optimizer steps done.
        weights: trained parameters by name.
        optimizer: its state dict.
        fingerprint: what was trained how; a resume must be equal in all of it.
        num_tokens: tokens seen.
        train_s: seconds of training behind it, over all attempts.
        metrics_bytes: length of the metrics file then.
    """

    step: int
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    fingerprint: dict[str, Any]
    num_tokens: int
    train_s: float
    metrics_bytes: int

    def copy_to(self, head: Any) -> None:
        """Put the weights into a head of the same shape."""
        parameters = dict(head.named_parameters())
        with torch.no_grad():
            for name, weight in self.weights.items():
                parameters[name].copy_(weight)


def save_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    """Write by rename, flushed first, so that a kill leaves the old or the new one."""
    partial = folder / (FILE + ".partial")
    with partial.open("wb") as stream:
        torch.save({name: getattr(checkpoint, name) for name in Checkpoint.__slots__}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(folder / FILE)


def has_checkpoint(folder: Path) -> bool:
    """Whether there is one in `folder`, of whatever training."""
    return (folder / FILE).is_file()


def saved_at(folder: Path) -> int | None:
    """When the checkpoint in `folder` was written, in ns; None without one."""
    return (folder / FILE).stat().st_mtime_ns if has_checkpoint(folder) else None


def load_checkpoint(folder: Path, fingerprint: dict[str, Any] | None = None) -> Checkpoint | None:
    """The checkpoint in `folder`, or None when there is none.

    Args:
        folder: of the training.
        fingerprint: what it must be a training of; None takes it whatever it is.

    Raises:
        ConfigError: it was trained on something else or otherwise; names what differs.
    """
    if not has_checkpoint(folder):
        return None
    raw = torch.load(folder / FILE, map_location="cpu", weights_only=True)
    checkpoint = Checkpoint(**raw)
    if fingerprint is None:
        return checkpoint
    stored = checkpoint.fingerprint
    changed = sorted(name for name in stored.keys() | fingerprint.keys() if stored.get(name) != fingerprint.get(name))
    if changed:
        raise ConfigError(
            f"{folder}: holds a training with another {', '.join(changed)}",
            hint="give the same options to go on with it, or another --output",
        )
    return checkpoint
