"""The two plots of an evaluation, each an SVG file of its own: acceptance length by K, and acceptance by position."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from peagle.economics.report.plots import Rates, acceptance_svg
from peagle.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MAX_SERIES,
    RIGHT,
    TOP,
    WIDTH,
    apart,
    drawing,
    grid_line,
    standalone,
    text,
    title,
    x_axis_name,
    y_axis_name,
)

Curve = tuple[str, Sequence[tuple[int, float]]]  # label, and (K, acceptance length)

_INSET = 20  # between the axis and the first K
_VALUE_WIDTH = 30  # right of the last K, where only that one's values are written
_LABELLED_CURVES = 2  # of more, the values would run into each other
_LABEL_HEIGHT = 24  # a value whose point has another this close above it stands below its point


def length_plot(report: Mapping[str, Any]) -> str:
    """A line a drafter: acceptance length over K. A drafter measured at one K is a point."""
    curves = {
        label: [(cell["k"], cell["acceptance_length"]) for cell in cells]
        for label, cells in _by_drafter(report).items()
    }
    chart = _lines(list(curves.items()))
    return standalone(chart, f"Acceptance length, {_subject(report)}", _legend(list(curves)))


def position_plot(report: Mapping[str, Any]) -> str:
    """Bars by position in the draft, each drafter at its largest K."""
    largest = {label: cells[-1] for label, cells in _by_drafter(report).items()}
    labels = [f"{label}, K={cell['k']}" for label, cell in largest.items()]
    rates = [
        Rates(label=label, rates=cell["acceptance_rates"], series=series)
        for series, (label, cell) in enumerate(zip(labels, largest.values(), strict=True))
    ]
    return standalone(acceptance_svg(rates), f"Acceptance by position, {_subject(report)}", _legend(labels))


def _by_drafter(report: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """The cells by drafter, K ascending; the first `MAX_SERIES` drafters, as more colours cannot be told apart."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for cell in report["cells"]:
        groups.setdefault(cell["drafter"], []).append(cell)
    kept = list(groups.items())[:MAX_SERIES]
    return {label: sorted(cells, key=lambda cell: cell["k"]) for label, cells in kept}


def _subject(report: Mapping[str, Any]) -> str:
    return f"{report['model']}, {report['dataset']['name']}"


def _legend(labels: Sequence[str]) -> list[tuple[str, int]]:
    return [(label, series) for series, label in enumerate(labels)]


def _lines(curves: Sequence[Curve]) -> str:
    """Lines with a point at each K; the vertical axis begins at 1, where no draft is accepted."""
    ks = sorted({k for _, points in curves for k, _ in points})
    span = max(length for _, points in curves for _, length in points) - 1
    step = _step(span)
    num_steps = max(1, math.ceil(span / step))
    every_value = len(curves) <= _LABELLED_CURVES
    width = WIDTH - LEFT - RIGHT - 2 * _INSET - (0 if every_value else _VALUE_WIDTH)

    def x(k: int) -> float:
        share = (k - ks[0]) / (ks[-1] - ks[0]) if len(ks) > 1 else 0.5
        return LEFT + _INSET + share * width

    def y(length: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (length - 1) / (step * num_steps))

    parts = [grid_line(y(1 + step * n), f"{1 + step * n:.3g}") for n in range(num_steps + 1)]
    parts += [text(x(k), HEIGHT - BOTTOM + 16, str(k), "tick", "middle") for k in ks]
    for series, (label, points) in enumerate(curves):
        path = " ".join(f"{x(k):.1f},{y(length):.1f}" for k, length in points)
        parts.append(f'<polyline class="line-{series}" points="{path}"/>')
        for k, length in points:
            words = title(f"{label}, K={k}: {length:.2f}")
            parts.append(f'<circle class="series-{series}" cx="{x(k):.1f}" cy="{y(length):.1f}" r="4">{words}</circle>')
    parts += _every_value(curves, x, y) if every_value else _last_values(curves, x(ks[-1]), ks[-1], y)
    parts += [x_axis_name("draft tokens a step (K)"), y_axis_name("tokens a verify step")]
    return drawing(HEIGHT, "Acceptance length by K", parts)


def _every_value(curves: Sequence[Curve], x: Callable[[int], float], y: Callable[[float], float]) -> list[str]:
    """Each value above its point, or below where another point is right above."""
    parts = []
    for k, length in (point for _, points in curves for point in points):
        others = [y(other) for _, points in curves for other_k, other in points if other_k == k]
        is_crowded = any(0 < y(length) - other < _LABEL_HEIGHT for other in others)
        parts.append(text(x(k), y(length) + (18 if is_crowded else -8), f"{length:.2f}", "value", "middle"))
    return parts


def _last_values(curves: Sequence[Curve], x: float, k: int, y: Callable[[float], float]) -> list[str]:
    """The values at the last K alone, right of their points."""
    last = [(y(length), f"{length:.2f}") for _, points in curves for at, length in points if at == k]
    return [text(x + 10, height + 4, words, "value", "start") for height, words in apart(last)]


def _step(span: float) -> float:
    """The distance of grid lines, so that there are few.

    >>> _step(0.6), _step(2.9)
    (0.2, 1.0)
    """
    return next((step for step in (0.1, 0.2, 0.5, 1.0, 2.0) if span <= 4 * step), 5.0)
