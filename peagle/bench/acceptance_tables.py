"""The tables and plots of an evaluation's report."""

from collections.abc import Mapping
from typing import Any

from peagle.bench.tables import POSITION_NOTE, acceptance_figures, conditions, positions_of, subject_of
from peagle.charts import MAX_SERIES, Axes, line_chart, standalone
from peagle.economics.report.plots import Rates, acceptance_svg
from peagle.tables import aligned, markdown

_HEAD = ("drafter", "K", "acceptance length", "drafts")
_SPEEDS = {
    "drafted_tokens_per_s": "drafted/s",
    "accepted_tokens_per_s": "accepted/s",
    "output_tokens_per_s": "output/s",
}


def text_report(report: Mapping[str, Any]) -> str:
    """Return the tables for the terminal: all cells, then by category if the data has categories."""
    tables = [_conditions(report), "", *aligned(_cell_rows(report))]
    if category_rows := _category_rows(report):
        tables += ["", *aligned(category_rows)]
    return "\n".join([*tables, *(f"! {note}" for note in report["notes"])])


def markdown_report(report: Mapping[str, Any]) -> str:
    parts = [f"Measured: {_conditions(report)}.", "", *markdown(_cell_rows(report))]
    parts += ["", f"{POSITION_NOTE} Speeds are tokens per second."]
    if category_rows := _category_rows(report):
        parts += ["", *markdown(category_rows)]
    return "\n".join([*parts, *(f"\n{note}" for note in report["notes"])]) + "\n"


def _conditions(report: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return conditions(
        report,
        load=[f"concurrency {report['concurrency']}"],
        versions=[versions] if versions else [],
        hardware=report["hardware"],
        dates=[cell["measured_at"] for cell in report["cells"]],
    )


def _cell_rows(report: Mapping[str, Any]) -> list[list[str]]:
    positions = positions_of(report["cells"])
    rows = [[*_HEAD, *positions, *_SPEEDS.values()]]
    for cell in report["cells"]:
        speeds = [f"{cell[name]:,.1f}" for name in _SPEEDS]
        rows.append([cell["drafter"], str(cell["k"]), *acceptance_figures(cell, positions), *speeds])
    return rows


def _category_rows(report: Mapping[str, Any]) -> list[list[str]]:
    cells = [cell for cell in report["cells"] if cell["by_category"]]
    if not cells:
        return []
    positions = positions_of(cells)
    rows = [["category", *_HEAD, "responses", *positions]]
    for name in sorted({name for cell in cells for name in cell["by_category"]}):
        for cell in cells:
            if category := cell["by_category"].get(name):
                length, drafts, *rates = acceptance_figures(category, positions)
                responses = f"{category['num_responses']:,}"
                rows.append([name, cell["drafter"], str(cell["k"]), length, drafts, responses, *rates])
    return rows


# The vertical axis starts at 1, the length without accepted drafts.
_LENGTH_AXES = Axes(
    name="Acceptance length by K",
    x_name="draft tokens per step (K)",
    y_name="tokens per verification step",
    x_prefix="K=",
    first=1.0,
)


def length_plot(report: Mapping[str, Any]) -> str:
    """Plot acceptance length over K, one line per drafter."""
    curves = {
        label: [(cell["k"], cell["acceptance_length"]) for cell in cells]
        for label, cells in _by_drafter(report).items()
    }
    chart = line_chart(list(curves.items()), _LENGTH_AXES)
    return standalone(chart, f"Acceptance length, {subject_of(report)}", list(curves))


def position_plot(report: Mapping[str, Any]) -> str:
    """Plot acceptance by position in the draft, each drafter at its largest K."""
    largest = {label: cells[-1] for label, cells in _by_drafter(report).items()}
    labels = [f"{label}, K={cell['k']}" for label, cell in largest.items()]
    rates = [
        Rates(label=label, rates=cell["acceptance_rates"], series=series)
        for series, (label, cell) in enumerate(zip(labels, largest.values(), strict=True))
    ]
    return standalone(acceptance_svg(rates), f"Acceptance by position, {subject_of(report)}", labels)


def _by_drafter(report: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Group cells by drafter, K ascending; only as many drafters as there are distinguishable colours."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for cell in report["cells"]:
        groups.setdefault(cell["drafter"], []).append(cell)
    kept = list(groups.items())[:MAX_SERIES]
    return {label: sorted(cells, key=lambda cell: cell["k"]) for label, cells in kept}
