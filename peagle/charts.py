"""Line charts of measurements, and the SVG pen that all plots are drawn with.

Plots are drawn by hand rather than by a plotting library: colours are CSS classes, so that one drawing serves light and
dark, text stays text, and the drawing scales with the screen. A page that shows drawings takes `RULES` and the palettes
into its style sheet; `standalone` makes a file of one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 38, 6, 18, 34  # margins of a chart with axes
# More series than colours that can be told apart.
MAX_SERIES = 6

LIGHT = (
    "--card: #ffffff; --ink: #14171a; --ink-2: #50565c; --ink-3: #7b828a; --grid: #e9e9e5;"
    " --s0: #2a78d6; --s1: #d9622b; --s2: #138a66; --s3: #7a52cc; --s4: #c23a74; --s5: #8a6d00;"
)
DARK = (
    "--card: #1c1e21; --ink: #f2f3f4; --ink-2: #b9bec4; --ink-3: #8c939b; --grid: #2a2d31;"
    " --s0: #4a93ea; --s1: #ea7b46; --s2: #2fae87; --s3: #a283ea; --s4: #e0699b; --s5: #bf9d2c;"
)
RULES = """\
svg .tick { fill: var(--ink-3); font-size: 11.5px; font-variant-numeric: tabular-nums; }
svg .axis { fill: var(--ink-2); font-size: 12px; }
svg .label { fill: var(--ink); font-size: 12px; }
svg .value { fill: var(--ink); font-size: 12px; font-weight: 600; }
svg .inside { font-size: 12px; font-weight: 600; }
svg .grid { stroke: var(--grid); stroke-width: 1; }
svg .whisker { stroke: var(--ink); stroke-width: 1.5; fill: none; }
svg .pause { stroke: var(--ink-3); stroke-width: 1; stroke-dasharray: 3 3; }
svg .area { fill: var(--s0); opacity: .25; }
""" + "".join(
    f".series-{n} {{ fill: var(--s{n}); background: var(--s{n}); }}\n"
    f"svg .line-{n} {{ fill: none; stroke: var(--s{n}); stroke-width: 2; }}\n"
    for n in range(MAX_SERIES)
)
_MARGIN, _TITLE_HEIGHT, _LEGEND_LINE = 16, 30, 20
_LABEL_HEIGHT = 12
_HEADING_LETTERS, _LEGEND_LETTERS = 58, 60  # what `WIDTH` holds of bold and of plain letters


def text(x: float, y: float, words: str, kind: str, anchor: str) -> str:
    """Text of class `kind`; `anchor` is "start", "middle" or "end"."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def title(words: str) -> str:
    """A mark's tooltip; it goes inside the mark."""
    return f"<title>{escape(words)}</title>"


def grid_line(y: float, label: str) -> str:
    """A horizontal line across the chart, with its value at the left."""
    line = f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + text(LEFT - 6, y + 4, label, "tick", "end")


def x_axis_name(words: str, height: int = HEIGHT) -> str:
    """The name of the horizontal axis, at the foot of a chart."""
    return text(LEFT + (WIDTH - LEFT - RIGHT) / 2, height - 2, words, "axis", "middle")


def y_axis_name(words: str, *, at_right: bool = False) -> str:
    """The name of the vertical axis, above the chart.

    At the right where the left is full.
    """
    return text(WIDTH - RIGHT, 9, words, "axis", "end") if at_right else text(LEFT, 9, words, "axis", "start")


def apart(ends: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Labels moved as little as makes lines of them, in the order of their heights.

    Those that would touch are spread around their own middle (isotonic regression, pooling neighbours).

    Args:
        ends: height and words of each.

    >>> apart([(50.0, "b"), (48.0, "a"), (90.0, "c")])
    [(43.0, 'a'), (55.0, 'b'), (90.0, 'c')]
    """
    ordered = sorted(ends)
    pools: list[tuple[float, int]] = []  # height of the first of them were they stacked there, and how many
    for index, (height, _) in enumerate(ordered):
        first, count = height - index * _LABEL_HEIGHT, 1
        while pools and pools[-1][0] > first:
            before, others = pools.pop()
            first, count = (before * others + first * count) / (others + count), others + count
        pools.append((first, count))
    firsts = [first for first, count in pools for _ in range(count)]
    return [
        (first + index * _LABEL_HEIGHT, words)
        for index, (first, (_, words)) in enumerate(zip(firsts, ordered, strict=True))
    ]


def shortened(words: str, num_letters: int) -> str:
    """Words shortened to fit, without their middle.

    A path's end says most; a name's beginning does.

    >>> shortened("heads/2026-11-21/warm/head", 16)
    'heads/2…arm/head'
    """
    if len(words) <= num_letters:
        return words
    front = (num_letters - 1) // 2
    return f"{words[:front]}…{words[front + 1 - num_letters :]}"


def drawing(height: int, name: str, parts: Sequence[str]) -> str:
    """The parts as one drawing `WIDTH` wide; `name` is for those who cannot see it."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(name)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def standalone(chart: str, heading: str, legend: Sequence[str], height: int = HEIGHT) -> str:
    """A chart as a file of its own: heading, chart, legend, and its own style.

    Args:
        chart: a drawing.
        heading: above it; without its middle where it is too long, as the labels.
        legend: labels of the series, in their order.
        height: of the drawing.
    """
    width = WIDTH + 2 * _MARGIN
    legend_top = _MARGIN + _TITLE_HEIGHT + height + 12
    page_height = legend_top + _LEGEND_LINE * len(legend) + _MARGIN - 4
    nested = f'<svg x="{_MARGIN}" y="{_MARGIN + _TITLE_HEIGHT}" width="{WIDTH}" height="{height}" '
    parts = [
        f"<style>svg {{ {LIGHT} font-family: system-ui, sans-serif; }}\n",
        f"@media (prefers-color-scheme: dark) {{ svg {{ {DARK} }} }}\n{RULES}.page {{ fill: var(--card); }}</style>",
        f'<rect class="page" width="{width}" height="{page_height}"/>',
        text(_MARGIN, _MARGIN + 12, shortened(heading, _HEADING_LETTERS), "value", "start"),
        chart.replace("<svg ", nested, 1),
    ]
    for series, label in enumerate(legend):
        y = legend_top + _LEGEND_LINE * series
        parts.append(f'<rect class="series-{series}" x="{_MARGIN}" y="{y}" width="11" height="11" rx="3"/>')
        parts.append(text(_MARGIN + 18, y + 10, shortened(label, _LEGEND_LETTERS), "label", "start"))
    size = f'width="{width}" height="{page_height}" viewBox="0 0 {width} {page_height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>\n'


Curve = tuple[str, Sequence[tuple[int, float]]]  # label, and points (x, value)

_INSET = 20  # between the axis and the first point
_VALUE_WIDTH = 30  # right of the last points, where only that one's values are written
_LABELLED_CURVES = 2  # of more, the values would run into each other
_LABEL_GAP = 24  # a value whose point has another this close above it stands below its point
_MOST_STEPS = 4  # of the vertical axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The text of a chart beside its points.

    Attributes:
        name: of the chart, for those who cannot see it.
        x_name: of the horizontal axis.
        y_name: of the vertical axis, with its unit.
        x_prefix: what stands before the x of a point where it is named: "K=".
        first: where the vertical axis begins.
        decimals: of a value.
        is_even: points stand equally far apart, whatever lies between them.
    """

    name: str
    x_name: str
    y_name: str
    x_prefix: str
    first: float = 0.0
    decimals: int = 2
    is_even: bool = False


def line_chart(curves: Sequence[Curve], axes: Axes) -> str:
    """Lines through points; a series with one point is that point alone."""
    xs = sorted({at for _, points in curves for at, _ in points})
    span = max(value for _, points in curves for _, value in points) - axes.first
    step = grid_step(span)
    num_steps = max(1, math.ceil(span / step))
    every_value = len(curves) <= _LABELLED_CURVES
    width = WIDTH - LEFT - RIGHT - 2 * _INSET - (0 if every_value else _VALUE_WIDTH)

    def x(at: int) -> float:
        return LEFT + _INSET + _share(xs, at, axes.is_even) * width

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - axes.first) / (step * num_steps))

    ticks = [axes.first + step * n for n in range(num_steps + 1)]
    parts = [grid_line(y(tick), f"{tick:.3g}" if tick < 1000 else f"{tick:.0f}") for tick in ticks]
    parts += [text(x(at), HEIGHT - BOTTOM + 16, str(at), "tick", "middle") for at in xs]
    for series, (label, points) in enumerate(curves):
        path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
        parts.append(f'<polyline class="line-{series}" points="{path}"/>')
        for at, value in points:
            words = title(f"{label}, {axes.x_prefix}{at}: {value:.{axes.decimals}f}")
            parts.append(f'<circle class="series-{series}" cx="{x(at):.1f}" cy="{y(value):.1f}" r="4">{words}</circle>')
    parts += _every_value(curves, x, y, axes) if every_value else _last_values(curves, x, xs[-1], y, axes)
    parts += [x_axis_name(axes.x_name), y_axis_name(axes.y_name)]
    return drawing(HEIGHT, axes.name, parts)


def grid_step(span: float, finest: int = -1) -> float:
    """The distance of grid lines, so that there are few.

    Args:
        finest: exponent of ten of the shortest distance.

    >>> grid_step(0.6), grid_step(2.9), grid_step(230)
    (0.2, 1.0, 100.0)
    """
    exponent = max(finest, math.floor(math.log10(span / _MOST_STEPS))) if span > 0 else finest
    steps = (float(f"{digit}e{exponent + shift}") for shift in (0, 1) for digit in (1, 2, 5))
    return next(step for step in steps if span <= _MOST_STEPS * step)


def _share(xs: Sequence[int], at: int, is_even: bool) -> float:
    """An x's share of the axis, from 0 to 1; a single one is in the middle."""
    if len(xs) == 1:
        return 0.5
    if is_even:
        return xs.index(at) / (len(xs) - 1)
    return (at - xs[0]) / (xs[-1] - xs[0])


def _every_value(
    curves: Sequence[Curve], x: Callable[[int], float], y: Callable[[float], float], axes: Axes
) -> list[str]:
    """Each value above its point, or below where another point is right above."""
    parts = []
    for at, value in (point for _, points in curves for point in points):
        others = [y(other) for _, points in curves for other_at, other in points if other_at == at]
        is_crowded = any(0 < y(value) - other < _LABEL_GAP for other in others)
        words = f"{value:.{axes.decimals}f}"
        parts.append(text(x(at), y(value) + (18 if is_crowded else -8), words, "value", "middle"))
    return parts


def _last_values(
    curves: Sequence[Curve], x: Callable[[int], float], last_x: int, y: Callable[[float], float], axes: Axes
) -> list[str]:
    """The values at the last x alone, right of their points."""
    last = [(y(value), f"{value:.{axes.decimals}f}") for _, points in curves for at, value in points if at == last_x]
    return [text(x(last_x) + 10, height + 4, words, "value", "start") for height, words in apart(last)]
