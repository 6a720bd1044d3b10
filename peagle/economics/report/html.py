"""A report as one HTML page without scripts or other hosts, light and dark.

Its two plots are SVG.

It knows reports as data only. `page.html.j2` is the page; here its contents are laid out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
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
    drawing,
    grid_line,
    text,
    title,
    x_axis_name,
    y_axis_name,
)
from peagle.economics.report.data import check_report, compare
from peagle.economics.report.figures import (
    FIGURES,
    SHARE_MEANINGS,
    SHARES,
    UNKNOWN,
    in_words_s,
    in_words_share,
    in_words_usd,
    price_in_words,
)
from peagle.economics.report.saved import savings_of_run

_LABELLED_BAR = 18  # narrower ones' values would run into each other


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Acceptance by position of one run; `series` picks its colour."""

    label: str
    rates: Sequence[float]
    series: int


def acceptance_svg(runs: Sequence[Rates]) -> str:
    """Grouped bars: the share of drafts accepted, for each draft position.

    Args:
        runs: one or more, at most `MAX_SERIES`, each with at least one rate.
    """
    num_positions = max(len(run.rates) for run in runs)
    ceiling = _nice_ceiling(max(max(run.rates) for run in runs))
    plot_height = HEIGHT - TOP - BOTTOM
    group = (WIDTH - LEFT - RIGHT) / num_positions
    bar = min(group * 0.76 / len(runs), 46)

    def y(share: float) -> float:
        return TOP + plot_height * (1 - share / ceiling)

    parts = [grid_line(y(ceiling * step / 4), _grid_label(ceiling * step / 4)) for step in range(5)]
    for position in range(num_positions):
        centre = LEFT + group * (position + 0.5)
        parts.append(text(centre, HEIGHT - BOTTOM + 16, str(position + 1), "tick", "middle"))
        for index, run in enumerate(runs):
            if position < len(run.rates):
                x = centre + bar * (index - len(runs) / 2)
                words = f"{run.label}, position {position + 1}: {run.rates[position]:.1%}"
                parts.append(_column(x, bar, y(run.rates[position]), y(0), run.series, words))
                if bar >= _LABELLED_BAR:
                    parts.append(_value_label(x + bar / 2, y(run.rates[position]), run.rates[position], bar))
    parts += [x_axis_name("position in the draft"), y_axis_name("share of drafts", at_right=True)]
    return drawing(HEIGHT, "Acceptance by position", parts)


def money_svg(runs: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """One bar a run, cut into the shares of its cost.

    With several runs each bar has its label above it.

    Args:
        runs: label and share by name, each summing to 1 (or all 0 where nothing was spent).
    """
    bar_height, label_height, gap = 34, 18 if len(runs) > 1 else 0, 12
    parts, y = [], 4.0
    for label, shares in runs:
        if label_height:
            parts.append(text(0, y + 12, _shortened(label), "label", "start"))
        parts += _stacked_bar(y + label_height, bar_height, label, shares)
        y += label_height + bar_height + gap
    return drawing(round(y - gap + 4), "Where the money went", parts)


def _stacked_bar(y: float, height: float, label: str, shares: Mapping[str, float]) -> list[str]:
    edges = [0.0]
    for name in SHARES:
        edges.append(edges[-1] + WIDTH * shares[name])
    parts = []
    for name, (start, end) in zip(SHARES, pairwise(edges), strict=True):
        if end <= start:
            continue
        # A gap of 2 between neighbours; a sliver stays visible.
        width = max(end - start - 2, 1)
        words = title(f"{label}: {name} {shares[name]:.1%}")
        parts.append(
            f'<rect class="share-{name}" x="{start:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}" '
            f'rx="3">{words}</rect>'
        )
        if width >= 34:
            share = in_words_share(shares[name])
            parts.append(text(start + width / 2, y + height / 2 + 4, share, f"inside on-{name}", "middle"))
    return parts


def _column(x: float, width: float, top: float, base: float, series: int, words: str) -> str:
    """A bar that is square at its base and rounded at its end."""
    width = max(width - 2, 1)
    radius = min(4, width / 2, base - top)
    path = (
        f"M{x + 1:.1f},{base:.1f} V{top + radius:.1f} q0,{-radius:.1f} {radius:.1f},{-radius:.1f} "
        f"h{width - 2 * radius:.1f} q{radius:.1f},0 {radius:.1f},{radius:.1f} V{base:.1f} Z"
    )
    return f'<path class="series-{series}" d="{path}">{title(words)}</path>'


def _value_label(x: float, y: float, rate: float, width: float) -> str:
    share = in_words_share(rate)
    return text(x, y - 5, share if width >= 26 else share.rstrip("%"), "value", "middle")


def _grid_label(share: float) -> str:
    return f"{share:.3g}" if share == 0 else f"{100 * share:.3g}%"


def _nice_ceiling(share: float) -> float:
    return next(ceiling for ceiling in (0.2, 0.4, 0.6, 0.8, 1.0) if share <= ceiling)


def _shortened(label: str, num_letters: int = 64) -> str:
    return label if len(label) <= num_letters else label[: num_letters - 1] + "…"


_CARDS = (
    "usd_per_million_tokens",
    "output_tokens_per_s",
    "acceptance_length",
    "total_usd",
    "num_rows",
    "num_failed_rows",
    "wall_s",
)


def render_html(reports: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> str:
    """One page: the figures of one run, or several runs side by side.

    Args:
        reports: what `report_dict` made, or several of them.

    Raises:
        PeagleError: there is no report, or one cannot be shown by this version.
    """
    from jinja2 import Environment, StrictUndefined

    several = [reports] if isinstance(reports, Mapping) else list(reports)
    checked = [check_report(report) for report in several]
    source = (files("peagle.economics.report") / "page.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source).render(_contents(checked))


def _contents(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    compared = compare(reports)
    labels = compared["labels"]
    drafting = _drafting(reports, labels)
    is_single = len(reports) == 1
    first = reports[0]
    return {
        "title": first["run"]["label"] if is_single else f"{len(reports)} runs of {_models(reports)}",
        "is_single": is_single,
        "svg_style": {"light": LIGHT, "dark": DARK, "rules": RULES},
        "status": _status(first) if is_single else None,
        "labels": labels,
        "hero": FIGURES["tokens_per_usd"].text(first),
        "cards": [(FIGURES[name].label, FIGURES[name].text(first)) for name in _CARDS],
        "comparison": None if is_single else _comparison(compared),
        "notes": _all_notes(reports, compared),
        "acceptance_svg": acceptance_svg(drafting[:MAX_SERIES]) if drafting else None,
        "acceptance": _acceptance(reports, labels, drafting),
        "num_unplotted": max(len(drafting) - MAX_SERIES, 0),
        "money_svg": money_svg([(label, report["shares"]) for label, report in zip(labels, reports, strict=True)]),
        "money": [_money_row(name, reports) for name in SHARES],
        "saved": savings_of_run(first) if is_single else [],
        "configuration": _configuration(reports),
    }


def _status(report: Mapping[str, Any]) -> str:
    run = report["run"]
    state = {True: "complete", False: "not finished", None: ""}[run["complete"]]
    when = f"started {_moment(run['started_at'])}" if run["started_at"] else ""
    return " · ".join(part for part in (state, when, run["path"]) if part)


def _models(reports: Sequence[Mapping[str, Any]]) -> str:
    """The models' names, each once."""
    return " and ".join(dict.fromkeys(report["run"]["model"] for report in reports))


def _drafting(reports: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> list[Rates]:
    measured = [
        (label, report["account"]["speculation"]["acceptance_rates"])
        for label, report in zip(labels, reports, strict=True)
    ]
    with_rates = [(label, rates) for label, rates in measured if rates]
    return [
        Rates(label=label, rates=rates, series=index % MAX_SERIES) for index, (label, rates) in enumerate(with_rates)
    ]


def _acceptance(
    reports: Sequence[Mapping[str, Any]], labels: Sequence[str], drafting: Sequence[Rates]
) -> list[dict[str, Any]]:
    lengths = {label: FIGURES["acceptance_length"].text(report) for label, report in zip(labels, reports, strict=True)}
    return [
        {
            "label": run.label,
            "series": run.series,
            "length": lengths[run.label],
            "rates": [in_words_share(rate) for rate in run.rates],
        }
        for run in drafting
    ]


def _money_row(name: str, reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    cells = [
        (in_words_share(report["shares"][name]), in_words_usd(report["account"]["usd"][name])) for report in reports
    ]
    return {"name": name, "meaning": SHARE_MEANINGS[name], "cells": cells}


def _comparison(compared: Mapping[str, Any]) -> dict[str, Any]:
    rows = []
    for figure in compared["figures"]:
        if figure["name"].startswith("share_"):
            continue  # the page has a table of its own for them
        form = FIGURES[figure["name"]].words
        cells = [
            (
                UNKNOWN if value is None else form(value),
                None if ratio is None else f"\N{MULTIPLICATION SIGN} {ratio:.2f}",
            )
            for value, ratio in zip(figure["values"], figure["ratios"], strict=True)
        ]
        rows.append((figure["label"], cells))
    return {"baseline": compared["baseline"], "rows": rows}


def _all_notes(reports: Sequence[Mapping[str, Any]], compared: Mapping[str, Any]) -> list[str]:
    if len(reports) == 1:
        return list(reports[0]["notes"])
    own = [
        f"{label}: {note}"
        for label, report in zip(compared["labels"], reports, strict=True)
        for note in report["notes"]
    ]
    return [*compared["notes"], *own]


def _configuration(reports: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    columns = [_configuration_of(report) for report in reports]
    rows = [(name, [column[name] for column in columns]) for name in columns[0]]
    return [(name, cells) for name, cells in rows if any(cell != UNKNOWN for cell in cells)]


def _configuration_of(report: Mapping[str, Any]) -> dict[str, str]:
    run, account = report["run"], report["account"]
    price = account["price"]
    return {
        "model": _words(run["model"]),
        "drafter": _words(run["drafter"] or "none"),
        "draft tokens (K)": _words(run["num_speculative_tokens"] if run["drafter"] else None),
        "precision": _words(run["precision"]),
        "sampling": _words(run["sampling"]),
        "concurrency": _words(run["concurrency"]),
        "engines": _words(run["num_engines"]),
        "engine starts": _words(account["num_sessions"]),
        "hardware": _words(run["hardware"]),
        "versions": _words(run["versions"]),
        "price": price_in_words(price),
        "price source": f"{price['source']}, {price['as_of']}",
        "device-seconds": f"{account['device_s']['total']:,.0f} ({in_words_s(account['device_s']['total'])})",
        "input rows": _words(run["num_input_rows"]),
        "started": _moment(run["started_at"]),
        "finished": _moment(run["finished_at"]),
        "run directory": _words(run["path"]),
    }


def _words(value: object) -> str:
    """Configuration as read aloud: "temperature 0, max_tokens 128".

    Empty values are left out.
    """
    if isinstance(value, Mapping):
        parts = [f"{name} {_words(item)}" for name, item in value.items() if item not in (None, "", [], {})]
        return ", ".join(parts) or UNKNOWN
    if isinstance(value, list | tuple):
        return " ".join(_words(item) for item in value) or UNKNOWN
    if isinstance(value, float):
        return f"{value:.6g}"
    return UNKNOWN if value is None else str(value)


def _moment(moment: str | None) -> str:
    return moment.replace("T", " ").replace("+00:00", " UTC") if moment else UNKNOWN
