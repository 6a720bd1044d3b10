"""A report as a single HTML page (`page.html.j2`) with SVG plots, without scripts or external resources."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from peagle.charts import DARK, LIGHT, MAX_SERIES, RULES
from peagle.economics.report.data import check_report, compare
from peagle.economics.report.figures import (
    FIGURES,
    SHARE_MEANINGS,
    SHARES,
    UNKNOWN,
    format_duration,
    format_price,
    format_share,
    format_usd,
    money_labels,
)
from peagle.economics.report.panels import headline, of_rows, over_time
from peagle.economics.report.plots import SHARE_DARK, SHARE_LIGHT, SHARE_RULES, Rates, acceptance_svg, money_svg
from peagle.economics.report.saved import savings_of_run

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
    """Return the page of one run, or of several runs side by side.

    Args:
        reports: one or more results of `report_dict`.
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
        "svg_style": {
            "light": f"{LIGHT} {SHARE_LIGHT}",
            "dark": f"{DARK} {SHARE_DARK}",
            "rules": RULES + SHARE_RULES,
        },
        "money_labels": _money_labels(reports, labels),
        "headline": headline(reports, labels),
        "details": [*over_time(first), *of_rows(first)] if is_single else [],
        "samples": (first.get("rows") or {}).get("samples", []) if is_single else [],
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
        **_configuration(reports),
    }


def _money_labels(reports: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> list[str]:
    """Return each label once, followed by the runs that it applies to unless it is all of them."""
    runs_of: dict[str, list[str]] = {}
    for label, report in zip(labels, reports, strict=True):
        for money_label in money_labels(report):
            runs_of.setdefault(money_label, []).append(label)
    return [name if len(runs) == len(reports) else f"{name} ({', '.join(runs)})" for name, runs in runs_of.items()]


def _status(report: Mapping[str, Any]) -> str:
    run = report["run"]
    state = {True: "complete", False: "not finished", None: ""}[run["complete"]]
    when = f"started {_moment(run['started_at'])}" if run["started_at"] else ""
    return " · ".join(part for part in (state, when, run["path"]) if part)


def _models(reports: Sequence[Mapping[str, Any]]) -> str:
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
            "rates": [format_share(rate) for rate in run.rates],
        }
        for run in drafting
    ]


def _money_row(name: str, reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    cells = [(format_share(report["shares"][name]), format_usd(report["account"]["usd"][name])) for report in reports]
    return {"name": name, "meaning": SHARE_MEANINGS[name], "cells": cells}


def _comparison(compared: Mapping[str, Any]) -> dict[str, Any]:
    rows = []
    for figure in compared["figures"]:
        if figure["name"].startswith("share_"):
            continue  # in another table
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


def _configuration(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return keys that are equal in all runs, and those that differ, by run."""
    columns = [_configuration_of(report) for report in reports]
    rows = [(name, [column[name] for column in columns]) for name in columns[0]]
    known = [(name, cells) for name, cells in rows if any(cell != UNKNOWN for cell in cells)]
    return {
        "same": [(name, cells[0]) for name, cells in known if len(set(cells)) == 1],
        "differing": [(name, cells) for name, cells in known if len(set(cells)) > 1],
    }


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
        "price": format_price(price),
        "price source": f"{price['source']}, {price['as_of']}",
        "device-seconds": f"{account['device_s']['total']:,.0f} ({format_duration(account['device_s']['total'])})",
        "input rows": _words(run["num_input_rows"]),
        "started": _moment(run["started_at"]),
        "finished": _moment(run["finished_at"]),
        "run directory": _words(run["path"]),
    }


def _words(value: object) -> str:
    """Format a configuration value, as "temperature 0, max_tokens 128". Empty values are left out."""
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
