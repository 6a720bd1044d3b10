import dataclasses
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from peagle.economics.report.figures import ASSUMED, STAND_IN
from peagle.economics.report.html import render_html
from peagle.errors import PeagleError
from tests.unit.economics.report.conftest import PRICE

VOID = {"meta", "br", "link", "img", "input", "hr"}
SVG = "{http://www.w3.org/2000/svg}"


class Balanced(HTMLParser):
    """Collects the visible text, and proves that every element is closed where it was opened."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data.strip())


def drawings(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def plot(page: str, name: str) -> ElementTree.Element:
    """The one whose text for those who cannot see it begins so."""
    (found,) = (svg for svg in drawings(page) if svg.get("aria-label").startswith(name))
    return found


def test_the_page_shows_the_figures_and_the_configuration(with_drafter):
    text = Balanced(render_html(with_drafter)).text
    for shown in (
        "smollm2-135m with peagle K=3",
        "830,769",
        "$1.20",
        "60.0",
        "1.60",
        "2 min 10 s",
        "temperature 0, max_tokens 128",
        "vllm 0.29.0",
        "$0.2 per hour for 2 vCPUs (custom, fixed; stated)",
        "stated by the user, undated",
    ):
        assert shown in text, shown


def test_the_page_needs_no_other_host_and_no_script(with_drafter, without_drafter):
    page = render_html([with_drafter, without_drafter])
    assert "<script" not in page
    assert set(re.findall(r"https?://[^\"]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"(src|href|@import|url\()", page)


def test_the_page_has_light_dark_and_phone(with_drafter):
    page = render_html(with_drafter)
    assert "@media (prefers-color-scheme: dark)" in page
    assert 'name="viewport" content="width=device-width' in page
    declared = set(re.findall(r"(--[\w-]+):", page))
    assert set(re.findall(r"var\((--[\w-]+)\)", page)) <= declared


def test_everything_a_user_named_is_escaped(make_report):
    evil = "<script>alert('x')</script>&"
    report = make_report(
        model=evil,
        drafter=evil,
        label=evil,
        path=evil,
        precision=evil,
        num_drafts=10,
        accepted=(5, 2),
        sampling={evil: evil},
        hardware={"cpu_name": evil},
        versions={evil: "1"},
    )
    for page in (render_html(report), render_html([report, report])):
        Balanced(page)
        assert "<script" not in page
        assert "&lt;script&gt;" in page


def test_the_acceptance_plot_is_in_proportion(with_drafter):
    acceptance = plot(render_html(with_drafter), "Acceptance")
    bars = acceptance.findall(f"{SVG}path")
    assert [bar.find(f"{SVG}title").text.rsplit(" ", 1)[1] for bar in bars] == ["48.0%", "10.0%", "2.0%"]
    base = float(re.match(r"M[\d.]+,([\d.]+)", bars[0].get("d"))[1])
    heights = []
    for bar in bars:
        top, radius = re.search(r"V([\d.]+) q0,-([\d.]+)", bar.get("d")).groups()
        heights.append(base - float(top) + float(radius))
    assert heights[1] / heights[0] == pytest.approx(0.10 / 0.48, abs=0.005)
    assert heights[2] / heights[0] == pytest.approx(0.02 / 0.48, abs=0.005)


def test_the_money_plot_is_in_proportion(make_report):
    page = render_html(make_report(busy_s=50.0, lost_s=10.0, idle_s=10.0, num_drafts=10, accepted=(5,)))
    money = plot(page, "Where the money went")
    widths = {rect.get("class"): float(rect.get("width")) + 2 for rect in money.findall(f"{SVG}rect")}
    assert {name: width / sum(widths.values()) for name, width in widths.items()} == pytest.approx(
        {"share-load": 0.2, "share-compile": 0.1, "share-busy": 0.5, "share-idle": 0.1, "share-lost": 0.1}
    )


def test_without_drafts_the_plot_says_so(without_drafter):
    page = render_html(without_drafter)
    assert "Nothing was drafted." in page
    assert [svg.get("aria-label").partition(":")[0] for svg in drawings(page)] == [
        "Output tokens per dollar",
        "Where the money went",
    ]


def test_runs_side_by_side(with_drafter, without_drafter):
    page = render_html([without_drafter, with_drafter])
    text = Balanced(page).text
    assert "2 runs of smollm2-135m" in text
    assert "\N{MULTIPLICATION SIGN} 1.50" in text
    money = plot(page, "Where the money went")
    assert [label.text for label in money.findall(f"{SVG}text") if label.get("class") == "label"] == [
        "no drafter",
        "peagle K=3",
    ]


def test_more_runs_than_colours_are_named_as_not_drawn(with_drafter):
    page = render_html([with_drafter] * 8)
    assert "2 more runs are not drawn" in page
    acceptance, money = plot(page, "Acceptance"), plot(page, "Where the money went")
    assert len(acceptance.findall(f"{SVG}path")) == 6 * 3
    assert len(money.findall(f"{SVG}rect")) == 8 * 3


def test_a_run_that_has_only_begun_can_be_shown(make_report):
    page = render_html(make_report(tokens=0, complete=False, num_input_rows=100))
    assert "not finished" in page
    Balanced(page)


def test_what_is_equal_in_all_runs_is_told_once(with_drafter, without_drafter):
    text = Balanced(render_html([without_drafter, with_drafter])).text
    assert text.count("temperature 0, max_tokens 128") == 1
    assert text.index("Differences") < text.index("draft tokens (K)")


def test_money_that_is_no_bill_says_so_wherever_it_stands(make_report):
    assumed = dataclasses.replace(PRICE, basis="assumed")
    report = make_report(price=assumed, is_stand_in=True)
    page = render_html(report)
    assert Balanced(page).text.count(STAND_IN) == Balanced(page).text.count(ASSUMED) >= 3
    other = make_report(label="measured")
    assert f"{STAND_IN} (no drafter)" in Balanced(render_html([report, other])).text
    assert 'class="caveat"' not in render_html(other)


def test_the_page_shows_the_run_over_time_its_rows_and_its_failures(detailed):
    page = render_html(detailed)
    text = " ".join(Balanced(page).text)
    assert "<script" not in page
    for shown in (
        "A sample of 100 of 400 rows.",
        "Seconds to the first token: p50 0.2, p95 0.4, p99 0.5",
        "Failures, by reason; invalid_row, for example: line 7: <b>no</b>",
        "Row 000000007",
        "What is <script>alert(1)</script>?",
        "answer (stop)",
    ):
        assert shown in text, shown
    names = [svg.get("aria-label") for svg in drawings(page)]
    assert "Failures by reason: invalid_row 3, time_limit 1" in names
    assert "Finish reasons: stop 90 (90%), length 10 (10%)" in names
    lane = plot(page, "States of the engines")
    assert {path.get("class") for path in lane.findall(f"{SVG}path")} == {"share-load", "share-busy", "share-lost"}
    assert "engine 0: busy 67%, idle 0%, lost 17%" in [one.text for one in lane.iter(f"{SVG}text")]
    assert "a pause of 1 h 0 min is cut out" in page


def test_notes_are_on_the_page(make_report):
    assert "lost work" in " ".join(Balanced(render_html(make_report(lost_s=50.0))).text)


def test_there_has_to_be_a_report():
    with pytest.raises(PeagleError, match="no report"):
        render_html([])
    with pytest.raises(PeagleError, match="schema 1"):
        render_html({"schema": 3})


def test_economics_loads_nothing_heavy():
    heavy = "{'pyarrow', 'jinja2', 'torch', 'vllm', 'ray', 'transformers', 'numpy'}"
    code = f"import sys, peagle.economics.report; print({heavy} & set(sys.modules) or 'none')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "none"
