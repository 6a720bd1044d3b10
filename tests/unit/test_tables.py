from peagle.tables import aligned, markdown


def test_the_first_column_is_left_and_the_others_right() -> None:
    assert aligned([("name", "n"), ("x", "1,000"), ("longer", "")]) == ["name        n", "x       1,000", "longer"]


def test_markdown_keeps_a_bar_within_its_cell() -> None:
    assert markdown([("a", "b"), ("1", "x|y")]) == ["| a | b |", "|---|---|", "| 1 | x\\|y |"]
