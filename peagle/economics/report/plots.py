"""SVG plots of reports: bars, columns, histograms, values and engine states over time."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from peagle.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    drawing,
    grid_line,
    grid_step,
    shortened,
    text,
    title,
    x_axis_name,
    y_axis_name,
)
from peagle.economics.report.figures import SHARES, format_duration, format_share, format_usd

# CSS colours of the engine states, and of the labels on them, for light and dark pages.
SHARE_LIGHT = (
    "--load: #8a79d8; --compile: #e0a320; --busy: #2a78d6; --idle: #b4b8bd; --lost: #cf3f3f;"
    " --on-load: #14171a; --on-compile: #14171a; --on-busy: #ffffff; --on-idle: #14171a; --on-lost: #ffffff;"
)
SHARE_DARK = (
    "--load: #8f7fe0; --compile: #c98f17; --busy: #3a82dc; --idle: #5d636a; --lost: #d95555; --on-idle: #f2f3f4;"
)
SHARE_RULES = "".join(
    f".share-{name} {{ fill: var(--{name}); background: var(--{name}); }}\n"
    f"svg .on-{name} {{ fill: var(--on-{name}); }}\n"
    for name in SHARES
)
_LABEL_CHARS = 64
_MIN_WIDTH = 3  # of a bar whose value is above 0; in SVG units, like all sizes here
_MAX_BAR_WIDTH = 240  # leaves room for the text of the value
_BAR_HEIGHT, _ROW_HEIGHT = 18, 46


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Acceptance rates of one run by position in the draft; `series` is the number of its colour."""

    label: str
    rates: Sequence[float]
    series: int


def acceptance_svg(runs: Sequence[Rates]) -> str:
    """Plot the acceptance rate of each run at each draft position, as grouped bars.

    There are at most `MAX_SERIES` runs, and each has rates.
    """
    num_positions = max(len(run.rates) for run in runs)
    ceiling = next(ceiling for ceiling in (0.2, 0.4, 0.6, 0.8, 1.0) if max(max(run.rates) for run in runs) <= ceiling)
    plot_height = HEIGHT - TOP - BOTTOM
    group_width = (WIDTH - LEFT - RIGHT) / num_positions
    bar_width = min(group_width * 0.76 / len(runs), 46)

    def y(share: float) -> float:
        return TOP + plot_height * (1 - share / ceiling)

    shares = [ceiling * step / 4 for step in range(5)]
    parts = [grid_line(y(share), f"{100 * share:.3g}%" if share else "0") for share in shares]
    for position in range(num_positions):
        centre = LEFT + group_width * (position + 0.5)
        parts.append(text(centre, HEIGHT - BOTTOM + 16, str(position + 1), "tick", "middle"))
        for index, run in enumerate(runs):
            if position < len(run.rates):
                x, rate = centre + bar_width * (index - len(runs) / 2), run.rates[position]
                tooltip = f"{run.label}, position {position + 1}: {rate:.1%}"
                parts.append(_column(x, bar_width, y(rate), y(0), run.series, tooltip))
                if bar_width >= 18:  # labels of narrower bars would overlap
                    label = format_share(rate) if bar_width >= 26 else format_share(rate).rstrip("%")
                    parts.append(text(x + bar_width / 2, y(rate) - 5, label, "value", "middle"))
    parts += [x_axis_name("position in the draft"), y_axis_name("share of drafts", at_right=True)]
    return drawing(HEIGHT, "Acceptance by position", parts)


def shares_svg(runs: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    bar_height, label_height, gap = 34, 18 if len(runs) > 1 else 0, 12
    parts, y = [], 4.0
    for label, shares in runs:
        if label_height:
            parts.append(text(0, y + 12, shortened(label, _LABEL_CHARS), "label", "start"))
        parts += _stacked_bar(y + label_height, bar_height, label, shares)
        y += label_height + bar_height + gap
    return drawing(round(y - gap + 4), "Cost by engine state", parts)


def _stacked_bar(y: float, height: float, label: str, shares: Mapping[str, float]) -> list[str]:
    edges = [0.0]
    for name in SHARES:
        edges.append(edges[-1] + WIDTH * shares[name])
    parts = []
    for name, (start, end) in zip(SHARES, pairwise(edges), strict=True):
        if end <= start:
            continue
        # Leave a gap of 2 between neighbours, and keep slivers visible on a phone.
        width = max(end - start - 2, _MIN_WIDTH)
        tooltip = title(f"{label}: {name} {shares[name]:.1%}")
        parts.append(
            f'<rect class="share-{name}" x="{start:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}" '
            f'rx="3">{tooltip}</rect>'
        )
        if width >= 34:
            share = format_share(shares[name])
            parts.append(text(start + width / 2, y + height / 2 + 4, share, f"inside on-{name}", "middle"))
    return parts


def _column(x: float, width: float, top: float, base: float, series: int, tooltip: str) -> str:
    width = max(width - 2, 1)
    radius = min(4, width / 2, base - top)
    path = (
        f"M{x + 1:.1f},{base:.1f} V{top + radius:.1f} q0,{-radius:.1f} {radius:.1f},{-radius:.1f} "
        f"h{width - 2 * radius:.1f} q{radius:.1f},0 {radius:.1f},{radius:.1f} V{base:.1f} Z"
    )
    return f'<path class="series-{series}" d="{path}">{title(tooltip)}</path>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A stacked bar: `parts` are (CSS class, amount, tooltip); `low` and `high` are the ends of an error bar."""

    label: str
    parts: Sequence[tuple[str, float, str]]
    value_text: str
    low: float | None = None
    high: float | None = None

    @property
    def value(self) -> float:
        return sum(amount for _, amount, _ in self.parts)


def plain_bar(label: str, value: float, value_text: str, css_class: str = "series-0") -> Bar:
    return Bar(label=label, parts=[(css_class, value, f"{label}: {value_text}")], value_text=value_text)


def bars_svg(bars: Sequence[Bar], name: str) -> str:
    max_value = max(max(bar.value, bar.high or 0.0) for bar in bars) or 1.0
    elements, y = [], 2.0
    for bar in bars:
        elements.append(text(0, y + 11, shortened(bar.label, _LABEL_CHARS), "label", "start"))
        x = 0.0
        for css_class, amount, tooltip in bar.parts:
            width = _MAX_BAR_WIDTH * amount / max_value
            if amount > 0:
                elements.append(_rect(css_class, x, y + 17, max(width, _MIN_WIDTH), _BAR_HEIGHT, tooltip))
            x += width
        if bar.low is not None and bar.high is not None:
            low, high = (_MAX_BAR_WIDTH * max(value, 0.0) / max_value for value in (bar.low, bar.high))
            middle, x = y + 17 + _BAR_HEIGHT / 2, max(x, high)
            tips = "".join(f"M{tip:.1f},{middle - 5:g}v10" for tip in (low, high))
            elements.append(f'<path class="whisker" d="M{low:.1f},{middle:g}H{high:.1f}{tips}"/>')
        elements.append(text(x + 8, y + 30.5, bar.value_text, "value", "start"))
        y += _ROW_HEIGHT
    return drawing(round(y - 6), name, elements)


def histogram_svg(histogram: Mapping[str, Any], name: str, x_name: str) -> str:
    """Plot a histogram.

    Column i counts the values from `first + i * step` to the next step; with `has_more`, the last column also counts
    all larger values.
    """
    counts, first, step = histogram["counts"], histogram["first"], histogram["step"]
    columns = []
    for index, count in enumerate(counts):
        begin = first + index * step
        is_unbounded = histogram["has_more"] and index == len(counts) - 1
        span = f"{tick(begin)} and more" if is_unbounded else f"{tick(begin)} to {tick(begin + step)}"
        columns.append((tick(begin), [("series-0", float(count), f"{span}: {count:,} rows")]))
    parts = _columns(columns, 0.92, tick)
    return drawing(HEIGHT, name, [*parts, x_axis_name(x_name), y_axis_name("rows", at_right=True)])


def dollars_svg(columns: Sequence[tuple[str, Sequence[float]]], layers: Sequence[tuple[str, str]], name: str) -> str:
    """Plot stacked columns (label, amounts by layer). A layer is (name, CSS class)."""
    stacked = []
    for label, amounts in columns:
        parts = [
            (css_class, amount, f"{label}, {layer}: {format_usd(amount)}")
            for (layer, css_class), amount in zip(layers, amounts, strict=True)
        ]
        stacked.append((label, parts))
    return drawing(HEIGHT - 14, name, _columns(stacked, 0.8, usd_tick))


def _columns(
    columns: Sequence[tuple[str, Sequence[tuple[str, float, str]]]],
    width_share: float,
    format_value: Callable[[float], str],
) -> list[str]:
    ticks, y = vertical_axis(max(sum(amount for _, amount, _ in parts) for _, parts in columns))
    width, label_interval = (WIDTH - LEFT - RIGHT) / len(columns), -(-len(columns) // 7)  # at most seven labels
    elements = [grid_line(y(value), format_value(value)) for value in ticks]
    for index, (label, parts) in enumerate(columns):
        middle, amount_below = LEFT + (index + 0.5) * width, 0.0
        for css_class, amount, tooltip in parts:
            if amount > 0:
                height = max(y(amount_below) - y(amount_below + amount), 1.0)
                x, top = middle - width * width_share / 2, y(amount_below) - height
                elements.append(_rect(css_class, x, top, width * width_share, height, tooltip))
            amount_below += amount
        if index % label_interval == 0:
            elements.append(text(middle, HEIGHT - BOTTOM + 16, label, "tick", "middle"))
    return elements


def vertical_axis(max_value: float) -> tuple[list[float], Callable[[float], float]]:
    """Return the values of the grid lines, from 0 to at least `max_value`, and a function from value to y."""
    step = grid_step(max_value, finest=-12)
    num_steps = max(1, math.ceil(max_value / step))

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / (step * num_steps))

    return [step * number for number in range(num_steps + 1)], y


def tick(value: float) -> str:
    """Return an axis label.

    >>> tick(0.30000000000000004), tick(20_000.0)
    ('0.3', '20,000')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def usd_tick(usd: float) -> str:
    return f"${tick(usd)}"


def _rect(css_class: str, x: float, y: float, width: float, height: float, tooltip: str) -> str:
    geometry = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{css_class}" {geometry} rx="1.5">{title(tooltip)}</rect>'


# Seconds, name, and the allowed tick intervals in that unit.
_TIME_UNITS = (
    (86_400, "d", (1, 2, 7, 14)),
    (3600, "h", (1, 2, 4, 8)),
    (60, "min", (1, 2, 5, 10, 20)),
    (1, "s", (1, 2, 5, 10, 20)),
)
_TICKS_S = sorted(unit_s * number for unit_s, _, numbers in _TIME_UNITS for number in numbers)
_MAX_TICKS = 6
_LANE_PITCH, _LANE_HEIGHT = 46, 18


def series_svg(
    values: Sequence[float],
    timeline: Mapping[str, Any],
    name: str,
    format_value: Callable[[float], str],
    *,
    is_sum: bool = False,
) -> str:
    """Plot a value for each step of a timeline. With `is_sum`, values are cumulative, at the end of each step."""
    ticks, y = vertical_axis(max(values))
    x = _time_scale(timeline, LEFT)
    step_s = timeline["step_s"]
    points = [(x(0.0), y(0.0))] if is_sum else []
    for index, value in enumerate(values):
        step_start = [] if is_sum else [(x(index * step_s), y(value))]
        points += [*step_start, (x((index + 1) * step_s), y(value))]
    line = " ".join(f"{point_x:.1f},{point_y:.1f}" for point_x, point_y in points)
    base, bottom = f"{x(0.0):.1f},{y(0.0):.1f}", HEIGHT - BOTTOM
    elements = [
        *(grid_line(y(value), format_value(value)) for value in ticks),
        f'<polygon class="area" points="{base} {line} {points[-1][0]:.1f},{y(0.0):.1f}"/>',
        f'<polyline class="line-0" points="{line}"/>',
        *_time_axis(timeline, x, TOP, bottom),
    ]
    return drawing(HEIGHT - 14, name, elements)


def engines_svg(timeline: Mapping[str, Any]) -> str:
    x, y, elements, labels = _time_scale(timeline, 0), 2.0, [], []
    for engine in timeline["engines"]:
        starts = f", {engine['num_starts']} starts" if engine["num_starts"] > 1 else ""
        life_s = sum(engine["seconds"].values()) or 1.0  # avoids division by zero before the second heartbeat
        shares = {state: format_share(engine["seconds"][state] / life_s) for state in ("busy", "idle", "lost")}
        states = ", ".join(f"{state} {share}" for state, share in shares.items())
        labels.append(f"engine {engine['engine']}{starts}: {states}")
        elements.append(text(0, y + 11, labels[-1], "lane", "start"))
        elements += _lane(engine, x, y + 17)
        y += _LANE_PITCH
    elements += _time_axis(timeline, x, 0, y - 4)
    return drawing(round(y + 22), f"States of the engines over time: {'; '.join(labels)}", elements)


def _lane(engine: Mapping[str, Any], x: Callable[[float], float], y: float) -> list[str]:
    elements = []
    for state in SHARES:
        path = "".join(
            f"M{x(begin):.1f},{y:g}h{max(x(end) - x(begin), 1.5):.1f}v{_LANE_HEIGHT}H{x(begin):.1f}z"
            for span_state, begin, end in engine["spans"]
            if span_state == state
        )
        if path:
            tooltip = title(f"engine {engine['engine']}: {state} {format_duration(engine['seconds'][state])}")
            elements.append(f'<path class="share-{state}" d="{path}">{tooltip}</path>')
    return elements


def _time_scale(timeline: Mapping[str, Any], left: float) -> Callable[[float], float]:
    right = WIDTH - RIGHT
    return lambda second: left + (right - left) * second / timeline["total_s"]


def _time_axis(timeline: Mapping[str, Any], x: Callable[[float], float], top: float, bottom: float) -> list[str]:
    total_s = timeline["total_s"]
    step_s = next((step for step in _TICKS_S if total_s <= _MAX_TICKS * step), total_s / _MAX_TICKS)
    unit_s, unit, _ = next(unit for unit in _TIME_UNITS if step_s >= unit[0])
    ticks_s = [step_s * number for number in range(int(total_s / step_s) + 1)]
    elements = [
        text(x(tick_s), bottom + 16, f"{tick_s / unit_s:,.0f} {unit}", "tick", "middle" if tick_s else "start")
        for tick_s in ticks_s
    ]
    for pause in timeline["pauses"]:
        tooltip = title(f"an omitted pause of {format_duration(pause['lasted_s'])}")
        x1 = f"{x(pause['at_s']):.1f}"
        elements.append(f'<line class="pause" x1="{x1}" x2="{x1}" y1="{top:g}" y2="{bottom:g}">{tooltip}</line>')
    return elements
