"""SVG plots of a run over time (`peagle/economics/timeline.py`): a value, and the states of its engines."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from peagle.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, drawing, grid_line, text, title
from peagle.economics.report.figures import SHARES, format_duration, format_share
from peagle.economics.report.plots import vertical_axis

_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86_400
_TICKS_S = (
    *(1, 2, 5, 10, 20),
    *(minutes * _MINUTE_S for minutes in (1, 2, 5, 10, 20)),
    *(hours * _HOUR_S for hours in (1, 2, 4, 8)),
    *(days * _DAY_S for days in (1, 2, 7, 14)),
)
_UNITS = ((_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "min"))
_MOST_TICKS = 6
_LANE, _LANE_HEIGHT = 46, 18
_LABELLED_STATES = ("busy", "idle", "lost")  # in the label of a lane; the rest is startup
_THINNEST = 1.5  # least width of a state


def series_svg(
    values: Sequence[float],
    timeline: Mapping[str, Any],
    name: str,
    words: Callable[[float], str],
    *,
    is_sum: bool = False,
) -> str:
    """Plot a value for each step of a timeline.

    Args:
        name: alternative text.
        words: formats axis labels.
        is_sum: the values are cumulative, at the end of each step.
    """
    ticks, y = vertical_axis(max(values))
    x = _place(timeline, LEFT)
    step_s = timeline["step_s"]
    points = [(x(0.0), y(0.0))] if is_sum else []
    for index, value in enumerate(values):
        begin = [] if is_sum else [(x(index * step_s), y(value))]
        points += [*begin, (x((index + 1) * step_s), y(value))]
    line = " ".join(f"{left:.1f},{height:.1f}" for left, height in points)
    base, bottom = f"{x(0.0):.1f},{y(0.0):.1f}", HEIGHT - BOTTOM
    drawn = [
        *(grid_line(y(value), words(value)) for value in ticks),
        f'<polygon class="area" points="{base} {line} {points[-1][0]:.1f},{y(0.0):.1f}"/>',
        f'<polyline class="line-0" points="{line}"/>',
        *_time_axis(timeline, x, TOP, bottom),
    ]
    return drawing(HEIGHT - 14, name, drawn)


def engines_svg(timeline: Mapping[str, Any]) -> str:
    """Plot a lane per engine, coloured by state, with its shares above."""
    x, y, drawn, labels = _place(timeline, 0), 2.0, [], []
    for engine in timeline["engines"]:
        labels.append(_in_words(engine))
        drawn.append(text(0, y + 11, labels[-1], "lane", "start"))
        drawn += _lane(engine, x, y + 17)
        y += _LANE
    drawn += _time_axis(timeline, x, 0, y - 4)
    return drawing(round(y + 22), f"States of the engines over time: {'; '.join(labels)}", drawn)


def _in_words(engine: Mapping[str, Any]) -> str:
    starts = f", {engine['num_starts']} starts" if engine["num_starts"] > 1 else ""
    lived_s = sum(engine["seconds"].values()) or 1.0  # avoids division by zero before the second heartbeat
    shares = ", ".join(f"{state} {format_share(engine['seconds'][state] / lived_s)}" for state in _LABELLED_STATES)
    return f"engine {engine['engine']}{starts}: {shares}"


def _lane(engine: Mapping[str, Any], x: Callable[[float], float], y: float) -> list[str]:
    drawn = []
    for state in SHARES:
        path = "".join(
            f"M{x(begin):.1f},{y:g}h{max(x(end) - x(begin), _THINNEST):.1f}v{_LANE_HEIGHT}H{x(begin):.1f}z"
            for kind, begin, end in engine["spans"]
            if kind == state
        )
        if path:
            words = title(f"engine {engine['engine']}: {state} {format_duration(engine['seconds'][state])}")
            drawn.append(f'<path class="share-{state}" d="{path}">{words}</path>')
    return drawn


def _place(timeline: Mapping[str, Any], left: float) -> Callable[[float], float]:
    right = WIDTH - RIGHT
    return lambda second: left + (right - left) * second / timeline["total_s"]


def _time_axis(timeline: Mapping[str, Any], x: Callable[[float], float], top: float, bottom: float) -> list[str]:
    total_s = timeline["total_s"]
    step_s = next((step for step in _TICKS_S if total_s <= _MOST_TICKS * step), total_s / _MOST_TICKS)
    unit_s, unit = next((unit for unit in _UNITS if step_s >= unit[0]), (1, "s"))
    ticks = [step_s * number for number in range(int(total_s / step_s) + 1)]
    drawn = [
        text(x(tick), bottom + 16, f"{tick / unit_s:,.0f} {unit}", "tick", "middle" if tick else "start")
        for tick in ticks
    ]
    for pause in timeline["pauses"]:
        words = title(f"a pause of {format_duration(pause['lasted_s'])} is cut out")
        place = f"{x(pause['at_s']):.1f}"
        drawn.append(f'<line class="pause" x1="{place}" x2="{place}" y1="{top:g}" y2="{bottom:g}">{words}</line>')
    return drawn
