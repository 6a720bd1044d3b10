"""A report for the terminal: lines for a single run, a table for several."""

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

_MAX_NOTES = 3


def short_summary(report: Mapping[str, Any]) -> str:
    """Return the output and cost of a finished run in a few lines, with the first notes of the report."""
    check_report(report)
    run, account = report["run"], report["account"]
    of_all = f" of {run['num_input_rows']:,}" if run["num_input_rows"] is not None else ""
    lines = [("rows", f"{account['num_rows']:,}{of_all}, {account['num_failed_rows']:,} failed")]
    tokens, prompts = format_count(account["num_output_tokens"]), format_count(account["num_prompt_tokens"])
    lines.append(("tokens", f"{tokens} generated, {prompts} in prompts"))
    busy_speed, wall_speed = account["output_tokens_per_s"], account["output_tokens_per_wall_s"]
    if busy_speed is not None and wall_speed is not None:
        speed = f"{busy_speed:.1f} output tokens/s, {wall_speed:.1f} with loading and idle time"
        length = account["speculation"]["acceptance_length"]
        lines.append(("speed", speed if length is None else f"{speed}; acceptance length {length:.2f}"))
    cost = _labelled(FIGURES["total_usd"].text(report), report)
    if account["tokens_per_usd"] is not None:
        cost = f"{cost}: {FIGURES['tokens_per_usd'].text(report)} output tokens per dollar"
    lines.append(("cost", cost))
    notes = report["notes"]
    num_more = len(notes) - _MAX_NOTES
    more = [f"  {num_more} more note{'s' if num_more > 1 else ''}: peagle report {run['path']}"] if num_more > 0 else []
    return "\n".join([*(f"{name:<8}{text}" for name, text in lines), *_wrapped_notes(notes[:_MAX_NOTES]), *more])


def text_summary(report: Mapping[str, Any]) -> str:
    check_report(report)
    run, account = report["run"], report["account"]
    of_all = f" of {run['num_input_rows']:,}" if run["num_input_rows"] is not None else ""
    starts = f"{account['num_sessions']} engine start{'s' if account['num_sessions'] != 1 else ''}"
    speed, value = UNKNOWN, "no output yet"
    busy_speed, wall_speed = account["output_tokens_per_s"], account["output_tokens_per_wall_s"]
    if busy_speed is not None and wall_speed is not None:
        speed = f"{busy_speed:.1f} output tokens/s of a busy engine, {wall_speed:.1f} with loading and idle time"
    if account["tokens_per_usd"] is not None:
        per_million = FIGURES["usd_per_million_tokens"].text(report)
        value = f"{FIGURES['tokens_per_usd'].text(report)} output tokens per dollar, {per_million} per million"
    lines = [
        ("rows", f"{account['num_rows']:,}{of_all} committed, {account['num_failed_rows']:,} failed"),
        (
            "output",
            f"{format_count(account['num_output_tokens'])} tokens, for {format_count(account['num_prompt_tokens'])} "
            f"prompt tokens, {format_count(account['num_cached_tokens'])} of them cached",
        ),
        ("speed", speed),
        *_acceptance(account["speculation"]),
        ("engines up", f"{format_duration(account['wall_s'])}, {starts}"),
        ("price", format_price(account["price"])),
        ("price source", f"{account['price']['source']}, {account['price']['as_of']}"),
        ("cost", _labelled(FIGURES["total_usd"].text(report), report)),
        ("spent on", " · ".join(f"{name} {format_share(report['shares'][name])}" for name in SHARES)),
        ("value", _labelled(value, report)),
        *savings_of_run(report),
    ]
    concurrency = f"concurrency {run['concurrency']}" if run["concurrency"] else ""
    title = " · ".join(part for part in (run["label"], run["precision"], concurrency) if part)
    body = [f"  {name:<14}{text}" for name, text in lines]
    return "\n".join([title, *body, *_wrapped_notes(report["notes"])])


def text_comparison(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return the figures of several runs in columns, with ratios to the baseline."""
    compared = compare(reports)
    column_names = [f"[{number}]" for number in range(1, len(reports) + 1)]
    rows = [("", *column_names)]
    for figure in compared["figures"]:
        texts = []
        for index, (report, ratio) in enumerate(zip(reports, figure["ratios"], strict=True)):
            text = FIGURES[figure["name"]].text(report)
            if index != compared["baseline"]:
                text += f"{f'x{ratio:.2f}' if ratio is not None else '':>8}"
            texts.append(text)
        rows.append((figure["label"], *texts))
    names = [
        _labelled(f"{column_name} {label}{' (baseline)' if index == compared['baseline'] else ''}", report)
        for index, (column_name, label, report) in enumerate(
            zip(column_names, compared["labels"], reports, strict=True)
        )
    ]
    return "\n".join([*names, *(f"  {line}" for line in aligned(rows)), *_wrapped_notes(compared["notes"])])


def _labelled(text: str, report: Mapping[str, Any]) -> str:
    labels = money_labels(report)
    return f"{text} ({'; '.join(labels)})" if labels else text


def _acceptance(speculation: Mapping[str, Any]) -> list[tuple[str, str]]:
    if speculation["acceptance_length"] is None:
        return []
    length, rates = speculation["acceptance_length"], " ".join(map(format_share, speculation["acceptance_rates"]))
    lines = [
        ("acceptance", f"{length:.2f} tokens per step, over {speculation['num_drafts']:,} steps with drafts"),
        ("by position", f"{rates} of the verified drafts"),
    ]
    if num_dropped := speculation.get("num_dropped_tokens"):
        num_drafted = speculation["num_draft_tokens"] + num_dropped
        lines.append(("verified", f"{speculation['num_draft_tokens']:,} of {num_drafted:,} drafted tokens"))
    return lines


def _wrapped_notes(notes: Sequence[str]) -> list[str]:
    return [
        textwrap.fill(note, 100, initial_indent="  ! ", subsequent_indent="    ", break_on_hyphens=False)
        for note in notes
    ]
