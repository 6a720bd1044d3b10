import re
from xml.etree import ElementTree

import pytest

from peagle.economics.report.spending import MAX_BARS, MAX_COLUMNS, html_statement
from peagle.economics.spending import Charge, Days, Spend
from peagle.economics.statement import statement

SVG = "{http://www.w3.org/2000/svg}"
FIRST = 20_000  # 2024-10-04
OWN = {
    "run": "r", "instance": "i", "provider": "", "region": "", "market": "", "usd_per_device_s": 0.01,
    "model": "m", "drafter": "none", "tags": "{}",
}  # fmt: skip


def a_charge(key, day=FIRST, usd=1.0, *, is_priced=True):
    spend = (
        Spend(attributed_usd=usd, num_requests=1, num_output_tokens=1000)
        if key
        else Spend(loading_usd=usd, idle_usd=2 * usd, lost_usd=3 * usd, is_priced=is_priced)
    )
    return Charge(key=key, day=day, spend=spend, **OWN)


def a_page(charges, by=("key",), layer="key", notes=()):
    days = Days()
    return html_statement(statement(charges, by, days, notes), statement(charges, ("day", layer), days))


def plots(page):
    found = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    return {svg.get("aria-label").partition(":")[0].partition(",")[0]: svg for svg in found}


def test_days_are_stacked_by_key_with_overhead_and_losses():
    page = a_page([a_charge("alice", usd=4.0), a_charge("bob"), a_charge("", FIRST + 2)])
    daily = plots(page)["Spending by day"]
    titles = [one.text for one in daily.iter(f"{SVG}title")]
    assert titles == [
        "10-04, alice: $4.00",
        "10-04, bob: $1.00",
        "10-06, overhead (loading, idle): $3.00",
        "10-06, lost: $3.00",
    ]
    ticks = [one.text for one in daily.iter(f"{SVG}text") if one.get("text-anchor") == "middle"]
    assert ticks == ["10-04", "10-05", "10-06"], "a day without spending has its place"
    heights = [float(one.get("height")) for one in daily.iter(f"{SVG}rect")]
    assert heights[0] / heights[1] == pytest.approx(4.0, abs=0.1)
    assert "alice $4.00, bob $1.00, overhead (loading, idle) $3.00, lost $3.00" in daily.get("aria-label")


def test_groups_are_bars_of_what_they_cost_the_largest_first():
    groups = plots(a_page([a_charge("bob"), a_charge("alice", usd=4.0), a_charge("")]))["Spending by key"]
    labels = [one.text for one in groups.iter(f"{SVG}text") if one.get("class") == "label"]
    assert labels == ["no key", "alice", "bob"]
    kinds = [one.get("class") for one in groups.iter(f"{SVG}rect")]
    assert kinds == ["share-load", "share-idle", "share-lost", "share-busy", "share-busy"]


def test_many_groups_and_many_days_are_summed_up():
    charges = [a_charge(f"key-{number}", FIRST + number, usd=float(number + 1)) for number in range(100)]
    found = plots(a_page(charges))
    groups = [one.text for one in found["Spending by key"].iter(f"{SVG}text") if one.get("class") == "label"]
    assert len(groups) == MAX_BARS + 1
    assert groups[-1] == "88 others"
    daily = found["Spending by day"]
    assert MAX_COLUMNS < 100
    ticks = [one.text for one in daily.iter(f"{SVG}text") if one.get("text-anchor") == "middle"]
    assert ticks == ["2024-10", "2024-11", "2024-12", "2025-01"]
    kinds = {one.get("class") for one in daily.iter(f"{SVG}rect")}
    assert kinds == {f"series-{number}" for number in range(6)}
    assert "all others $4,560.00" in daily.get("aria-label")


def test_a_page_without_spending_or_without_groups_has_no_such_plot():
    assert plots(a_page([])) == {}
    assert list(plots(a_page([a_charge("alice")], by=()))) == ["Spending by day"]
    assert list(plots(a_page([a_charge("alice")], by=("day",)))) == ["Spending by day"]


def test_names_of_users_are_escaped_and_nothing_is_loaded():
    evil = "<script>alert(1)</script>&"
    page = a_page([a_charge(evil), a_charge("")], notes=[evil])
    assert "<script" not in page
    assert not re.search(r"(src|href|@import|url\()", page)
    assert len(plots(page)) == 2
    declared = set(re.findall(r"(--[\w-]+):", page))
    assert set(re.findall(r"var\((--[\w-]+)\)", page)) <= declared


def test_what_is_unknown_is_called_so_and_notes_stand_before_the_sums():
    page = a_page([a_charge("alice"), a_charge("", is_priced=False)], notes=["price assumed (1 of 1 runs: r, ...)"])
    assert "unknown" in page
    assert page.index("price assumed") < page.index("<table")
    assert not re.search(r"\b(inf|nan)\b", page)
