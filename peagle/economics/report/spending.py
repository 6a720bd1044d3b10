"""A statement for people and for tools: a table, Markdown, CSV or a page.

It knows statements as data only (`statement.py`).
"""

import csv
import html
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from peagle.economics.report.figures import in_words_count, in_words_usd
from peagle.economics.report.saved import saved_lines
from peagle.economics.spending import KINDS
from peagle.economics.statement import COUNTS, DIGITS, shown
from peagle.tables import aligned, markdown

UNKNOWN = "unknown"
_NOBODY = "-"
_COLUMNS = (*KINDS, "total")
_LABELS = {"tag": "tags", "instance": "instance type"}
_CENTS, _SMALL = 2, 6  # digits; of sums below a dollar
_NAME_WIDTH = 10


def text_statement(one: Mapping[str, Any]) -> str:
    """The statement for a terminal: a line for each group, then where the money went."""
    one = _for_people(one)
    lines = [_period(one), "", *aligned(_table(one)), "", *aligned(_summary(one)), "", "saved"]
    saved = [f"  {name:<{_NAME_WIDTH}}{text}" for name, text in _saved(one)]
    return "\n".join([*lines, *saved, *(f"! {note}" for note in one["notes"])])


def markdown_statement(one: Mapping[str, Any]) -> str:
    """The statement as Markdown: the same, as tables."""
    one = _for_people(one)
    notes = [f"- {note}" for note in one["notes"]]
    summary, saved = [("where the money went", "USD"), *_summary(one)], [("saved", ""), *_saved(one)]
    tables: list[Sequence[Sequence[str]]] = [_table(one), summary, saved]
    lines = [line for table in tables for line in ("", *markdown(table))]
    return "\n".join([f"# {_period(one)}", *lines, "", *notes]).rstrip()


def csv_statement(one: Mapping[str, Any]) -> str:
    """A line for each group, with a head; the lines add up to the whole."""
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow([*one["by"], *COUNTS, *(f"{kind}_usd" for kind in _COLUMNS), "usd_per_million_tokens"])
    for row in one["rows"]:
        amounts = [decimal(row["usd"][kind]) for kind in _COLUMNS]
        names = [row[dimension] for dimension in one["by"]]
        writer.writerow([*names, *(row[name] for name in COUNTS), *amounts, decimal(row["usd_per_million_tokens"])])
    return sink.getvalue().rstrip("\n")


def html_statement(one: Mapping[str, Any]) -> str:
    """The statement as one page without scripts or other hosts."""
    one = _for_people(one)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in one["notes"])
    title = html.escape(_period(one))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body><main><h1>{title}</h1>\n"
        f"{_html_table(_table(one), has_head=True)}\n{_html_table(_summary(one), has_head=False)}\n"
        f"{_html_table([('saved', ''), *_saved(one)], has_head=True, kind='words')}\n"
        f"<ul>{notes}</ul></main></body></html>"
    )


FORMATS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "table": text_statement,
    "md": markdown_statement,
    "csv": csv_statement,
    "html": html_statement,
}
_STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;margin:0}"
    "main{max-width:1080px;margin:0 auto;padding:36px 20px;overflow-x:auto}h1{font-size:21px}"
    "table{border-collapse:collapse;margin-bottom:24px}"
    "th,td{padding:5px 14px 5px 0;border-bottom:1px solid #8884;text-align:right;white-space:nowrap;"
    "font-variant-numeric:tabular-nums}th:first-child,td:first-child{text-align:left}tr:last-child{font-weight:600}"
    ".words td{text-align:left;white-space:normal}.words tr:last-child{font-weight:400}"
)


def decimal(usd: float | None) -> str:
    """An amount of data in digits; "unknown" where there is none."""
    return UNKNOWN if usd is None else f"{usd:.{DIGITS}f}"


def _for_people(one: Mapping[str, Any]) -> dict[str, Any]:
    known = one["total"]["usd"]["total"] or one["total"]["usd"]["attributed"]
    digits = _CENTS if known >= 1 else _SMALL
    return {**shown(one, digits), "digits": digits}


def _period(one: Mapping[str, Any]) -> str:
    start, end = one["start"], one["end"]
    if start is None and end is None:
        return "Spending, all time"
    return f"Spending from {start or 'the beginning'} to {end or 'now'}, both included (UTC)"


def _table(one: Mapping[str, Any]) -> list[tuple[str, ...]]:
    heads = [_LABELS.get(name, name) for name in one["by"]] or [""]
    rows: list[tuple[str, ...]] = [(*heads, "requests", "output tokens", *_COLUMNS, "per million tokens")]
    for row in one["rows"] if one["by"] else []:
        rows.append(_line([row[name] or _NOBODY for name in one["by"]], row, one["digits"]))
    return [*rows, _line(["total", *[""] * (len(heads) - 1)], one["total"], one["digits"])]


def _line(names: Sequence[str], row: Mapping[str, Any], digits: int) -> tuple[str, ...]:
    per_million = row["usd_per_million_tokens"]
    return (
        *names,
        f"{row['num_requests']:,}",
        in_words_count(row["num_output_tokens"]),
        *(_dollars(row["usd"][kind], digits) for kind in _COLUMNS),
        UNKNOWN if per_million is None else in_words_usd(per_million),
    )


def _summary(one: Mapping[str, Any]) -> list[tuple[str, str]]:
    usd, digits = one["total"]["usd"], one["digits"]
    loading, idle = _dollars(usd["loading"], digits), _dollars(usd["idle"], digits)
    return [
        ("attributed", _dollars(usd["attributed"], digits)),
        (f"overhead (loading {loading}, idle {idle})", _dollars(usd["overhead"], digits)),
        ("lost", _dollars(usd["lost"], digits)),
        ("total", _dollars(usd["total"], digits)),
    ]


def _saved(one: Mapping[str, Any]) -> list[tuple[str, str]]:
    total = one["total"]
    measured = [("measured", ", ".join(sources))] if (sources := total["saved"]["sources"]) else []
    return [*saved_lines(total["saved"], total), *measured]


def _dollars(usd: float | None, digits: int) -> str:
    return UNKNOWN if usd is None else f"${usd:,.{digits}f}"


def _html_table(rows: Sequence[Sequence[str]], *, has_head: bool, kind: str = "sums") -> str:
    lines = []
    for index, row in enumerate(rows):
        cell = "th" if has_head and index == 0 else "td"
        lines.append("<tr>" + "".join(f"<{cell}>{html.escape(text)}</{cell}>" for text in row) + "</tr>")
    return f'<table class="{kind}">{"".join(lines)}</table>'
