from xml.etree import ElementTree

from peagle.svg import HEIGHT, apart, drawing, shortened, standalone, text

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


def test_a_heading_and_labels_too_long_for_the_page_lose_their_middle() -> None:
    path = "/models/" + "long/" * 20 + "head, K=7"
    root = ElementTree.fromstring(standalone(drawing(HEIGHT, "", []), "A" * 90, [(path, 0)]))
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
