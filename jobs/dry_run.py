"""`--dry-run` of `peagle generate` and `peagle serve`: help and printing."""

from collections.abc import Sequence

DRY_RUN_HELP = "say what would run where, what memory, time and money it would take, and start and write nothing"


def print_dry_run(lines: Sequence[tuple[str, str]]) -> None:
    """Print labels and facts."""
    width = max(len(label) for label, _ in lines)
    for label, fact in lines:
        print(f"{label:<{width}}  {fact}")
    print("dry run: nothing was started or written")
