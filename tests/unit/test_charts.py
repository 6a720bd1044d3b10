import re
from xml.etree import ElementTree

import pytest

from peagle.charts import HEIGHT, Axes, drawing, grid_step, line_chart, standalone, text

SVG = "{http://www.w3.org/2000/svg}"
AXES = Axes(
    name="speed", x_name="requests", y_name="tokens/s", x_prefix="concurrency ", decimals=0, is_evenly_spaced=True
)


@pytest.mark.parametrize(
    ("span", "step"), [(0, 0.1), (0.4, 0.1), (0.41, 0.2), (4, 1.0), (4.1, 2.0), (8.5, 5.0), (21, 10.0), (1234, 500.0)]
)
def test_grid_step_by_span(span: float, step: float) -> None:
    assert grid_step(span) == step


def test_evenly_spaced_axis_has_equal_distances() -> None:
    chart = line_chart([("a", [(1, 40.0), (2, 60.0), (32, 1500.0)])], AXES)
    (line,) = ElementTree.fromstring(chart).iter(f"{SVG}polyline")
    first, second, third = (float(point.split(",")[0]) for point in line.attrib["points"].split())
    assert second - first == pytest.approx(third - second, abs=0.11)
    assert "<title>a, concurrency 32: 1500</title>" in chart
    assert {">500<", ">1500<"} <= set(re.findall(">[^<>]+<", chart))


def test_standalone_chart_has_heading_notes_and_style() -> None:
    chart = drawing(HEIGHT, "a < b", [text(1, 2, "a & b", "tick", "start")])
    root = ElementTree.fromstring(standalone(chart, "Heading", ["one", "two <2>"]))
    assert [node.text for node in root.iter(f"{SVG}text")] == ["Heading", "a & b", "one", "two <2>"]
    inner = root.find(f"{SVG}svg")
    assert inner is not None
    assert float(inner.attrib["y"]) + float(inner.attrib["height"]) < float(root.attrib["height"])
    style = root.findtext(f"{SVG}style") or ""
    assert ".series-1 { fill: var(--s1)" in style
    assert "prefers-color-scheme: dark" in style
