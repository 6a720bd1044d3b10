"""`--dry-run` of `peagle generate` and `peagle serve`: help and printing."""

from typing import Any, Protocol

DRY_RUN_HELP = "say what would run where, what memory, time and money it would take, and start and write nothing"


class Forecast(Protocol):
    """A run or an endpoint that was only decided."""

    def lines(self) -> list[tuple[str, str]]:
        """The facts to show, by label."""

    def to_dict(self) -> dict[str, Any]:
        """The same as data."""


def told(forecast: Forecast) -> tuple[int, dict[str, Any]]:
    """Print the facts; the exit code, and the result as data."""
    lines = forecast.lines()
    width = max(len(label) for label, _ in lines)
    for label, fact in lines:
        print(f"{label:<{width}}  {fact}")
    print("dry run: nothing was started or written")
    return 0, forecast.to_dict()
