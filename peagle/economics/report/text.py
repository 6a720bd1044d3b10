"""A report on the terminal: lines for one run, a table for several."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from peagle.economics.report.data import check_report, compare
from peagle.economics.report.figures import (
    FIGURES,
    SHARES,
    UNKNOWN,
    format_count,
    format_duration,
    format_price,
    format_share,
    money_labels,
    savings_of_run,
)
from peagle.tables import aligned

_WIDTH = 100
_NAME_WIDTH = 14


def text_summary(report: Mapping[str, Any]) -> str:
    """Return the summary of a run: aligned lines, then notes."""
    check_report(report)
    run, account = report["run"], report["account"]
    lines = [
        ("rows", _rows(run, account)),
        ("output", _output(account)),
        ("speed", _speed(account)),
        *_acceptance(account["speculation"]),
        ("engines up", f"{format_duration(account['wall_s'])}, {_engines(account)}"),
        ("price", format_price(account["price"])),
        ("price source", f"{account['price']['source']}, {account['price']['as_of']}"),
        ("cost", _labelled(FIGURES["total_usd"].text(report), report)),
        ("spent on", " · ".join(f"{name} {format_share(report['shares'][name])}" for name in SHARES)),
        ("value", _labelled(_value(report), report)),
        *savings_of_run(report),
    ]
    title = " · ".join(part for part in (run["label"], run["precision"], _concurrency(run)) if part)
    body = [f"  {name:<{_NAME_WIDTH}}{text}" for name, text in lines]
    return "\n".join([title, *body, *_wrapped_notes(report["notes"])])


def text_comparison(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return the figures of several runs in columns, with ratios to the baseline."""
    compared = compare(reports)
    heads = [f"[{number}]" for number in range(1, len(reports) + 1)]
    rows = [("", *heads)]
    for figure in compared["figures"]:
        form = FIGURES[figure["name"]].words
        values = [UNKNOWN if value is None else form(value) for value in figure["values"]]
        ratios = [_ratio(i == compared["baseline"], ratio) for i, ratio in enumerate(figure["ratios"])]
        rows.append((figure["label"], *(f"{value}{ratio}" for value, ratio in zip(values, ratios, strict=True))))
    names = [
        _labelled(f"{head} {label}{' (baseline)' if index == compared['baseline'] else ''}", report)
        for index, (head, label, report) in enumerate(zip(heads, compared["labels"], reports, strict=True))
    ]
    return "\n".join([*names, *(f"  {line}" for line in aligned(rows)), *_wrapped_notes(compared["notes"])])


def _labelled(words: str, report: Mapping[str, Any]) -> str:
    labels = money_labels(report)
    return f"{words} ({'; '.join(labels)})" if labels else words


def _ratio(is_baseline: bool, ratio: float | None) -> str:
    if is_baseline:
        return ""
    return f"{f'x{ratio:.2f}' if ratio is not None else '':>8}"


def _rows(run: Mapping[str, Any], account: Mapping[str, Any]) -> str:
    of_all = f" of {run['num_input_rows']:,}" if run["num_input_rows"] is not None else ""
    return f"{account['num_rows']:,}{of_all} committed, {account['num_failed_rows']:,} failed"


def _output(account: Mapping[str, Any]) -> str:
    prompt = f"{format_count(account['num_prompt_tokens'])} prompt tokens, "
    cached = f"{format_count(account['num_cached_tokens'])} of them cached"
    return f"{format_count(account['num_output_tokens'])} tokens, for {prompt}{cached}"


def _speed(account: Mapping[str, Any]) -> str:
    busy, wall = account["output_tokens_per_s"], account["output_tokens_per_wall_s"]
    if busy is None or wall is None:
        return UNKNOWN
    return f"{busy:.1f} output tokens/s of a busy engine, {wall:.1f} with loading and idling"


def _acceptance(speculation: Mapping[str, Any]) -> list[tuple[str, str]]:
    if speculation["acceptance_length"] is None:
        return []
    rates = " ".join(format_share(rate) for rate in speculation["acceptance_rates"])
    return [
        (
            "acceptance",
            f"{speculation['acceptance_length']:.2f} tokens a step, over {speculation['num_drafts']:,} steps",
        ),
        ("by position", f"{rates} of the drafts"),
    ]


def _engines(account: Mapping[str, Any]) -> str:
    num = account["num_sessions"]
    return f"{num} engine start{'s' if num != 1 else ''}"


def _value(report: Mapping[str, Any]) -> str:
    if report["account"]["tokens_per_usd"] is None:
        return "no output yet"
    per_million = FIGURES["usd_per_million_tokens"].text(report)
    return f"{FIGURES['tokens_per_usd'].text(report)} output tokens per dollar, {per_million} per million"


def _concurrency(run: Mapping[str, Any]) -> str:
    return f"concurrency {run['concurrency']}" if run["concurrency"] else ""


def _wrapped_notes(notes: Sequence[str]) -> list[str]:
    return [
        textwrap.fill(note, _WIDTH, initial_indent="  ! ", subsequent_indent="    ", break_on_hyphens=False)
        for note in notes
    ]
