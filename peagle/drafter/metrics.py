"""The metrics of a training run, step by step, in metrics.jsonl, and their plot.

The loss of single steps is noisy, so each point of the plot is the mean of several steps. The curves of all depths
share one colour, which is paler at greater depths. The number at the end of a curve is its depth.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peagle.charts import HEIGHT, LEFT, RIGHT, WIDTH, drawing, grid_line, spread_labels, standalone, text, x_axis_name
from peagle.plain_json import to_json

METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgress:
    """A line of metrics.jsonl."""

    step: int
    num_steps: int
    loss: float  # with D-PACE only comparable to other D-PACE losses, since the weights change
    # For each depth, the share of drafts whose token is the target's most likely token; None without drafts.
    accuracy: tuple[float | None, ...]
    # For each depth, the share of drafts whose tokens up to this depth are all correct, so that an engine would accept
    # the token at this depth.
    accepted: tuple[float | None, ...]
    divergence: tuple[float | None, ...]  # mean KL divergence for each depth
    learning_rate: float
    gradient_norm: float
    num_tokens: int
    tokens_per_s: float  # document tokens per second of this attempt
    train_s: float

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "TrainingProgress":
        return cls(**{**raw, **{name: tuple(raw[name]) for name in ("accuracy", "accepted", "divergence")}})


class Metrics:
    def __init__(self, folder: Path) -> None:
        self._file = folder / METRICS

    @property
    def num_bytes(self) -> int:
        return self._file.stat().st_size if self._file.exists() else 0

    def append(self, progress: TrainingProgress) -> None:
        with self._file.open("a") as stream:
            stream.write(to_json(asdict(progress)) + "\n")

    def truncate(self, num_bytes: int) -> None:
        """Truncate the file to `num_bytes`, to drop steps that will be repeated. Creates the file if it is missing."""
        with self._file.open("ab") as stream:
            stream.truncate(min(num_bytes, self.num_bytes))

    def read(self, start: int = 0) -> tuple[list[TrainingProgress], int]:
        """Return the steps after byte `start`, and the offset for the next call.

        An incomplete last line is left for the next call. If a resumed run has truncated the file, `start` may be
        within a line; then reading continues with the next line.
        """
        start = min(start, self.num_bytes)
        if not self._file.exists():
            return [], start
        with self._file.open("rb") as stream:
            stream.seek(max(0, start - 1))
            if start and stream.read(1) != b"\n":
                start += len(stream.readline())
            data = stream.read()
        complete = data[: data.rfind(b"\n") + 1]
        return [TrainingProgress.from_dict(json.loads(line)) for line in complete.splitlines()], start + len(complete)


PLOT = "metrics.svg"

_MAX_POINTS = 100
_TOP, _BOTTOM, _GAP = 24, 18, 12  # space for a panel's name and its step labels, and between panels
_LOSS_HEIGHT, _ACCURACY_HEIGHT, _RATE_HEIGHT = HEIGHT - 60, HEIGHT - 20, 96
_NUMBER_WIDTH = 16  # at the right, for the numbers of the depths
_PALEST = 0.3  # opacity of the curve of the greatest depth
_ROUND_FACTORS = (1, 2, 2.5, 5, 10)

Curve = list[tuple[float, float | None]]


def training_plot(steps: Sequence[TrainingProgress]) -> str:
    last = steps[-1]
    window_steps = math.ceil(len(steps) / _MAX_POINTS)
    windows = [range(start, min(start + window_steps, len(steps))) for start in range(0, len(steps), window_steps)]
    loss = _curve(windows, [step.loss for step in steps])
    rate = _curve(windows, [1000 * step.learning_rate for step in steps])
    depths = [_curve(windows, [step.accuracy[depth] for step in steps]) for depth in range(len(last.accuracy))]
    averaged = f", mean of {len(windows[0])} steps" if len(windows[0]) > 1 else ""
    accuracy_name = f"accuracy by depth, share of drafts{averaged}"
    panels = [
        (_panel(f"loss (KL divergence, nats){averaged}", [loss], last.step, _LOSS_HEIGHT), _LOSS_HEIGHT),
        (_panel(accuracy_name, depths, last.step, _ACCURACY_HEIGHT), _ACCURACY_HEIGHT),
        (_panel("learning rate, thousandths", [rate], last.step, _RATE_HEIGHT), _RATE_HEIGHT),
    ]
    parts, top = [], 0
    for panel, height in panels:
        parts.append(f'<g transform="translate(0,{top})">{panel}</g>')
        top += height + _GAP
    parts.append(x_axis_name("step", top + 8))
    height = top + 12
    heading = f"Training, {last.step:,} of {last.num_steps:,} steps, {last.num_tokens:,} tokens"
    return standalone(drawing(height, "Loss, accuracy by depth and learning rate by step", parts), heading, (), height)


def _curve(windows: Sequence[range], values: Sequence[float | None]) -> Curve:
    """Return a point per window: the middle of its steps and the mean of their known values, or None."""
    curve: Curve = []
    for window in windows:
        known_values = [value for value in values[window.start : window.stop] if value is not None]
        curve.append(
            ((window[0] + window[-1]) / 2 + 1, sum(known_values) / len(known_values) if known_values else None)
        )
    return curve


def _panel(name: str, curves: Sequence[Curve], last_step: int, height: int) -> str:
    known_values = [value for curve in curves for _, value in curve if value is not None]
    ticks = _ticks(min(known_values, default=0.0), max(known_values, default=1.0), 2 if height < HEIGHT / 2 else 4)

    def x(step: float) -> float:
        share = (step - 1) / (last_step - 1) if last_step > 1 else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT - _NUMBER_WIDTH)

    def y(value: float) -> float:
        return _TOP + (height - _TOP - _BOTTOM) * (1 - (value - ticks[0]) / (ticks[-1] - ticks[0]))

    parts = [text(0, 10, name, "axis", "start"), *(grid_line(y(tick), f"{tick:.4g}") for tick in ticks)]
    for step in _step_ticks(last_step):
        parts.append(text(x(step), height - 2, f"{step:,}", "tick", "middle"))
    ends = []
    for depth, curve in enumerate(curves):
        opacity = 1 - (1 - _PALEST) * depth / max(1, len(curves) - 1)
        points = [(x(step), None if value is None else y(value)) for step, value in curve]
        parts += [_line(segment, opacity) for segment in _segments(points)]
        ends += [(end, str(depth)) for _, end in points[::-1] if end is not None][:1]
    if len(curves) > 1:
        parts += [text(WIDTH - RIGHT, end + 4, label, "label", "end") for end, label in spread_labels(ends)]
    return "".join(parts)


def _segments(points: Sequence[tuple[float, float | None]]) -> Iterator[list[tuple[float, float]]]:
    """Split a curve where values are missing."""
    segment: list[tuple[float, float]] = []
    for x, y in points:
        if y is not None:
            segment.append((x, y))
        elif segment:
            yield segment
            segment = []
    if segment:
        yield segment


def _line(segment: Sequence[tuple[float, float]], opacity: float) -> str:
    """Draw a line, or a dot for a single point."""
    if len(segment) == 1:
        ((x, y),) = segment
        return f'<circle class="series-0" cx="{x:.1f}" cy="{y:.1f}" r="3" opacity="{opacity:.2f}"/>'
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in segment)
    return f'<polyline class="line-0" opacity="{opacity:.2f}" points="{points}"/>'


def _ticks(low: float, high: float, num_steps: int) -> list[float]:
    """Return round values from at most `low` to at least `high`, in about `num_steps` steps.

    >>> _ticks(1.9, 8.3, 4)
    [0, 2, 4, 6, 8, 10]
    """
    span = high - low or abs(high) or 1.0
    magnitude = 10 ** math.floor(math.log10(span / num_steps))
    step = next(factor * magnitude for factor in _ROUND_FACTORS if factor * magnitude >= 0.999 * span / num_steps)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _step_ticks(last_step: int) -> list[int]:
    """Return the first step and round steps up to the last.

    >>> _step_ticks(1182)
    [1, 250, 500, 750, 1000]
    """
    distance = max(1, round(_ticks(0, last_step, 5)[1]))
    return [1, *(step for step in range(distance, last_step + 1, distance) if step > 1)]
