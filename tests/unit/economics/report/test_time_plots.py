import re
from xml.etree import ElementTree

import pytest

from peagle.economics.report.figures import format_usd
from peagle.economics.report.plots import engines_svg, series_svg

SVG = "{http://www.w3.org/2000/svg}"


def a_timeline(total_s=120.0, *, engines=(), pauses=()):
    return {"total_s": total_s, "step_s": total_s / 3, "engines": list(engines), "pauses": list(pauses)}


def an_engine(*spans, **seconds):
    nothing = dict.fromkeys(("load", "compile", "busy", "idle", "lost"), 0.0)
    return {"engine": 0, "num_starts": 1, "spans": list(spans), "seconds": nothing | seconds}


def test_steps_are_as_wide_and_as_high_as_their_time_and_value():
    root = ElementTree.fromstring(series_svg([10.0, 40.0, 20.0], a_timeline(), "speed", format_usd))
    (line,) = root.iter(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
    assert len(points) == 6
    first, second, third = points[0::2]
    assert second[0] - first[0] == pytest.approx(third[0] - second[0], abs=0.11)
    ticks = {one.text: float(one.get("y")) - 4 for one in root.iter(f"{SVG}text") if one.get("text-anchor") == "end"}
    assert (first[1], second[1]) == (pytest.approx(ticks["$10.00"], abs=0.1), pytest.approx(ticks["$40.00"], abs=0.1))


def test_a_sum_grows_from_nothing_to_its_value_at_the_end_of_each_step():
    root = ElementTree.fromstring(series_svg([1.0, 2.0, 4.0], a_timeline(), "spent", format_usd, is_sum=True))
    (line,) = root.iter(f"{SVG}polyline")
    heights = [float(point.split(",")[1]) for point in line.get("points").split()]
    assert len(heights) == 4
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.11)


@pytest.mark.parametrize(
    ("total_s", "last"), [(0.5, "0 s"), (5.0, "5 s"), (120.0, "120 s"), (7000.0, "100 min"), (9e5, "10 d")]
)
def test_seconds_are_told_in_durations_of_which_few_fit(total_s, last):
    root = ElementTree.fromstring(series_svg([1.0], a_timeline(total_s), "x", format_usd))
    ticks = [one.text for one in root.iter(f"{SVG}text") if one.get("text-anchor") != "end"]
    assert ticks[0].startswith("0 ")
    assert len(ticks) <= 7
    assert ticks[-1] == last


def test_lanes_say_in_words_what_they_show_and_a_sliver_stays_visible():
    engine = an_engine(("busy", 0.0, 119.9), ("lost", 119.9, 120.0), busy=119.9, lost=0.1)
    root = ElementTree.fromstring(engines_svg(a_timeline(engines=[engine])))
    assert root.get("aria-label") == "States of the engines over time: engine 0: busy 100%, idle 0%, lost <1%"
    lost = next(path for path in root.iter(f"{SVG}path") if path.get("class") == "share-lost")
    assert float(re.search(r"h([\d.]+)v", lost.get("d"))[1]) >= 1.5


def test_an_engine_that_has_only_begun_has_an_empty_lane():
    root = ElementTree.fromstring(engines_svg(a_timeline(engines=[an_engine()])))
    assert "engine 0: busy 0%, idle 0%, lost 0%" in root.get("aria-label")
    assert list(root.iter(f"{SVG}path")) == []


def test_a_pause_is_a_line_that_says_how_long_it_was():
    plot = series_svg([1.0], a_timeline(pauses=[{"at_s": 60.0, "lasted_s": 7200.0}]), "x", format_usd)
    assert "a pause of 2 h 0 min is cut out" in plot
