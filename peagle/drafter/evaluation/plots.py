"""The two plots of an evaluation, each an SVG file of its own: acceptance length by K, and acceptance by position."""

from collections.abc import Mapping, Sequence
from typing import Any

from peagle.economics.report.plots import Rates, acceptance_svg
from peagle.measurement.lines import Axes, line_chart
from peagle.svg import MAX_SERIES, standalone

# The vertical axis begins at 1, where no draft is accepted.
_LENGTH_AXES = Axes(
    name="Acceptance length by K",
    x_name="draft tokens a step (K)",
    y_name="tokens a verify step",
    place="K=",
    first=1.0,
)


def length_plot(report: Mapping[str, Any]) -> str:
    """A line a drafter: acceptance length over K. A drafter measured at one K is a point."""
    curves = {
        label: [(cell["k"], cell["acceptance_length"]) for cell in cells]
        for label, cells in _by_drafter(report).items()
    }
    chart = line_chart(list(curves.items()), _LENGTH_AXES)
    return standalone(chart, f"Acceptance length, {_subject(report)}", _legend(list(curves)))


def position_plot(report: Mapping[str, Any]) -> str:
    """Bars by position in the draft, each drafter at its largest K."""
    largest = {label: cells[-1] for label, cells in _by_drafter(report).items()}
    labels = [f"{label}, K={cell['k']}" for label, cell in largest.items()]
    rates = [
        Rates(label=label, rates=cell["acceptance_rates"], series=series)
        for series, (label, cell) in enumerate(zip(labels, largest.values(), strict=True))
    ]
    return standalone(acceptance_svg(rates), f"Acceptance by position, {_subject(report)}", _legend(labels))


def _by_drafter(report: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """The cells by drafter, K ascending; the first `MAX_SERIES` drafters, as more colours cannot be told apart."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for cell in report["cells"]:
        groups.setdefault(cell["drafter"], []).append(cell)
    kept = list(groups.items())[:MAX_SERIES]
    return {label: sorted(cells, key=lambda cell: cell["k"]) for label, cells in kept}


def _subject(report: Mapping[str, Any]) -> str:
    return f"{report['model']}, {report['dataset']['name']}"


def _legend(labels: Sequence[str]) -> list[tuple[str, int]]:
    return [(label, series) for series, label in enumerate(labels)]
