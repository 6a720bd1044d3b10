from peagle.tables import aligned, markdown


def test_columns_are_aligned() -> None:
    assert aligned([("name", "n"), ("x", "1,000"), ("longer", "")]) == ["name        n", "x       1,000", "longer"]


def test_markdown_escapes_vertical_bars() -> None:
    assert markdown([("a", "b"), ("1", "x|y")]) == ["| a | b |", "|---|---|", "| 1 | x\\|y |"]
