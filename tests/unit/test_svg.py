from xml.etree import ElementTree

from peagle.svg import HEIGHT, drawing, standalone, text

SVG = "{http://www.w3.org/2000/svg}"


def test_a_standalone_file_holds_the_chart_its_style_and_a_legend() -> None:
    chart = drawing(HEIGHT, "a < b", [text(1, 2, "a & b", "tick", "start")])
    root = ElementTree.fromstring(standalone(chart, "Heading", [("one", 0), ("two <2>", 1)]))
    assert [node.text for node in root.iter(f"{SVG}text")] == ["Heading", "a & b", "one", "two <2>"]
    inner = root.find(f"{SVG}svg")
    assert inner is not None
    assert float(inner.attrib["y"]) + float(inner.attrib["height"]) < float(root.attrib["height"])
    style = root.findtext(f"{SVG}style") or ""
    assert ".series-1 { fill: var(--s1)" in style
    assert "prefers-color-scheme: dark" in style
