"""A report as a single HTML page (`page.html.j2`) with SVG plots, without scripts or external resources.

Panels without data are omitted, so older reports can still be rendered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from peagle.charts import DARK, LIGHT, MAX_SERIES, RULES
from peagle.economics.report.data import check_report, compare
from peagle.economics.report.figures import (
    FIGURES,
    SHARE_MEANINGS,
    SHARES,
    UNKNOWN,
    format_count,
    format_duration,
    format_price,
    format_share,
    format_usd,
    money_labels,
    savings_of_run,
)
from peagle.economics.report.plots import (
    SHARE_DARK,
    SHARE_LIGHT,
    SHARE_RULES,
    Bar,
    Rates,
    acceptance_svg,
    bars_svg,
    engines_svg,
    histogram_svg,
    plain_bar,
    series_svg,
    shares_svg,
    tick,
    usd_tick,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    heading: str
    lead: str
    plots: Sequence[tuple[str, str]]  # (caption, SVG)
    legend: Sequence[tuple[str, str]] = ()  # (CSS class, name)
    shows_dollars: bool = False


def headline_panel(reports: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> Panel:
    """Return the panel of output tokens per dollar: of several runs, or of one run with and without its drafter."""
    bars = []
    for report, label in zip(reports, labels, strict=True):
        value = report["account"]["tokens_per_usd"]
        bars.append(plain_bar(label, value or 0.0, "no output yet" if value is None else format_count(value)))
    lead = "Includes the cost of loading, compiling, idle time and lost work."
    has_drafter_and_output = reports[0]["run"]["drafter"] is not None and reports[0]["account"]["tokens_per_usd"]
    if len(reports) == 1 and has_drafter_and_output:
        estimated_bars, lead = _without_drafter(reports[0])
        bars += estimated_bars
    plot = bars_svg(bars, "Output tokens per dollar: " + "; ".join(f"{bar.label} {bar.value_text}" for bar in bars))
    return Panel(heading="Output tokens per dollar", lead=lead, plots=[("", plot)], shows_dollars=True)


def _without_drafter(report: Mapping[str, Any]) -> tuple[list[Bar], str]:
    """Return the bar of the same work without the drafter, and the lead of the panel."""
    account = report["account"]
    saved = report.get("saved") or {"speculation": {"usd": None}}
    savings = saved["speculation"]
    if savings["usd"] is None:
        return [], "Without the drafter: unknown, because its step times were not measured."
    tokens, usd_without_drafter = account["num_output_tokens"], account["usd"]["total"] + savings["usd"]
    error_usd = savings["error_usd"]
    value, low, high = tokens / usd_without_drafter, None, None
    value_text = f"{format_count(value)} (error unknown)"
    if error_usd is not None and error_usd < usd_without_drafter:
        low, high = tokens / (usd_without_drafter + error_usd), tokens / (usd_without_drafter - error_usd)
        value_text = f"{format_count(value)} ({format_count(low)} to {format_count(high)})"
    bar = replace(plain_bar("the same without the drafter", value, value_text, "series-1"), low=low, high=high)
    sources = ", ".join(saved["sources"])
    unknown = f" Unknown for {format_usd(savings['unknown_usd'])} of the cost." if savings["unknown_usd"] else ""
    lead = f"Without the drafter: estimated from step times ({sources}); loading, idle and lost time unchanged."
    lead += unknown
    return [bar], lead


def timeline_panels(report: Mapping[str, Any]) -> list[Panel]:
    timeline = report.get("timeline")
    if not timeline:
        return []
    peak, usd = max(timeline["tokens_per_s"]), timeline["usd"][-1]
    num_shown, num_engines = len(timeline["engines"]), timeline["num_engines"]
    selection = f" Showing the first {num_shown} of {num_engines} engines." if num_engines > num_shown else ""
    pauses = " Dashed lines mark omitted pauses without a running engine." if timeline["pauses"] else ""
    step = format_duration(timeline["step_s"])
    speed = f"Maximum {peak:,.1f}, averaged over {step}; a unit's tokens are spread evenly over its time in the engine."
    cost = f"{format_usd(usd)} in {format_duration(timeline['total_s'])} of engine time."
    states = (
        "Heartbeats record the duration of states, not their order. Busy time is drawn where a committed unit "
        f"was running, and lost time at the end of an engine's life.{selection}"
    )
    return [
        Panel(
            heading="Engines",
            lead=states + pauses,
            plots=[("", engines_svg(timeline))],
            legend=[(f"share-{name}", name) for name in SHARES],
        ),
        Panel(
            heading="Output tokens/s",
            lead=speed + pauses,
            plots=[("", series_svg(timeline["tokens_per_s"], timeline, f"Output tokens/s over time. {speed}", tick))],
        ),
        Panel(
            heading="Dollars spent",
            lead=cost + pauses,
            plots=[("", series_svg(timeline["usd"], timeline, f"Dollars over time: {cost}", usd_tick, is_sum=True))],
            shows_dollars=True,
        ),
    ]


_MEASURES = {
    # heading -> column -> name
    "Lengths": {"num_prompt_tokens": "prompt tokens", "num_output_tokens": "output tokens"},
    "Latency and time to first token": {
        "ttft_s": "seconds to the first token",
        "latency_s": "seconds that a row spent in its engine",
    },
}


def row_panels(report: Mapping[str, Any]) -> list[Panel]:
    panels, plots = [], []
    rows, failures = report.get("rows"), report.get("failures")
    if rows:
        num_read, num_rows = rows["num_read"], report["account"]["num_rows"]
        lead = f"A sample of {num_read:,} of {num_rows:,} rows." if num_read < num_rows else f"All {num_rows:,} rows."
        for heading, names in _MEASURES.items():
            measures = [(rows["measures"].get(column), name) for column, name in names.items()]
            histograms = [_histogram(measure, name) for measure, name in measures if measure]
            if histograms:
                panels.append(Panel(heading=heading, lead=lead, plots=histograms))
        bars = [
            plain_bar(reason, count, f"{count:,} ({format_share(count / num_read)})")
            for reason, count in rows["finish_reasons"].items()
        ]
        plots.append((f"Finish reasons of {num_read:,} rows", _bars("Finish reasons", bars)))
    if failures:
        bars = [plain_bar(group["reason"], group["count"], f"{group['count']:,}", "share-lost") for group in failures]
        caption = f"Failures by reason. Example of {failures[0]['reason']}: {failures[0]['example']}"
        plots.append((caption, _bars("Failures by reason", bars)))
    if plots:
        lead = "Each row has an answer, or a dead letter in failed/."
        panels.append(Panel(heading="How rows ended", lead=lead, plots=plots))
    return panels


def _histogram(measure: Mapping[str, Any], name: str) -> tuple[str, str]:
    values = ", ".join(f"p{percent} {measure[f'p{percent}']:,.3g}" for percent in (50, 95, 99))
    title = f"{name[0].upper()}{name[1:]}: {values}"
    return title, histogram_svg(measure["histogram"], title, name)


def _bars(name: str, bars: Sequence[Bar]) -> str:
    return bars_svg(bars, f"{name}: " + ", ".join(f"{bar.label} {bar.value_text}" for bar in bars))


_CARDS = (
    *("usd_per_million_tokens", "output_tokens_per_s", "acceptance_length", "total_usd"),
    *("num_rows", "num_failed_rows", "wall_s"),
)


def render_html(reports: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> str:
    from jinja2 import Environment, StrictUndefined

    checked = [check_report(report) for report in ([reports] if isinstance(reports, Mapping) else reports)]
    source = (files("peagle.economics.report") / "page.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source).render(_template_values(checked))


def _template_values(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    compared = compare(reports)
    labels = compared["labels"]
    all_rates = [report["account"]["speculation"]["acceptance_rates"] for report in reports]
    drafted_runs = [(index, rates) for index, rates in enumerate(all_rates) if rates]
    curves = [
        Rates(label=labels[index], rates=rates, series=number % MAX_SERIES)
        for number, (index, rates) in enumerate(drafted_runs)
    ]
    is_single = len(reports) == 1
    first = reports[0]
    notes = compared["notes"] + [
        f"{label}: {note}" for label, report in zip(labels, reports, strict=True) for note in report["notes"]
    ]
    models = dict.fromkeys(report["run"]["model"] for report in reports)
    return {
        "title": first["run"]["label"] if is_single else f"{len(reports)} runs of {' and '.join(models)}",
        "is_single": is_single,
        "svg_style": {
            "light": f"{LIGHT} {SHARE_LIGHT}",
            "dark": f"{DARK} {SHARE_DARK}",
            "rules": RULES + SHARE_RULES,
        },
        "money_labels": _money_labels(reports, labels),
        "headline": headline_panel(reports, labels),
        "details": [*timeline_panels(first), *row_panels(first)] if is_single else [],
        "samples": (first.get("rows") or {}).get("samples", []) if is_single else [],
        "status": _status(first) if is_single else None,
        "labels": labels,
        "hero": FIGURES["tokens_per_usd"].text(first),
        "cards": [(FIGURES[name].label, FIGURES[name].text(first)) for name in _CARDS],
        "comparison": None if is_single else _comparison(compared),
        "notes": first["notes"] if is_single else notes,
        "acceptance_svg": acceptance_svg(curves[:MAX_SERIES]) if curves else None,
        "acceptance": [
            {
                "label": curve.label,
                "series": curve.series,
                "length": FIGURES["acceptance_length"].text(reports[index]),
                "rates": [format_share(rate) for rate in curve.rates],
            }
            for curve, (index, _) in zip(curves, drafted_runs, strict=True)
        ],
        "num_unplotted": max(len(curves) - MAX_SERIES, 0),
        "money_svg": shares_svg([(label, report["shares"]) for label, report in zip(labels, reports, strict=True)]),
        "money": [
            {
                "name": name,
                "meaning": SHARE_MEANINGS[name],
                "cells": [
                    (format_share(report["shares"][name]), format_usd(report["account"]["usd"][name]))
                    for report in reports
                ],
            }
            for name in SHARES
        ],
        "saved": savings_of_run(first) if is_single else [],
        **_configuration(reports),
    }


def _money_labels(reports: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> list[str]:
    """Return why the costs are not a real bill. A reason that does not apply to all runs names its runs."""
    runs_by_label: dict[str, list[str]] = {}
    for label, report in zip(labels, reports, strict=True):
        for money_label in money_labels(report):
            runs_by_label.setdefault(money_label, []).append(label)
    return [
        name if len(runs) == len(reports) else f"{name} ({', '.join(runs)})" for name, runs in runs_by_label.items()
    ]


def _status(report: Mapping[str, Any]) -> str:
    run = report["run"]
    state = {True: "complete", False: "not finished", None: ""}[run["complete"]]
    when = f"started {_time_text(run['started_at'])}" if run["started_at"] else ""
    return " · ".join(part for part in (state, when, run["path"]) if part)


def _comparison(compared: Mapping[str, Any]) -> dict[str, Any]:
    rows = []
    for figure in compared["figures"]:
        if figure["name"].startswith("share_"):
            continue  # in another table
        format_value = FIGURES[figure["name"]].format
        texts = [UNKNOWN if value is None else format_value(value) for value in figure["values"]]
        ratios = [None if ratio is None else f"\N{MULTIPLICATION SIGN} {ratio:.2f}" for ratio in figure["ratios"]]
        rows.append((figure["label"], list(zip(texts, ratios, strict=True))))
    return {"baseline": compared["baseline"], "rows": rows}


def _configuration(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that are equal in all runs, and those that differ, by run."""
    columns = [_configuration_of(report) for report in reports]
    rows = [(name, [column[name] for column in columns]) for name in columns[0]]
    known_rows = [(name, cells) for name, cells in rows if set(cells) != {UNKNOWN}]
    return {
        "same": [(name, cells[0]) for name, cells in known_rows if len(set(cells)) == 1],
        "differing": [(name, cells) for name, cells in known_rows if len(set(cells)) > 1],
    }


def _configuration_of(report: Mapping[str, Any]) -> dict[str, str]:
    run, account = report["run"], report["account"]
    price = account["price"]
    return {
        "model": _value_text(run["model"]),
        "drafter": _value_text(run["drafter"] or "none"),
        "draft tokens (K)": _value_text(run["num_speculative_tokens"] if run["drafter"] else None),
        "precision": _value_text(run["precision"]),
        "sampling": _value_text(run["sampling"]),
        "concurrency": _value_text(run["concurrency"]),
        "engines": _value_text(run["num_engines"]),
        "engine starts": _value_text(account["num_sessions"]),
        "hardware": _value_text(run["hardware"]),
        "versions": _value_text(run["versions"]),
        "price": format_price(price),
        "price source": f"{price['source']}, {price['as_of']}",
        "device-seconds": f"{account['device_s']['total']:,.0f} ({format_duration(account['device_s']['total'])})",
        "input rows": _value_text(run["num_input_rows"]),
        "started": _time_text(run["started_at"]),
        "finished": _time_text(run["finished_at"]),
        "run directory": _value_text(run["path"]),
    }


def _value_text(value: object) -> str:
    """Format a configuration value, such as "temperature 0, max_tokens 128". Empty values are left out."""
    if isinstance(value, Mapping):
        parts = [f"{name} {_value_text(item)}" for name, item in value.items() if item not in (None, "", [], {})]
        return ", ".join(parts) or UNKNOWN
    if isinstance(value, list | tuple):
        return " ".join(_value_text(item) for item in value) or UNKNOWN
    if isinstance(value, float):
        return f"{value:.6g}"
    return UNKNOWN if value is None else str(value)


def _time_text(timestamp: str | None) -> str:
    return timestamp.replace("T", " ").replace("+00:00", " UTC") if timestamp else UNKNOWN
