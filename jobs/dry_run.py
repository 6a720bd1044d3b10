"""`--dry-run` of `peagle generate` and `peagle serve`: help and printing."""

from collections.abc import Sequence

from jobs.streams import console

DRY_RUN_HELP = "say what would run where, what memory, time and money it would take, and start and write nothing"


def print_dry_run(lines: Sequence[tuple[str, str]]) -> None:
    """Print labels and facts, with long facts folded beside their labels."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for label, fact in lines:
        grid.add_row(label, Text(fact))
    console().print(grid)
    print("dry run: nothing was started or written")
