import csv
import io
import re
from decimal import Decimal
from xml.etree import ElementTree

import pytest

from peagle.economics.report.spending import MAX_BARS, MAX_COLUMNS, csv_statement, html_statement, text_statement
from peagle.economics.spending import Charge, Days, Spend
from peagle.economics.statement import convert_currency, statement

SVG = "{http://www.w3.org/2000/svg}"
FIRST_DAY = 20_000  # 2024-10-04
CHARGE_FIELDS = {"day": FIRST_DAY, "run": "r", "market": "", "usd_per_device_s": 0.01, "model": "m", "drafter": "none"}


def make_statement(*, is_priced=True):
    work = Spend(attributed_usd=2 / 3, num_requests=2, num_output_tokens=1_000_000)
    overhead = Spend(loading_usd=1 / 3, idle_usd=1 / 7, lost_usd=1 / 9, is_priced=is_priced)
    charges = [Charge(key=key, spend=work, **CHARGE_FIELDS) for key in ("alice|<b>", "bob")]
    charges.append(Charge(key="", spend=overhead, **CHARGE_FIELDS))
    return statement(charges, ("key", "day"), Days(20_000, 20_001), ["A note."])


def test_text_statement_shows_rows_totals_and_notes():
    lines = text_statement(make_statement()).splitlines()
    assert lines[0] == "Spending from 2024-10-04 to 2024-10-05, both included (UTC)"
    column_names = "key day requests output tokens attributed loading idle lost total per million tokens"
    assert lines[2].split() == column_names.split()
    assert lines[3].split()[:2] == ["-", "2024-10-04"]
    assert " ".join(lines[5].split()) == "bob 2024-10-04 2 1.00 M $0.66 $0.00 $0.00 $0.00 $0.66 $0.667"
    assert lines[8].split() == ["attributed", "$1.33"]
    assert " ".join(lines[9].split()) == "overhead (loading $0.34, idle $0.14) $0.48"
    assert lines[11].split() == ["total", "$1.92"]
    assert lines[-1] == "! A note."


def test_unknown_costs_are_printed_as_unknown():
    for text in (function(make_statement(is_priced=False)) for function in (text_statement, csv_statement)):
        assert "unknown" in text
        assert "inf" not in text
        assert "nan" not in text


def test_csv_lines_add_up_exactly():
    result = make_statement()
    rows = list(csv.DictReader(io.StringIO(csv_statement(result))))
    assert [row["key"] for row in rows] == ["", "alice|<b>", "bob"]
    assert sum(Decimal(row["total_usd"]) for row in rows) == Decimal(f"{result['total']['usd']['total']:.9f}")
    kinds = ("attributed_usd", "loading_usd", "idle_usd", "lost_usd")
    assert all(sum(Decimal(row[kind]) for kind in kinds) == Decimal(row["total_usd"]) for row in rows)


def test_converted_amounts_add_up():
    converted = convert_currency(make_statement(), "EUR", 0.86)
    rows, total = csv.DictReader(io.StringIO(csv_statement(converted))), converted["total"]["converted"]["total"]
    assert sum(Decimal(row["total_eur"]) for row in rows) == Decimal(f"{total:.9f}")
    text = text_statement(converted)
    assert "total, EUR" in text
    assert f"{total:.2f} EUR" in text
    assert "EUR" not in text_statement(make_statement())


def make_charge(key, day=FIRST_DAY, usd=1.0, *, is_priced=True):
    spend = Spend(attributed_usd=usd, num_requests=1, num_output_tokens=1000)
    if not key:
        spend = Spend(loading_usd=usd, idle_usd=2 * usd, lost_usd=3 * usd, is_priced=is_priced)
    return Charge(key=key, spend=spend, **CHARGE_FIELDS | {"day": day})


def make_page(charges, by=("key",), layer="key", notes=()):
    days = Days()
    return html_statement(statement(charges, by, days, notes), statement(charges, ("day", layer), days))


def plots_by_title(page):
    svgs = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    return {svg.get("aria-label").partition(":")[0].partition(",")[0]: svg for svg in svgs}


def test_days_are_stacked_by_key_with_overhead_and_losses():
    page = make_page([make_charge("alice", usd=4.0), make_charge("bob"), make_charge("", FIRST_DAY + 2)])
    daily = plots_by_title(page)["Spending by day"]
    titles = [node.text for node in daily.iter(f"{SVG}title")]
    overhead = ["10-06, overhead (loading, idle): $3.00", "10-06, lost: $3.00"]
    assert titles == ["10-04, alice: $4.00", "10-04, bob: $1.00", *overhead]
    ticks = [node.text for node in daily.iter(f"{SVG}text") if node.get("text-anchor") == "middle"]
    assert ticks == ["10-04", "10-05", "10-06"], "a day without spending still has a column"
    heights = [float(node.get("height")) for node in daily.iter(f"{SVG}rect")]
    assert heights[0] / heights[1] == pytest.approx(4.0, abs=0.1)
    assert "alice $4.00, bob $1.00, overhead (loading, idle) $3.00, lost $3.00" in daily.get("aria-label")


def test_groups_are_sorted_by_cost():
    groups = plots_by_title(make_page([make_charge("bob"), make_charge("alice", usd=4.0), make_charge("")]))[
        "Spending by key"
    ]
    labels = [node.text for node in groups.iter(f"{SVG}text") if node.get("class") == "label"]
    assert labels == ["no key", "alice", "bob"]
    kinds = [node.get("class") for node in groups.iter(f"{SVG}rect")]
    assert kinds == ["share-load", "share-idle", "share-lost", "share-busy", "share-busy"]


def test_many_groups_and_days_are_aggregated():
    charges = [make_charge(f"key-{number}", FIRST_DAY + number, usd=float(number + 1)) for number in range(100)]
    by_title = plots_by_title(make_page(charges))
    groups = [node.text for node in by_title["Spending by key"].iter(f"{SVG}text") if node.get("class") == "label"]
    assert len(groups) == MAX_BARS + 1
    assert groups[-1] == "88 others"
    daily = by_title["Spending by day"]
    assert MAX_COLUMNS < 100
    ticks = [node.text for node in daily.iter(f"{SVG}text") if node.get("text-anchor") == "middle"]
    assert ticks == ["2024-10", "2024-11", "2024-12", "2025-01"]
    kinds = {node.get("class") for node in daily.iter(f"{SVG}rect")}
    assert kinds == {f"series-{number}" for number in range(6)}
    assert "all others $4,560.00" in daily.get("aria-label")


def test_page_escapes_user_text_and_loads_no_resources():
    malicious = "<script>alert(1)</script>&"
    page = make_page([make_charge(malicious), make_charge("")], notes=[malicious])
    assert "<script" not in page
    assert not re.search(r"(src|href|@import|url\()", page)
    assert len(plots_by_title(page)) == 2
    declared = set(re.findall(r"(--[\w-]+):", page))
    assert set(re.findall(r"var\((--[\w-]+)\)", page)) <= declared
