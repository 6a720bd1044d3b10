"""A line chart of measurements: a line a series with a point at each measured place.

It knows the pen (`peagle.svg`); it does not know what the axes mean.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peagle.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    apart,
    drawing,
    grid_line,
    text,
    title,
    x_axis_name,
    y_axis_name,
)

Curve = tuple[str, Sequence[tuple[int, float]]]  # label, and (place, value)

_INSET = 20  # between the axis and the first place
_VALUE_WIDTH = 30  # right of the last place, where only that one's values are written
_LABELLED_CURVES = 2  # of more, the values would run into each other
_LABEL_GAP = 24  # a value whose point has another this close above it stands below its point
_MOST_STEPS = 4  # of the vertical axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """What a chart says beside its points.

    Attributes:
        name: of the chart, for those who cannot see it.
        x_name: of the horizontal axis.
        y_name: of the vertical axis, with its unit.
        place: what stands before a place where a point is named: "K=".
        first: where the vertical axis begins.
        decimals: of a value.
        is_even: places stand equally far apart, whatever lies between them.
    """

    name: str
    x_name: str
    y_name: str
    place: str
    first: float = 0.0
    decimals: int = 2
    is_even: bool = False


def line_chart(curves: Sequence[Curve], axes: Axes) -> str:
    """Lines with a point at each place; a series with one point is that point alone."""
    places = sorted({place for _, points in curves for place, _ in points})
    span = max(value for _, points in curves for _, value in points) - axes.first
    step = grid_step(span)
    num_steps = max(1, math.ceil(span / step))
    every_value = len(curves) <= _LABELLED_CURVES
    width = WIDTH - LEFT - RIGHT - 2 * _INSET - (0 if every_value else _VALUE_WIDTH)

    def x(place: int) -> float:
        return LEFT + _INSET + _share(places, place, axes.is_even) * width

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - axes.first) / (step * num_steps))

    ticks = [axes.first + step * n for n in range(num_steps + 1)]
    parts = [grid_line(y(tick), f"{tick:.3g}" if tick < 1000 else f"{tick:.0f}") for tick in ticks]
    parts += [text(x(place), HEIGHT - BOTTOM + 16, str(place), "tick", "middle") for place in places]
    for series, (label, points) in enumerate(curves):
        path = " ".join(f"{x(place):.1f},{y(value):.1f}" for place, value in points)
        parts.append(f'<polyline class="line-{series}" points="{path}"/>')
        for place, value in points:
            words = title(f"{label}, {axes.place}{place}: {value:.{axes.decimals}f}")
            parts.append(
                f'<circle class="series-{series}" cx="{x(place):.1f}" cy="{y(value):.1f}" r="4">{words}</circle>'
            )
    parts += _every_value(curves, x, y, axes) if every_value else _last_values(curves, x, places[-1], y, axes)
    parts += [x_axis_name(axes.x_name), y_axis_name(axes.y_name)]
    return drawing(HEIGHT, axes.name, parts)


def grid_step(span: float) -> float:
    """The distance of grid lines, so that there are few.

    >>> grid_step(0.6), grid_step(2.9), grid_step(230)
    (0.2, 1.0, 100.0)
    """
    exponent = max(-1, math.floor(math.log10(span / _MOST_STEPS))) if span > 0 else -1
    steps = (float(f"{digit}e{exponent + shift}") for shift in (0, 1) for digit in (1, 2, 5))
    return next(step for step in steps if span <= _MOST_STEPS * step)


def _share(places: Sequence[int], place: int, is_even: bool) -> float:
    """How far along the axis a place stands, from 0 to 1; alone it stands in the middle."""
    if len(places) == 1:
        return 0.5
    if is_even:
        return places.index(place) / (len(places) - 1)
    return (place - places[0]) / (places[-1] - places[0])


def _every_value(
    curves: Sequence[Curve], x: Callable[[int], float], y: Callable[[float], float], axes: Axes
) -> list[str]:
    """Each value above its point, or below where another point is right above."""
    parts = []
    for place, value in (point for _, points in curves for point in points):
        others = [y(other) for _, points in curves for other_place, other in points if other_place == place]
        is_crowded = any(0 < y(value) - other < _LABEL_GAP for other in others)
        words = f"{value:.{axes.decimals}f}"
        parts.append(text(x(place), y(value) + (18 if is_crowded else -8), words, "value", "middle"))
    return parts


def _last_values(
    curves: Sequence[Curve], x: Callable[[int], float], place: int, y: Callable[[float], float], axes: Axes
) -> list[str]:
    """The values at the last place alone, right of their points."""
    last = [(y(value), f"{value:.{axes.decimals}f}") for _, points in curves for at, value in points if at == place]
    return [text(x(place) + 10, height + 4, words, "value", "start") for height, words in apart(last)]
