import dataclasses
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from peagle.economics.report.figures import ASSUMED, FAKE_ENGINE, format_usd
from peagle.economics.report.html import headline_panel, render_html, row_panels, timeline_panels
from peagle.economics.report.plots import engines_svg, series_svg
from tests.unit.economics.report.conftest import PRICE

VOID_ELEMENTS = {"meta", "br", "link", "img", "input", "hr"}
SVG = "{http://www.w3.org/2000/svg}"


class CheckedPage(HTMLParser):
    """Collects the visible text and checks that elements are nested correctly."""

    def __init__(self, page):
        super().__init__()
        self.open_elements = []
        self.text = []
        self.feed(page)
        self.close()
        assert self.open_elements == []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID_ELEMENTS:
            self.open_elements.append(tag)

    def handle_endtag(self, tag):
        assert self.open_elements.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open_elements:
            self.text.append(data.strip())


def svg_elements(page):
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def find_plot(page, name):
    """Return the plot whose alternative text starts with `name`."""
    (svg_plot,) = (svg for svg in svg_elements(page) if svg.get("aria-label").startswith(name))
    return svg_plot


def test_page_shows_the_figures_and_the_configuration(drafter_report):
    text = CheckedPage(render_html(drafter_report)).text
    figures = {"830,769", "$1.20", "60.0", "1.60", "2 min 10 s"}
    configuration = {"temperature 0, max_tokens 128", "vllm 0.29.0", "stated by the user, undated"}
    price = "$0.2 per hour for 2 vCPUs (stated by the user)"
    assert {"smollm2-135m with peagle K=3", price, *figures, *configuration} <= set(text)


def test_page_loads_no_resources_and_has_no_script(drafter_report, plain_report):
    page = render_html([drafter_report, plain_report])
    assert "<script" not in page
    assert set(re.findall(r"https?://[^\"]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"(src|href|@import|url\()", page)


def test_user_text_is_escaped(make_report):
    malicious = "<script>alert('x')</script>&"
    texts = dict.fromkeys(("model", "drafter", "label", "path", "precision"), malicious)
    mappings = {"sampling": {malicious: malicious}, "hardware": {"cpu_name": malicious}, "versions": {malicious: "1"}}
    report = make_report(num_drafts=10, accepted=(5, 2), **texts, **mappings)
    for page in (render_html(report), render_html([report, report])):
        CheckedPage(page)
        assert "<script" not in page
        assert "&lt;script&gt;" in page


def test_acceptance_bars_are_in_proportion(drafter_report):
    acceptance = find_plot(render_html(drafter_report), "Acceptance")
    bars = acceptance.findall(f"{SVG}path")
    assert [bar.find(f"{SVG}title").text.rsplit(" ", 1)[1] for bar in bars] == ["48.0%", "10.0%", "2.0%"]
    base = float(re.match(r"M[\d.]+,([\d.]+)", bars[0].get("d"))[1])
    heights = []
    for bar in bars:
        top, radius = re.search(r"V([\d.]+) q0,-([\d.]+)", bar.get("d")).groups()
        heights.append(base - float(top) + float(radius))
    assert heights[1] / heights[0] == pytest.approx(0.10 / 0.48, abs=0.005)
    assert heights[2] / heights[0] == pytest.approx(0.02 / 0.48, abs=0.005)


def test_page_compares_runs(drafter_report, plain_report):
    page = render_html([plain_report, drafter_report])
    text = CheckedPage(page).text
    assert "2 runs of smollm2-135m" in text
    assert "\N{MULTIPLICATION SIGN} 1.50" in text
    cost_plot = find_plot(page, "Cost by engine state")
    labels = [node.text for node in cost_plot.findall(f"{SVG}text") if node.get("class") == "label"]
    assert labels == ["no drafter", "peagle K=3"]


def test_page_of_a_run_without_output(make_report):
    page = render_html(make_report(tokens=0, complete=False, num_input_rows=100))
    assert "not finished" in page
    CheckedPage(page)


def test_fake_engines_and_assumed_prices_are_labelled(make_report):
    assumed = dataclasses.replace(PRICE, basis="assumed")
    report = make_report(price=assumed, is_stand_in=True)
    page = render_html(report)
    assert CheckedPage(page).text.count(FAKE_ENGINE) == CheckedPage(page).text.count(ASSUMED) >= 3
    measured_report = make_report(label="measured")
    assert f"{FAKE_ENGINE} (no drafter)" in CheckedPage(render_html([report, measured_report])).text
    assert 'class="caveat"' not in render_html(measured_report)


def test_page_shows_timeline_rows_and_failures(detailed_report):
    page = render_html(detailed_report)
    text = " ".join(CheckedPage(page).text)
    assert "<script" not in page
    for expected in (
        "A sample of 100 of 400 rows.",
        "Seconds to the first token: p50 0.2, p95 0.4, p99 0.5",
        "Failures by reason. Example of invalid_row: line 7: <b>no</b>",
        "Row 000000007",
        "What is <script>alert(1)</script>?",
        "answer (stop)",
    ):
        assert expected in text, expected
    names = [svg.get("aria-label") for svg in svg_elements(page)]
    assert "Failures by reason: invalid_row 3, time_limit 1" in names
    assert "Finish reasons: stop 90 (90%), length 10 (10%)" in names
    states = find_plot(page, "States of the engines")
    assert {path.get("class") for path in states.findall(f"{SVG}path")} == {"share-load", "share-busy", "share-lost"}
    assert "engine 0: busy 67%, idle 0%, lost 17%" in [node.text for node in states.iter(f"{SVG}text")]
    assert "an omitted pause of 1 h 0 min" in page


def test_report_package_imports_no_large_libraries():
    large = "{'pyarrow', 'jinja2', 'torch', 'vllm', 'ray', 'transformers', 'numpy'}"
    code = f"import sys, peagle.economics.report; print({large} & set(sys.modules) or 'none')"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "none"


STEPS = [{"concurrency": 1, "step_s": 0.05, "plain_step_s": 0.04, "error": 0.05}]


def report_with_steps(make_report, steps):
    """Return the report of a run with 1,000 steps and an acceptance length of 1.6.

    With `STEPS`, a step takes 50 ms, so all steps take half of the busy time, and the break-even length is 1.25.
    """
    drafter = {"drafter": "peagle", "num_drafts": 1000, "accepted": (480, 100, 20)}
    return make_report(tokens=6000, concurrency=1, baseline={"source": "bench.json", "steps": steps}, **drafter)


def test_headline_estimates_the_same_run_without_its_drafter(make_report):
    panel = headline_panel([report_with_steps(make_report, STEPS)], ["smollm2-135m with peagle"])
    ((_, plot),) = panel.plots
    # The run costs $0.0072222. Half of the $0.0055556 of busy time is generation. Without the drafter, generation costs
    # 1.6 / 1.25 times as much, $0.0035556 (5 % error), so the run would cost $0.0007778 more.
    assert "smollm2-135m with peagle 830,769; the same without the drafter 907,905 (875,181 to 943,170)" in plot
    assert 'class="whisker"' in plot
    assert "(bench.json)" in panel.lead


def test_savings_without_error_have_no_range(make_report):
    ((_, plot),) = headline_panel([report_with_steps(make_report, [{**STEPS[0], "error": None}])], ["run"]).plots
    assert "907,905 (error unknown)" in plot
    assert "whisker" not in plot


def test_reports_without_timeline_and_rows_have_no_such_panels(drafter_report):
    assert timeline_panels(drafter_report) == row_panels(drafter_report) == []


def make_timeline(total_s=120.0, *, engines=(), pauses=()):
    return {"total_s": total_s, "step_s": total_s / 3, "engines": list(engines), "pauses": list(pauses)}


def make_engine(*spans, **seconds):
    zeros = dict.fromkeys(("load", "compile", "busy", "idle", "lost"), 0.0)
    return {"engine": 0, "num_starts": 1, "spans": list(spans), "seconds": zeros | seconds}


def test_points_of_a_series_are_in_proportion():
    root = ElementTree.fromstring(series_svg([10.0, 40.0, 20.0], make_timeline(), "speed", format_usd))
    (line,) = root.iter(f"{SVG}polyline")
    # A value is a horizontal line from the start to the end of its interval.
    points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
    assert len(points) == 6
    first, second, third = points[0::2]
    assert second[0] - first[0] == pytest.approx(third[0] - second[0], abs=0.11)
    ticks = {  # a label's baseline is 4 px below its tick
        node.text: float(node.get("y")) - 4 for node in root.iter(f"{SVG}text") if node.get("text-anchor") == "end"
    }
    assert (first[1], second[1]) == (pytest.approx(ticks["$10.00"], abs=0.1), pytest.approx(ticks["$40.00"], abs=0.1))


@pytest.mark.parametrize(
    ("total_s", "last_tick"), [(0.5, "0 s"), (5.0, "5 s"), (120.0, "120 s"), (7000.0, "100 min"), (9e5, "10 d")]
)
def test_time_axis_has_few_round_ticks(total_s, last_tick):
    root = ElementTree.fromstring(series_svg([1.0], make_timeline(total_s), "x", format_usd))
    ticks = [node.text for node in root.iter(f"{SVG}text") if node.get("text-anchor") != "end"]
    assert ticks[0].startswith("0 ")
    assert len(ticks) <= 7
    assert ticks[-1] == last_tick


def test_engine_lanes_have_labels_and_a_minimum_width():
    engine = make_engine(("busy", 0.0, 119.9), ("lost", 119.9, 120.0), busy=119.9, lost=0.1)
    root = ElementTree.fromstring(engines_svg(make_timeline(engines=[engine])))
    assert root.get("aria-label") == "States of the engines over time: engine 0: busy 100%, idle 0%, lost <1%"
    lost = next(path for path in root.iter(f"{SVG}path") if path.get("class") == "share-lost")
    assert float(re.search(r"h([\d.]+)v", lost.get("d"))[1]) >= 1.5
