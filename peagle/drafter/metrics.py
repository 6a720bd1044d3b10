"""The figures of a training, step by step: a JSON line each in metrics.jsonl.

Written by the training, cut back when it resumes, followed by whoever shows progress while it grows, and read whole for
the plot. It knows lines; it knows nothing of how a step is computed.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peagle.plain_json import to_json

METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One step, as it stands in metrics.jsonl.

    Attributes:
        accuracy: by depth, share of rows whose likeliest token is the target's; None where there were no rows.
        accepted: by depth, share of rows of which that is so and of all rows before them in their chain. An engine
            takes the drafts up to the first wrong one.
        divergence: by depth, mean KL divergence.
        loss: with D-PACE only to be compared with itself: the weights move.
        tokens_per_s: of the documents, over this attempt.
    """

    step: int
    num_steps: int
    loss: float
    accuracy: tuple[float | None, ...]
    accepted: tuple[float | None, ...]
    divergence: tuple[float | None, ...]
    learning_rate: float
    gradient_norm: float
    num_tokens: int
    tokens_per_s: float
    train_s: float

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "Progress":
        """What a line of the file says."""
        return cls(**{**raw, **{name: tuple(raw[name]) for name in ("accuracy", "accepted", "divergence")}})


class Metrics:
    """The metrics file in the folder of a training."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / METRICS

    @property
    def num_bytes(self) -> int:
        """Its length; 0 where there is none."""
        return self._file.stat().st_size if self._file.exists() else 0

    def append(self, progress: Progress) -> None:
        """Add a step."""
        with self._file.open("a") as stream:
            stream.write(to_json(asdict(progress)) + "\n")

    def cut(self, num_bytes: int) -> None:
        """Drop what stands behind `num_bytes`: steps that will be done again. A file that was lost begins anew."""
        if not num_bytes or not self._file.exists():
            self._file.write_bytes(b"")
            return
        with self._file.open("r+b") as stream:
            stream.truncate(min(num_bytes, self.num_bytes))

    def read(self, start: int = 0) -> tuple[list[Progress], int]:
        """The steps behind byte `start`, and the byte behind the last of them.

        A line that is still being written is left for the next call. A resume cuts the file back and writes on, also
        beyond `start`, which may then lie within a line: reading goes on from the next one.
        """
        start = min(start, self.num_bytes)
        if not self._file.exists():
            return [], start
        with self._file.open("rb") as stream:
            stream.seek(max(0, start - 1))
            if start and stream.read(1) != b"\n":
                start += len(stream.readline())
            new = stream.read()
        whole = new[: new.rfind(b"\n") + 1]
        return [Progress.from_dict(json.loads(line)) for line in whole.splitlines()], start + len(whole)
