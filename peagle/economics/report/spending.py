"""A statement as a text table, as CSV, and as an HTML page."""

import csv
import html
import io
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, timedelta
from typing import Any

from peagle.charts import DARK, LIGHT, MAX_SERIES, RULES
from peagle.economics.report.figures import format_count, format_usd, saved_lines
from peagle.economics.report.plots import SHARE_DARK, SHARE_LIGHT, SHARE_RULES, Bar, bars_svg, dollars_svg
from peagle.economics.spending import KINDS
from peagle.economics.statement import DIGITS, convert_currency, round_amounts
from peagle.economics.usage import WORK_COUNTS
from peagle.tables import aligned

UNKNOWN = "unknown"
_COLUMNS = (*KINDS, "total")
_DIMENSION_LABELS = {"tag": "tags", "instance": "instance type"}


def text_statement(statement: Mapping[str, Any]) -> str:
    """Return the statement for a terminal: a line per group, then totals and savings."""
    statement = round_for_display(statement)
    lines = [
        format_period(statement),
        "",
        *aligned(statement_table(statement)),
        "",
        *aligned(summary_rows(statement)),
        "",
        "saved",
    ]
    saved = [f"  {name:<10}{text}" for name, text in saved_rows(statement)]
    return "\n".join([*lines, *saved, *(f"! {note}" for note in statement["notes"])])


def csv_statement(statement: Mapping[str, Any]) -> str:
    """Return a CSV line per group; the lines add up to the total."""
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    converted = [f"{kind}_{code.lower()}" for code in _other_currencies(statement) for kind in _COLUMNS]
    writer.writerow(
        [*statement["by"], *WORK_COUNTS, *(f"{kind}_usd" for kind in _COLUMNS), *converted, "usd_per_million_tokens"]
    )
    for row in statement["rows"]:
        amounts = [decimal(row[name][kind]) for name in ("usd", "converted") if name in row for kind in _COLUMNS]
        names_and_counts = [row[name] for name in (*statement["by"], *WORK_COUNTS)]
        writer.writerow([*names_and_counts, *amounts, decimal(row["usd_per_million_tokens"])])
    return sink.getvalue().rstrip("\n")


def decimal(usd: float | None) -> str:
    return UNKNOWN if usd is None else f"{usd:.{DIGITS}f}"


def round_for_display(statement: Mapping[str, Any]) -> dict[str, Any]:
    """Return the statement with amounts rounded to cents, or to more digits if the total is small."""
    known_usd = statement["total"]["usd"]["total"] or statement["total"]["usd"]["attributed"]
    digits = 2 if known_usd >= 1 else 6
    for code in _other_currencies(statement):
        statement = convert_currency(statement, code, statement["per_usd"], digits)
    return {**round_amounts(statement, digits), "digits": digits}


def format_period(statement: Mapping[str, Any]) -> str:
    start, end = statement["start"], statement["end"]
    if start is None and end is None:
        return "Spending, all time"
    return f"Spending from {start or 'the beginning'} to {end or 'now'}, both included (UTC)"


def statement_table(statement: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the header, a row per group and the total. `statement` is a result of `round_for_display`."""
    headers = [_DIMENSION_LABELS.get(name, name) for name in statement["by"]] or [""]
    converted = [f"total, {code}" for code in _other_currencies(statement)]
    rows: list[tuple[str, ...]] = [(*headers, "requests", "output tokens", *_COLUMNS, *converted, "per million tokens")]
    for row in statement["rows"] if statement["by"] else []:
        rows.append(_table_row([row[name] or "-" for name in statement["by"]], row, statement["digits"]))
    return [*rows, _table_row(["total", *[""] * (len(headers) - 1)], statement["total"], statement["digits"])]


def _table_row(names: Sequence[str], row: Mapping[str, Any], digits: int) -> tuple[str, ...]:
    per_million = row["usd_per_million_tokens"]
    return (
        *names,
        f"{row['num_requests']:,}",
        format_count(row["num_output_tokens"]),
        *(_dollars(row["usd"][kind], digits) for kind in _COLUMNS),
        *([_amount(row["converted"]["total"], digits)] if "converted" in row else []),
        UNKNOWN if per_million is None else format_usd(per_million),
    )


def summary_rows(statement: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the names and amounts of the kinds of cost."""
    usd, digits = statement["total"]["usd"], statement["digits"]
    loading, idle = _dollars(usd["loading"], digits), _dollars(usd["idle"], digits)
    names = {"attributed": "attributed", "overhead": f"overhead (loading {loading}, idle {idle})"}
    return [
        (
            names.get(kind, kind),
            _dollars(usd[kind], digits),
            *(
                f"{_amount(statement['total']['converted'][kind], digits)} {code}"
                for code in _other_currencies(statement)
            ),
        )
        for kind in ("attributed", "overhead", "lost", "total")
    ]


def saved_rows(statement: Mapping[str, Any]) -> list[tuple[str, str]]:
    total = statement["total"]
    measured = [("measured", ", ".join(sources))] if (sources := total["saved"]["sources"]) else []
    return [*saved_lines(total["saved"], total), *measured]


def _other_currencies(statement: Mapping[str, Any]) -> list[str]:
    return [statement["currency_beside"]] if "currency_beside" in statement else []


def _dollars(usd: float | None, digits: int) -> str:
    return UNKNOWN if usd is None else f"${_amount(usd, digits)}"


def _amount(amount: float | None, digits: int) -> str:
    return UNKNOWN if amount is None else f"{amount:,.{digits}f}"


MAX_COLUMNS = 62  # days; with more days, each column is a month
MAX_BARS = 12
_OTHERS = "all others"
# Each kind of cost, and the engine state whose colour it shares.
_KIND_COLOURS = (("attributed", "busy"), ("loading", "load"), ("idle", "idle"), ("lost", "lost"))
_STYLE = (
    ":root{color-scheme:light dark;--note:#fdf5df;" + LIGHT + SHARE_LIGHT + "}"
    "@media(prefers-color-scheme:dark){:root{--note:#2a2517;" + DARK + SHARE_DARK + "}}"
    "body{font:15px/1.5 system-ui,sans-serif;margin:0;background:var(--card);color:var(--ink)}"
    "main{max-width:1080px;margin:0 auto;padding:36px 20px}h1{font-size:21px}h2{font-size:16px;margin:24px 0 4px}"
    ".scroll{overflow-x:auto}table{border-collapse:collapse;margin-bottom:24px}"
    "th,td{padding:5px 14px 5px 0;border-bottom:1px solid #8884;text-align:right;white-space:nowrap;"
    "font-variant-numeric:tabular-nums}th:first-child,td:first-child{text-align:left}tr:last-child{font-weight:600}"
    ".words td{text-align:left;white-space:normal}.words tr:last-child{font-weight:400}"
    ".notes{background:var(--note);border-radius:8px;padding:10px 14px 10px 32px;overflow-wrap:anywhere}"
    ".plots{display:grid;grid-template-columns:1fr 1fr;gap:18px}.plots>*{min-width:0}"
    "svg{display:block;width:100%;height:auto;font-family:inherit}"
    ".legend{list-style:none;margin:6px 0 0;padding:0;display:flex;flex-wrap:wrap;gap:2px 14px;font-size:14px}"
    ".legend li{overflow-wrap:anywhere}.legend i{display:inline-block;width:11px;height:11px;border-radius:3px;"
    "margin-right:6px}@media(max-width:820px){.plots{grid-template-columns:1fr}}" + RULES + SHARE_RULES
)


def html_statement(statement: Mapping[str, Any], daily: Mapping[str, Any]) -> str:
    rounded = round_for_display(statement)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in statement["notes"])
    note_list = f'<ul class="notes">{notes}</ul>' if notes else ""
    title = html.escape(format_period(statement))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body><main><h1>{title}</h1>\n"
        f'{note_list}\n<div class="plots">{_day_figure(daily)}{_group_figure(statement)}</div>\n'
        f"{_table(statement_table(rounded), has_header=True)}\n{_table(summary_rows(rounded), has_header=False)}\n"
        f"{_table([('saved', ''), *saved_rows(rounded)], has_header=True, css_class='words')}\n"
        "</main></body></html>"
    )


def _day_figure(daily: Mapping[str, Any]) -> str:
    dimension = daily["by"][1]
    usd_by_day: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    usd_by_name: defaultdict[str, float] = defaultdict(float)
    for row in daily["rows"]:
        usd_by_name[row[dimension]] += row["usd"]["attributed"] or 0.0
    most_expensive = sorted(
        (name for name in usd_by_name if usd_by_name[name] > 0), key=lambda name: (-usd_by_name[name], name)
    )
    shown_names = most_expensive if len(most_expensive) <= MAX_SERIES else most_expensive[: MAX_SERIES - 1]
    for row in daily["rows"]:
        name = row[dimension] if row[dimension] in shown_names else _OTHERS
        sums, usd = usd_by_day[row["day"]], row["usd"]
        sums[f"of {name}"] += usd["attributed"] or 0.0  # "of" prevents a clash with a name such as "lost"
        sums["overhead"] += usd["overhead"] or 0.0
        sums["lost"] += usd["lost"] or 0.0
    # Key in `usd_by_day`, label and CSS class of each layer of a column.
    layers = [(f"of {name}", name or f"no {dimension}", f"series-{index}") for index, name in enumerate(shown_names)]
    layers += [(f"of {_OTHERS}", _OTHERS, f"series-{MAX_SERIES - 1}")] if len(shown_names) < len(most_expensive) else []
    layers += [("overhead", "overhead (loading, idle)", "share-idle"), ("lost", "lost", "share-lost")]
    if not any(usd > 0 for sums in usd_by_day.values() for usd in sums.values()):
        return ""
    columns = [(label, [sums[key] for key, _, _ in layers]) for label, sums in _sums_by_date(usd_by_day)]
    legend = [(label, css_class) for _, label, css_class in layers]
    totals = [sum(column) for column in zip(*(amounts for _, amounts in columns), strict=True)]
    total_texts = ", ".join(f"{label} {format_usd(usd)}" for (label, _), usd in zip(legend, totals, strict=True))
    plot = dollars_svg(columns, legend, f"Spending by day, in dollars: {total_texts}")
    return _figure(f"By day and {dimension}", plot, legend)


def _sums_by_date(usd_by_day: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Yield the sums of every day from the first to the last, or of every month if there are many days."""
    first, last = (date.fromisoformat(day) for day in (min(usd_by_day), max(usd_by_day)))
    days = [(first + timedelta(days=number)).isoformat() for number in range((last - first).days + 1)]
    date_part = slice(5, 10) if len(days) <= MAX_COLUMNS else slice(0, 7)
    sums: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for day in days:
        for key, usd in usd_by_day.get(day, {}).items():
            sums[day[date_part]][key] += usd
        sums[day[date_part]]  # keep days without spending
    yield from sums.items()


def _group_figure(statement: Mapping[str, Any]) -> str:
    if not statement["by"] or list(statement["by"]) == ["day"]:
        return ""
    amounts = [([row["usd"][kind] or 0.0 for kind, _ in _KIND_COLOURS], row) for row in statement["rows"]]
    ordered = sorted(amounts, key=lambda pair: -sum(pair[0]))
    bars = [
        _bar(", ".join(row[dimension] or f"no {dimension}" for dimension in statement["by"]), usd)
        for usd, row in ordered[:MAX_BARS]
    ]
    if others := [usd for usd, _ in ordered[MAX_BARS:]]:
        bars.append(_bar(f"{len(others):,} others", [sum(column) for column in zip(*others, strict=True)]))
    if not any(bar.value > 0 for bar in bars):
        return ""
    name = f"Spending by {', '.join(statement['by'])}: " + "; ".join(f"{bar.label} {bar.value_text}" for bar in bars)
    legend = [(kind, f"share-{colour}") for kind, colour in _KIND_COLOURS]
    return _figure(f"By {', '.join(statement['by'])}", bars_svg(bars, name), legend)


def _bar(label: str, usd: Sequence[float]) -> Bar:
    parts = [
        (f"share-{colour}", amount, f"{label}, {kind}: {format_usd(amount)}")
        for (kind, colour), amount in zip(_KIND_COLOURS, usd, strict=True)
    ]
    return Bar(label=label, parts=parts, value_text=format_usd(sum(usd)))


def _figure(heading: str, plot: str, legend: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<li><i class="{css_class}"></i>{html.escape(label)}</li>' for label, css_class in legend)
    return f'<section><h2>{html.escape(heading)}</h2>{plot}<ul class="legend">{items}</ul></section>'


def _table(rows: Sequence[Sequence[str]], *, has_header: bool, css_class: str = "sums") -> str:
    lines = []
    for index, row in enumerate(rows):
        cell = "th" if has_header and index == 0 else "td"
        lines.append("<tr>" + "".join(f"<{cell}>{html.escape(text)}</{cell}>" for text in row) + "</tr>")
    return f'<div class="scroll"><table class="{css_class}">{"".join(lines)}</table></div>'
