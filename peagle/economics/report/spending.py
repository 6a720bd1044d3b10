"""A statement as a text table or CSV."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from peagle.economics.report.figures import format_count, format_usd
from peagle.economics.report.saved import saved_lines
from peagle.economics.spending import KINDS
from peagle.economics.statement import DIGITS, convert_currency, shown
from peagle.economics.work import COUNTS
from peagle.tables import aligned

UNKNOWN = "unknown"
_EMPTY = "-"
_COLUMNS = (*KINDS, "total")
_LABELS = {"tag": "tags", "instance": "instance type"}
_CENTS, _SMALL = 2, 6  # digits; of sums below a dollar
_NAME_WIDTH = 10


def text_statement(one: Mapping[str, Any]) -> str:
    """Return the statement for a terminal: a line per group, then totals and savings."""
    one = round_for_display(one)
    lines = [format_period(one), "", *aligned(statement_table(one)), "", *aligned(summary_rows(one)), "", "saved"]
    saved = [f"  {name:<{_NAME_WIDTH}}{text}" for name, text in saved_rows(one)]
    return "\n".join([*lines, *saved, *(f"! {note}" for note in one["notes"])])


def csv_statement(one: Mapping[str, Any]) -> str:
    """Return a CSV line per group; the lines add up to the total."""
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    beside = [f"{kind}_{code.lower()}" for code in _beside(one) for kind in _COLUMNS]
    writer.writerow([*one["by"], *COUNTS, *(f"{kind}_usd" for kind in _COLUMNS), *beside, "usd_per_million_tokens"])
    for row in one["rows"]:
        amounts = [decimal(row[name][kind]) for name in ("usd", "converted") if name in row for kind in _COLUMNS]
        names = [row[dimension] for dimension in one["by"]]
        writer.writerow([*names, *(row[name] for name in COUNTS), *amounts, decimal(row["usd_per_million_tokens"])])
    return sink.getvalue().rstrip("\n")


def decimal(usd: float | None) -> str:
    """Return an amount in decimal digits, or "unknown"."""
    return UNKNOWN if usd is None else f"{usd:.{DIGITS}f}"


def round_for_display(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return the statement with amounts rounded to cents, or to more digits if the total is small."""
    known = one["total"]["usd"]["total"] or one["total"]["usd"]["attributed"]
    digits = _CENTS if known >= 1 else _SMALL
    for code in _beside(one):
        one = convert_currency(one, code, one["per_usd"], digits)
    return {**shown(one, digits), "digits": digits}


def format_period(one: Mapping[str, Any]) -> str:
    start, end = one["start"], one["end"]
    if start is None and end is None:
        return "Spending, all time"
    return f"Spending from {start or 'the beginning'} to {end or 'now'}, both included (UTC)"


def statement_table(one: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the header, a row per group and the total. `one` is a result of `round_for_display`."""
    heads = [_LABELS.get(name, name) for name in one["by"]] or [""]
    beside = [f"total, {code}" for code in _beside(one)]
    rows: list[tuple[str, ...]] = [(*heads, "requests", "output tokens", *_COLUMNS, *beside, "per million tokens")]
    for row in one["rows"] if one["by"] else []:
        rows.append(_line([row[name] or _EMPTY for name in one["by"]], row, one["digits"]))
    return [*rows, _line(["total", *[""] * (len(heads) - 1)], one["total"], one["digits"])]


def _line(names: Sequence[str], row: Mapping[str, Any], digits: int) -> tuple[str, ...]:
    per_million = row["usd_per_million_tokens"]
    return (
        *names,
        f"{row['num_requests']:,}",
        format_count(row["num_output_tokens"]),
        *(_dollars(row["usd"][kind], digits) for kind in _COLUMNS),
        *([_amount(row["converted"]["total"], digits)] if "converted" in row else []),
        UNKNOWN if per_million is None else format_usd(per_million),
    )


def summary_rows(one: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return names and amounts of where the money went."""
    usd, digits = one["total"]["usd"], one["digits"]
    loading, idle = _dollars(usd["loading"], digits), _dollars(usd["idle"], digits)
    names = {"attributed": "attributed", "overhead": f"overhead (loading {loading}, idle {idle})"}
    return [
        (
            names.get(kind, kind),
            _dollars(usd[kind], digits),
            *(f"{_amount(one['total']['converted'][kind], digits)} {code}" for code in _beside(one)),
        )
        for kind in ("attributed", "overhead", "lost", "total")
    ]


def saved_rows(one: Mapping[str, Any]) -> list[tuple[str, str]]:
    total = one["total"]
    measured = [("measured", ", ".join(sources))] if (sources := total["saved"]["sources"]) else []
    return [*saved_lines(total["saved"], total), *measured]


def _beside(one: Mapping[str, Any]) -> list[str]:
    return [one["currency_beside"]] if "currency_beside" in one else []


def _dollars(usd: float | None, digits: int) -> str:
    return UNKNOWN if usd is None else f"${_amount(usd, digits)}"


def _amount(amount: float | None, digits: int) -> str:
    return UNKNOWN if amount is None else f"{amount:,.{digits}f}"
