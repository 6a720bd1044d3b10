"""Panels of the report page: heading, text and plots. Data missing from older reports is skipped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from peagle.economics.report.figures import SHARES, format_count, format_duration, format_share, format_usd
from peagle.economics.report.plots import Bar, bars_svg, histogram_svg, plain_bar, tick, usd_tick
from peagle.economics.report.time_plots import engines_svg, series_svg


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel.

    Attributes:
        lead: the text below the heading.
        plots: caption (may be empty) and SVG.
        legend: CSS class and meaning.
        is_money: whether to show `money_labels`.
    """

    heading: str
    lead: str
    plots: Sequence[tuple[str, str]]
    legend: Sequence[tuple[str, str]] = ()
    is_money: bool = False


_PAID = "Includes the cost of loading, compiling, idling and lost work."


def headline(reports: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> Panel:
    """Return output tokens per dollar: of each run, or of one run with and without its drafter."""
    bars = [_with(report, label) for report, label in zip(reports, labels, strict=True)]
    without, lead = _without(reports[0]) if len(reports) == 1 else ([], _PAID)
    bars += without
    plot = bars_svg(bars, "Output tokens per dollar: " + "; ".join(f"{bar.label} {bar.words}" for bar in bars))
    return Panel(heading="Output tokens per dollar", lead=lead, plots=[("", plot)], is_money=True)


def _with(report: Mapping[str, Any], label: str) -> Bar:
    value = report["account"]["tokens_per_usd"]
    return plain_bar(label, value or 0.0, "no output yet" if value is None else format_count(value))


def _without(report: Mapping[str, Any]) -> tuple[list[Bar], str]:
    """Return the bar of the same work without the drafter, and the text of the panel."""
    saved, account = report.get("saved") or {"speculation": {"usd": None}}, report["account"]
    if report["run"]["drafter"] is None or account["tokens_per_usd"] is None:
        return [], _PAID
    one = saved["speculation"]
    if one["usd"] is None:
        return [], "Without the drafter: unknown, because its step times were not measured."
    tokens, total_usd, error_usd = account["num_output_tokens"], account["usd"]["total"] + one["usd"], one["error_usd"]
    value, low, high = tokens / total_usd, None, None
    words = f"{format_count(value)}, of unknown error"
    if error_usd is not None and error_usd < total_usd:
        low, high = tokens / (total_usd + error_usd), tokens / (total_usd - error_usd)
        words = f"{format_count(value)} ({format_count(low)} to {format_count(high)})"
    bar = replace(plain_bar("the same without the drafter", value, words, "series-1"), low=low, high=high)
    sources = ", ".join(saved["sources"])
    rest = f" Unknown for {format_usd(one['unknown_usd'])} of it." if one["unknown_usd"] else ""
    lead = f"Without the drafter: equal loading, idling and losses, with measured step times ({sources}).{rest}"
    return [bar], lead


def over_time(report: Mapping[str, Any]) -> list[Panel]:
    """Return panels of engine states, tokens per second and dollars over time."""
    timeline = report.get("timeline")
    if not timeline:
        return []
    peak, usd = max(timeline["tokens_per_s"]), timeline["usd"][-1]
    shown, num = len(timeline["engines"]), timeline["num_engines"]
    rest = f" Showing the first {shown} of {num} engines." if num > shown else ""
    cut = " Dashed lines are pauses without an engine, which are cut out." if timeline["pauses"] else ""
    speed = f"Maximum {peak:,.1f} over {format_duration(timeline['step_s'])}; tokens are spread evenly over a unit."
    paid = f"{format_usd(usd)} in {format_duration(timeline['total_s'])} of engine time."
    states = (
        "Heartbeats record the duration of states, not their order. Busy is drawn where a committed unit was open, "
        f"and lost time at the end of an engine.{rest}"
    )
    return [
        Panel(
            heading="Engines",
            lead=states + cut,
            plots=[("", engines_svg(timeline))],
            legend=[(f"share-{name}", name) for name in SHARES],
        ),
        Panel(
            heading="Output tokens/s",
            lead=speed + cut,
            plots=[("", series_svg(timeline["tokens_per_s"], timeline, f"Output tokens/s over time. {speed}", tick))],
        ),
        Panel(
            heading="Dollars spent",
            lead=paid + cut,
            plots=[("", series_svg(timeline["usd"], timeline, f"Dollars over time: {paid}", usd_tick, is_sum=True))],
            is_money=True,
        ),
    ]


def of_rows(report: Mapping[str, Any]) -> list[Panel]:
    """Return panels of lengths, latencies, finish reasons and failures."""
    return [*_measured(report), *_ends(report)]


_LENGTHS = (("num_prompt_tokens", "prompt tokens"), ("num_output_tokens", "output tokens"))
_TIMES = (("ttft_s", "seconds to the first token"), ("latency_s", "seconds of a row in its engine"))


def _measured(report: Mapping[str, Any]) -> list[Panel]:
    rows = report.get("rows")
    if not rows:
        return []
    read, num = rows["num_read"], report["account"]["num_rows"]
    of_all = f"A sample of {read:,} of {num:,} rows." if read < num else f"All {num:,} rows."
    panels = []
    for heading, kinds in (("Lengths", _LENGTHS), ("Latency and time to first token", _TIMES)):
        plots = [
            (_percentiles(measure, name), histogram_svg(measure["histogram"], _percentiles(measure, name), name))
            for column, name in kinds
            if (measure := rows["measures"].get(column))
        ]
        if plots:
            panels.append(Panel(heading=heading, lead=of_all, plots=plots))
    return panels


def _percentiles(measure: Mapping[str, Any], name: str) -> str:
    values = ", ".join(f"p{percent} {measure[f'p{percent}']:,.3g}" for percent in (50, 95, 99))
    return f"{name[0].upper()}{name[1:]}: {values}"


def _ends(report: Mapping[str, Any]) -> list[Panel]:
    plots, rows, failed = [], report.get("rows"), report.get("failures")
    if rows:
        reasons = [
            plain_bar(reason, count, f"{count:,} ({format_share(count / rows['num_read'])})")
            for reason, count in rows["finish_reasons"].items()
        ]
        plots.append((f"Finish reasons of {rows['num_read']:,} rows", _bars("Finish reasons", reasons)))
    if failed:
        reasons = [plain_bar(one["reason"], one["count"], f"{one['count']:,}", "share-lost") for one in failed]
        first = f"Failures, by reason; {failed[0]['reason']}, for example: {failed[0]['example']}"
        plots.append((first, _bars("Failures by reason", reasons)))
    return (
        [Panel(heading="How rows ended", lead="Each row has an answer, or a dead letter in failed/.", plots=plots)]
        if plots
        else []
    )


def _bars(name: str, bars: Sequence[Bar]) -> str:
    return bars_svg(bars, f"{name}: " + ", ".join(f"{bar.label} {bar.words}" for bar in bars))
