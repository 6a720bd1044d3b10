"""Draw the panels of a Grafana dashboard as SVG, from the query results of a Prometheus server."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from peagle.charts import (
    BOTTOM,
    DARK,
    HEIGHT,
    LEFT,
    LIGHT,
    MAX_SERIES,
    RIGHT,
    RULES,
    TOP,
    WIDTH,
    grid_line,
    shortened,
    text,
)
from peagle.economics.report.plots import tick, usd_tick, vertical_axis

COLUMNS, MAX_LETTERS = 3, 56
GAP, NAME_HEIGHT, LINE_HEIGHT = 24, 26, 16  # pixels
FORMATTERS = {  # by Grafana's unit
    "currencyUSD": usd_tick,
    "percentunit": lambda share: f"{tick(100 * share)}%",
    "s": lambda seconds: f"{tick(seconds)} s",
}
Panel = Mapping[str, Any]
Series = tuple[str, Sequence[tuple[float, float]]]  # label, and points (time in seconds, value)
Query = Callable[[str], Sequence[Mapping[str, Any]]]


def rows_of(dashboard):
    """Yield the title and the panels of each row of the dashboard."""
    panels = dashboard["panels"]
    row_starts = [number for number, panel in enumerate(panels) if panel["type"] == "row"]
    for begin, end in zip(row_starts, [*row_starts[1:], len(panels)], strict=True):
        yield panels[begin]["title"], panels[begin + 1 : end]


def draw_svg(panels, query, begin_s):
    """Return one SVG image of the panels.

    Args:
        query: returns the series of a PromQL expression, in the format of `/api/v1/query_range`.
        begin_s: Unix time of the start of the horizontal axis.
    """
    series = [_series(panel, query, begin_s) for panel in panels]
    end_s = max(time_s for curve in series for _, points in curve for time_s, _ in points)
    cell = NAME_HEIGHT + HEIGHT - TOP + LINE_HEIGHT * max(map(len, series))
    num_rows = -(-len(panels) // COLUMNS)
    width, height = COLUMNS * (WIDTH + GAP) + GAP, num_rows * (cell + GAP) + GAP
    parts = [
        f"<style>svg {{ {LIGHT} font-family: system-ui, sans-serif; }}\n",
        f"@media (prefers-color-scheme: dark) {{ svg {{ {DARK} }} }}\n{RULES}.page {{ fill: var(--card); }}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
    ]
    for number, (panel, curves) in enumerate(zip(panels, series, strict=True)):
        row, column = divmod(number, COLUMNS)
        x, y = GAP + column * (WIDTH + GAP), GAP + row * (cell + GAP)
        parts.append(f'<g transform="translate({x},{y})">{_panel(panel, curves, end_s)}</g>')
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>\n'


def _series(panel, query, begin_s):
    curves = [
        (
            re.sub(
                r"\{\{(\w+)\}\}", lambda name, labels=result["metric"]: labels.get(name[1], ""), target["legendFormat"]
            ),
            [(time_s - begin_s, float(value)) for time_s, value in result["values"] if math.isfinite(float(value))],
        )
        for target in panel["targets"]
        for result in query(target["expr"])
    ]
    return [(label, points) for label, points in curves if points][:MAX_SERIES]


def _panel(panel, series, end_s):
    format_value = FORMATTERS.get(panel["fieldConfig"]["defaults"]["unit"], tick)
    highest = max((value for _, points in series for _, value in points), default=0.0)
    ticks, y = vertical_axis(highest if highest > 0 else 1.0)
    plot = [grid_line(y(value), format_value(value)) for value in ticks]
    for share, anchor in ((0.0, "start"), (1.0, "end")):
        plot.append(text(_x(share), HEIGHT - BOTTOM + 16, f"{share * end_s / 60:.0f} min", "tick", anchor))
    legend = []
    for index, (label, points) in enumerate(series):
        path = " ".join(f"{_x(time_s / end_s):.0f},{y(value):.1f}" for time_s, value in points)
        plot.append(f'<polyline class="line-{index}" points="{path}"/>')
        top = NAME_HEIGHT + HEIGHT - TOP - 10 + LINE_HEIGHT * index
        legend.append(f'<rect class="series-{index}" x="{LEFT}" y="{top}" width="10" height="10" rx="3"/>')
        last = f"{shortened(label, MAX_LETTERS)}: {format_value(points[-1][1])}"
        legend.append(text(LEFT + 16, top + 9, last, "label", "start"))
    name = text(0, 14, shortened(panel["title"], MAX_LETTERS), "value", "start")
    return "".join([name, f'<g transform="translate(0,{NAME_HEIGHT - TOP})">{"".join(plot)}</g>', *legend])


def _x(share):
    return LEFT + (WIDTH - LEFT - RIGHT) * share
