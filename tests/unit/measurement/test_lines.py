import re
from xml.etree import ElementTree

import pytest

from peagle.measurement.lines import Axes, grid_step, line_chart

AXES = Axes(name="speed", x_name="requests", y_name="tokens/s", place="concurrency ", decimals=0, is_even=True)


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
