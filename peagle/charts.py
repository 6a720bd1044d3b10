"""Line charts of measurements, and SVG helpers for all plots.

Colours are CSS classes, so that one drawing serves light and dark mode. A page with drawings needs `RULES` and the
palettes in its style sheet; `standalone` returns a complete file.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 440, 250  # in pixels, as all sizes here
LEFT, RIGHT, TOP, BOTTOM = 38, 6, 18, 34  # margins of a chart with axes
MAX_SERIES = 6  # more colours cannot be distinguished

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
_MARGIN, _TITLE_HEIGHT, _LEGEND_LINE_HEIGHT = 16, 30, 20  # of a standalone chart
_LABEL_HEIGHT = 12
_HEADING_CHARS, _LEGEND_CHARS = 58, 60  # number of characters that fit into `WIDTH`, in bold and regular type


def text(x: float, y: float, content: str, css_class: str, anchor: str) -> str:
    """Return a text element; `anchor` is "start", "middle" or "end"."""
    return f'<text class="{css_class}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def title(content: str) -> str:
    """Return a tooltip, to be placed inside the element that it describes."""
    return f"<title>{escape(content)}</title>"


def grid_line(y: float, label: str) -> str:
    """Return a horizontal line across the chart, with its value on the left."""
    line = f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + text(LEFT - 6, y + 4, label, "tick", "end")


def x_axis_name(name: str, height: int = HEIGHT) -> str:
    return text(LEFT + (WIDTH - LEFT - RIGHT) / 2, height - 2, name, "axis", "middle")


def y_axis_name(name: str, *, at_right: bool = False) -> str:
    """Return the name of the vertical axis, above the chart."""
    return text(WIDTH - RIGHT, 9, name, "axis", "end") if at_right else text(LEFT, 9, name, "axis", "start")


def spread_labels(labels: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Move (height, label) pairs apart, as little as possible, so that labels do not overlap; return them by height.

    This is isotonic regression: overlapping neighbours are pooled and centred.

    >>> spread_labels([(50.0, "b"), (48.0, "a"), (90.0, "c")])
    [(43.0, 'a'), (55.0, 'b'), (90.0, 'c')]
    """
    ordered = sorted(labels)
    pools: list[tuple[float, int]] = []  # height of the first label, and number of labels
    for index, (height, _) in enumerate(ordered):
        first, count = height - index * _LABEL_HEIGHT, 1
        while pools and pools[-1][0] > first:
            previous_first, previous_count = pools.pop()
            first, count = (
                (previous_first * previous_count + first * count) / (previous_count + count),
                previous_count + count,
            )
        pools.append((first, count))
    first_heights = [first for first, count in pools for _ in range(count)]
    placed = zip(first_heights, ordered, strict=True)
    return [(first + n * _LABEL_HEIGHT, label) for n, (first, (_, label)) in enumerate(placed)]


def shortened(content: str, max_chars: int) -> str:
    """Shorten text by replacing its middle, because the start of a name and the end of a path are most informative.

    >>> shortened("heads/2026-11-21/warm/head", 16)
    'heads/2…arm/head'
    """
    if len(content) <= max_chars:
        return content
    front = (max_chars - 1) // 2
    return f"{content[:front]}…{content[front + 1 - max_chars :]}"


def drawing(height: int, name: str, parts: Sequence[str]) -> str:
    """Return an SVG `WIDTH` wide; `name` is its accessible label."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(name)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def standalone(chart: str, heading: str, legend: Sequence[str], height: int = HEIGHT) -> str:
    """Return a drawing as an SVG file with a heading, a legend and a style. Long texts are shortened."""
    width = WIDTH + 2 * _MARGIN
    legend_top = _MARGIN + _TITLE_HEIGHT + height + 12
    page_height = legend_top + _LEGEND_LINE_HEIGHT * len(legend) + _MARGIN - 4
    positioned_svg = f'<svg x="{_MARGIN}" y="{_MARGIN + _TITLE_HEIGHT}" width="{WIDTH}" height="{height}" '
    parts = [
        f"<style>svg {{ {LIGHT} font-family: system-ui, sans-serif; }}\n",
        f"@media (prefers-color-scheme: dark) {{ svg {{ {DARK} }} }}\n{RULES}.page {{ fill: var(--card); }}</style>",
        f'<rect class="page" width="{width}" height="{page_height}"/>',
        text(_MARGIN, _MARGIN + 12, shortened(heading, _HEADING_CHARS), "value", "start"),
        chart.replace("<svg ", positioned_svg, 1),
    ]
    for series, label in enumerate(legend):
        y = legend_top + _LEGEND_LINE_HEIGHT * series
        parts.append(f'<rect class="series-{series}" x="{_MARGIN}" y="{y}" width="11" height="11" rx="3"/>')
        parts.append(text(_MARGIN + 18, y + 10, shortened(label, _LEGEND_CHARS), "label", "start"))
    size = f'width="{width}" height="{page_height}" viewBox="0 0 {width} {page_height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>\n'


Curve = tuple[str, Sequence[tuple[int, float]]]  # label, and points (x, value)

_INSET = 20  # between the axis and the first point
_MAX_STEPS = 4  # maximum number of steps between grid lines of the vertical axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The texts and scale of a chart.

    Attributes:
        name: accessible label of the chart.
        x_prefix: text before the x value in a tooltip, such as "K=".
        y_start: start of the vertical axis.
        is_evenly_spaced: whether the distance between points is constant, regardless of their x.
    """

    name: str
    x_name: str
    y_name: str
    x_prefix: str
    y_start: float = 0.0
    decimals: int = 2
    is_evenly_spaced: bool = False


def line_chart(curves: Sequence[Curve], axes: Axes) -> str:
    """Return a chart with a line for each series. A series with a single point is a dot."""
    xs = sorted({x_value for _, points in curves for x_value, _ in points})
    span = max(value for _, points in curves for _, value in points) - axes.y_start
    step = grid_step(span)
    num_steps = max(1, math.ceil(span / step))
    labels_every_value = len(curves) <= 2  # otherwise only the last point of each curve has a label
    width = WIDTH - LEFT - RIGHT - 2 * _INSET - (0 if labels_every_value else 30)

    def x(x_value: int) -> float:
        if len(xs) == 1:
            share = 0.5
        elif axes.is_evenly_spaced:
            share = xs.index(x_value) / (len(xs) - 1)
        else:
            share = (x_value - xs[0]) / (xs[-1] - xs[0])
        return LEFT + _INSET + share * width

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - axes.y_start) / (step * num_steps))

    ticks = [axes.y_start + step * n for n in range(num_steps + 1)]
    parts = [grid_line(y(tick), f"{tick:.3g}" if tick < 1000 else f"{tick:.0f}") for tick in ticks]
    parts += [text(x(x_value), HEIGHT - BOTTOM + 16, str(x_value), "tick", "middle") for x_value in xs]
    for series, (label, points) in enumerate(curves):
        path = " ".join(f"{x(x_value):.1f},{y(value):.1f}" for x_value, value in points)
        parts.append(f'<polyline class="line-{series}" points="{path}"/>')
        for x_value, value in points:
            tooltip = title(f"{label}, {axes.x_prefix}{x_value}: {value:.{axes.decimals}f}")
            parts.append(
                f'<circle class="series-{series}" cx="{x(x_value):.1f}" cy="{y(value):.1f}" r="4">{tooltip}</circle>'
            )
    if labels_every_value:
        for x_value, value in (point for _, points in curves for point in points):
            others = [y(other) for _, points in curves for other_x, other in points if other_x == x_value]
            # If another point is just above, the label is below its point.
            is_crowded = any(0 < y(value) - other < 2 * _LABEL_HEIGHT for other in others)
            label = f"{value:.{axes.decimals}f}"
            parts.append(text(x(x_value), y(value) + (18 if is_crowded else -8), label, "value", "middle"))
    else:
        end_labels = [
            (y(value), f"{value:.{axes.decimals}f}")
            for _, points in curves
            for x_value, value in points
            if x_value == xs[-1]
        ]
        parts += [
            text(x(xs[-1]) + 10, height + 4, label, "value", "start") for height, label in spread_labels(end_labels)
        ]
    parts += [x_axis_name(axes.x_name), y_axis_name(axes.y_name)]
    return drawing(HEIGHT, axes.name, parts)


def grid_step(span: float, finest: int = -1) -> float:
    """Return a round distance between grid lines, so that there are at most `_MAX_STEPS` steps.

    The smallest distance is 10 to the power of `finest`.

    >>> grid_step(0.6), grid_step(2.9), grid_step(230)
    (0.2, 1.0, 100.0)
    """
    exponent = max(finest, math.floor(math.log10(span / _MAX_STEPS))) if span > 0 else finest
    steps = (float(f"{digit}e{exponent + shift}") for shift in (0, 1) for digit in (1, 2, 5))
    return next(step for step in steps if span <= _MAX_STEPS * step)
