import re
from xml.etree import ElementTree

import pytest

from peagle.charts import HEIGHT, Axes, apart, drawing, grid_step, line_chart, shortened, standalone, text

AXES = Axes(name="speed", x_name="requests", y_name="tokens/s", x_prefix="concurrency ", decimals=0, is_even=True)


@pytest.mark.parametrize(
    ("span", "step"), [(0, 0.1), (0.4, 0.1), (0.41, 0.2), (4, 1.0), (4.1, 2.0), (8.5, 5.0), (21, 10.0), (1234, 500.0)]
)
def test_grid_lines_are_few_and_round(span: float, step: float) -> None:
    assert grid_step(span) == step


def test_places_stand_equally_far_apart_where_that_is_asked_for() -> None:
    root = ElementTree.fromstring(line_chart([("a", [(1, 40.0), (2, 60.0), (32, 1500.0)])], AXES))
    (line,) = root.iter("{http://www.w3.org/2000/svg}polyline")
    first, second, third = (float(point.split(",")[0]) for point in line.attrib["points"].split())
    assert second - first == pytest.approx(third - second, abs=0.11)


def test_points_say_what_they_are_and_the_axis_reaches_them() -> None:
    chart = line_chart([("a", [(1, 40.0), (32, 1500.0)])], AXES)
    assert "<title>a, concurrency 32: 1500</title>" in chart
    assert {">500<", ">1500<"} <= set(re.findall(">[^<>]+<", chart))


SVG = "{http://www.w3.org/2000/svg}"


def test_a_standalone_file_holds_the_chart_its_style_and_a_legend() -> None:
    chart = drawing(HEIGHT, "a < b", [text(1, 2, "a & b", "tick", "start")])
    root = ElementTree.fromstring(standalone(chart, "Heading", ["one", "two <2>"]))
    assert [node.text for node in root.iter(f"{SVG}text")] == ["Heading", "a & b", "one", "two <2>"]
    inner = root.find(f"{SVG}svg")
    assert inner is not None
    assert float(inner.attrib["y"]) + float(inner.attrib["height"]) < float(root.attrib["height"])
    style = root.findtext(f"{SVG}style") or ""
    assert ".series-1 { fill: var(--s1)" in style
    assert "prefers-color-scheme: dark" in style


def test_a_heading_and_labels_too_long_for_the_page_lose_their_middle() -> None:
    path = "/models/" + "long/" * 20 + "head, K=7"
    root = ElementTree.fromstring(standalone(drawing(HEIGHT, "", []), "A" * 90, [path]))
    heading, label = (node.text or "" for node in root.iter(f"{SVG}text"))
    assert len(heading) < 60
    assert label.startswith("/models/")
    assert label.endswith("head, K=7")
    assert "…" in label
    assert shortened("short", 5) == "short"


def test_labels_that_touch_are_spread_around_their_middle_and_others_stay() -> None:
    assert apart([(50.0, "b"), (48.0, "a"), (90.0, "c")]) == [(43.0, "a"), (55.0, "b"), (90.0, "c")]
    heights = [height for height, _ in apart([(10.0, "x")] * 3)]
    assert heights == [-2.0, 10.0, 22.0]


def test_a_file_is_as_high_as_its_drawing_asks() -> None:
    chart = drawing(400, "tall", [])
    low, high = (
        float(ElementTree.fromstring(standalone(chart, "", [], height)).attrib["height"]) for height in (HEIGHT, 400)
    )
    assert high - low == 400 - HEIGHT
