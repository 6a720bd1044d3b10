"""Training checkpoints.

A checkpoint contains the trained weights, the optimizer and the step. Data order and sampling follow from the seed and
the step, so a resumed training continues the uninterrupted curve.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peagle.errors import ConfigError
from peagle.files import atomic_file, remove_temporaries

FILE = "checkpoint.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The state of a training at a step.

    Attributes:
        step: finished optimizer steps.
        weights: trained parameters by name.
        fingerprint: the settings that a resumed training must share.
        num_tokens: tokens seen.
        train_s: seconds of training over all attempts.
        metrics_bytes: length of the metrics file.
    """

    step: int
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    fingerprint: dict[str, Any]
    num_tokens: int
    train_s: float
    metrics_bytes: int

    def copy_to(self, head: Any) -> None:
        """Copy the weights into a head of the same shape."""
        parameters = dict(head.named_parameters())
        with torch.no_grad():
            for name, weight in self.weights.items():
                parameters[name].copy_(weight)


def save_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    remove_temporaries(folder)  # of killed trainings: they are large
    with atomic_file(folder / FILE) as stream:
        torch.save({name: getattr(checkpoint, name) for name in Checkpoint.__slots__}, stream)


def has_checkpoint(folder: Path) -> bool:
    return (folder / FILE).is_file()


def saved_at(folder: Path) -> int | None:
    """Return when the checkpoint was written, in ns; None without a checkpoint."""
    return (folder / FILE).stat().st_mtime_ns if has_checkpoint(folder) else None


def load_checkpoint(folder: Path, fingerprint: dict[str, Any] | None = None) -> Checkpoint | None:
    """Return the checkpoint in `folder`, or None if there is no checkpoint.

    Args:
        fingerprint: the expected fingerprint; None accepts any.
    """
    if not has_checkpoint(folder):
        return None
    raw = torch.load(folder / FILE, map_location="cpu", weights_only=True)
    checkpoint = Checkpoint(**raw)
    if fingerprint is None:
        return checkpoint
    stored = checkpoint.fingerprint
    # Earlier versions stored how new layers were initialised. A checkpoint has their weights, so it makes no
    # difference.
    if isinstance(stored.get("head"), dict):
        stored["head"].pop("further_layers", None)
    changed = sorted(name for name in stored.keys() | fingerprint.keys() if stored.get(name) != fingerprint.get(name))
    if changed:
        raise ConfigError(
            f"{folder}: the training there has a different {', '.join(changed)}",
            hint="use the same options to resume it, or another --output",
        )
    return checkpoint
