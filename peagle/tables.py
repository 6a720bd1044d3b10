"""Text tables, aligned for a terminal or in Markdown. In a pipe, Rich would wrap or crop tables at 80 columns."""

from collections.abc import Sequence

Row = Sequence[str]


def aligned(rows: Sequence[Row]) -> list[str]:
    """Return lines with the first column left-aligned and the others right-aligned, two spaces apart.

    >>> aligned([("", "a"), ("row", "12")])
    ['      a', 'row  12']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [f"{first:<{widths[0]}}", *(f"{c:>{width}}" for c, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def markdown(rows: Sequence[Row]) -> list[str]:
    """Return lines of a Markdown table; the first row is its header."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]
