"""The results of an evaluation: data, a terminal table, Markdown and plots.

The report is JSON-ready data; every other form is made from it alone. It knows nothing of engines or files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from peagle.bench.acceptance_cells import SCHEMA, CellResult
from peagle.bench.acceptance_plan import Plan
from peagle.bench.prompts import Dataset
from peagle.charts import MAX_SERIES, Axes, line_chart, standalone
from peagle.economics.report.figures import in_words_share
from peagle.economics.report.html import Rates, acceptance_svg
from peagle.speculation import SpeculationStats
from peagle.tables import aligned, markdown

_HEAD = ("drafter", "K", "acceptance length", "drafts")
_SPEEDS = {
    "drafted_tokens_per_s": "drafted/s",
    "accepted_tokens_per_s": "accepted/s",
    "output_tokens_per_s": "output/s",
}
_NOT_BY_CATEGORY = "This vLLM counts drafts by engine, not by request: the categories cannot be told apart."


def make_report(
    plan: Plan, dataset: Dataset, results: Sequence[CellResult], failed: Mapping[str, str]
) -> dict[str, Any]:
    """All that was measured and what it was measured on, as JSON-ready data.

    Args:
        failed: cells whose engine did not start or died in this command, by name: what was said of each.
    """
    fingerprint = plan.fingerprint(dataset)
    categories = {prompt.category for prompt in dataset.prompts} - {None}
    is_split = all(result.by_category for result in results)
    num_left = len(plan.cells) - len(results) - len(failed)
    return {
        "schema": SCHEMA,
        "model": plan.model.name,
        "hardware": fingerprint["hardware"],
        "versions": fingerprint["versions"],
        "precision": fingerprint["precision"],
        "compiled": not plan.spec.enforce_eager,
        "concurrency": plan.config.concurrency,
        "sampling": plan.config.sampling(),
        "dataset": {"name": dataset.name, "num_prompts": len(dataset.prompts), "rejected": dataset.rejected},
        "fingerprint": fingerprint,
        "cells": [_cell(result) for result in results],
        "failed": dict(failed),
        "notes": [
            *([_NOT_BY_CATEGORY] if categories and not is_split else []),
            *(f"Not measured: {name}, whose engine failed: {message}" for name, message in failed.items()),
            *([f"Not finished: {num_left} cells are left."] if num_left else []),
        ],
    }


def text_report(report: Mapping[str, Any]) -> str:
    """The terminal's tables: all cells, then each by category where the data has one."""
    tables = [_conditions(report), "", *aligned(_cell_rows(report))]
    if category_rows := _category_rows(report):
        tables += ["", *aligned(category_rows)]
    return "\n".join([*tables, *(f"! {note}" for note in report["notes"])])


def markdown_report(report: Mapping[str, Any]) -> str:
    """The same tables, ready for a model card."""
    parts = [f"Measured: {_conditions(report)}.", "", *markdown(_cell_rows(report))]
    parts += ["", "By position: the share of drafts in which that token was accepted. Speeds are tokens a second."]
    if category_rows := _category_rows(report):
        parts += ["", *markdown(category_rows)]
    return "\n".join([*parts, *(f"\n{note}" for note in report["notes"])]) + "\n"


def _cell(result: CellResult) -> dict[str, Any]:
    return {
        **{name: value for name, value in asdict(result).items() if name not in ("speculation", "by_category")},
        **{name: getattr(result, name) for name in _SPEEDS},
        **_acceptance(result.speculation),
        "by_category": {
            name: {
                "num_responses": found.num_responses,
                "num_output_tokens": found.num_output_tokens,
                **_acceptance(found.speculation),
            }
            for name, found in result.by_category.items()
        },
    }


def _acceptance(stats: SpeculationStats) -> dict[str, Any]:
    return {
        **stats.to_dict(),
        "acceptance_length": stats.acceptance_length,
        "acceptance_rates": list(stats.acceptance_rates),
    }


def _conditions(report: Mapping[str, Any]) -> str:
    """The conditions under which the figures hold, in one line."""
    temperature, max_tokens = report["sampling"]["temperature"], report["sampling"]["max_tokens"]
    dates = [cell["measured_at"][:10] for cell in report["cells"]]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    parts = [
        report["model"],
        f"{report['dataset']['num_prompts']} prompts of {report['dataset']['name']}",
        f"temperature {temperature:g}" if temperature else "greedy",
        f"at most {max_tokens} tokens",
        f"concurrency {report['concurrency']}",
        f"{report['precision']}, {'compiled' if report['compiled'] else 'not compiled'}",
        *([versions] if versions else []),
        report["hardware"],
        " to ".join(sorted({min(dates), max(dates)})),
    ]
    return "; ".join(parts)


def _cell_rows(report: Mapping[str, Any]) -> list[list[str]]:
    num_positions = max(len(cell["acceptance_rates"]) for cell in report["cells"])
    rows = [[*_HEAD, *map(str, range(1, num_positions + 1)), *_SPEEDS.values()]]
    for cell in report["cells"]:
        speeds = [f"{cell[name]:,.1f}" for name in _SPEEDS]
        rows.append([cell["drafter"], str(cell["k"]), *_figures(cell, num_positions), *speeds])
    return rows


def _category_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """Rows by category of every cell; none where no cell has categories."""
    cells = [cell for cell in report["cells"] if cell["by_category"]]
    if not cells:
        return []
    num_positions = max(len(cell["acceptance_rates"]) for cell in cells)
    rows = [["category", *_HEAD, "responses", *map(str, range(1, num_positions + 1))]]
    for name in sorted({name for cell in cells for name in cell["by_category"]}):
        for cell in cells:
            if found := cell["by_category"].get(name):
                length, drafts, *rates = _figures(found, num_positions)
                responses = f"{found['num_responses']:,}"
                rows.append([name, cell["drafter"], str(cell["k"]), length, drafts, responses, *rates])
    return rows


def _figures(found: Mapping[str, Any], num_positions: int) -> list[str]:
    """Acceptance length, drafts, and a cell for each position.

    Positions beyond K are blank.
    """
    length = found["acceptance_length"]
    rates = [in_words_share(rate) for rate in found["acceptance_rates"]]
    blank = [""] * (num_positions - len(rates))
    return ["-" if length is None else f"{length:.2f}", f"{found['num_drafts']:,}", *rates, *blank]


# The vertical axis begins at 1, where no draft is accepted.
_LENGTH_AXES = Axes(
    name="Acceptance length by K",
    x_name="draft tokens a step (K)",
    y_name="tokens a verify step",
    place="K=",
    first=1.0,
)


def length_plot(report: Mapping[str, Any]) -> str:
    """A line a drafter: acceptance length over K.

    A drafter measured at one K is a point.
    """
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
    """The cells by drafter, K ascending.

    Only the first `MAX_SERIES` drafters: more colours cannot be told apart.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for cell in report["cells"]:
        groups.setdefault(cell["drafter"], []).append(cell)
    kept = list(groups.items())[:MAX_SERIES]
    return {label: sorted(cells, key=lambda cell: cell["k"]) for label, cells in kept}


def _subject(report: Mapping[str, Any]) -> str:
    return f"{report['model']}, {report['dataset']['name']}"


def _legend(labels: Sequence[str]) -> list[tuple[str, int]]:
    return [(label, series) for series, label in enumerate(labels)]
