from peagle.tables import aligned, markdown


def test_aligned() -> None:
    assert aligned([("name", "n"), ("x", "1,000"), ("longer", "")]) == ["name        n", "x       1,000", "longer"]


def test_markdown() -> None:
    assert markdown([("a", "b"), ("1", "x|y")]) == ["| a | b |", "|---|---|", "| 1 | x\\|y |"]
