"""Several runs side by side: their figures, the ratios to one of them, and how far they can be compared.

It knows reports as data only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from peagle.economics.report.data import SCHEMA, check_report
from peagle.economics.report.figures import FIGURES
from peagle.errors import PeagleError

# What has to be equal for two runs to differ by their drafter alone.
_CONDITIONS = ("model", "precision", "concurrency", "num_engines", "sampling", "hardware", "num_input_rows")


def compare(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several reports side by side, as data.

    The baseline is the first run without a drafter, or the first run when all have one.

    Returns:
        `schema`, `labels` and `baseline` (an index into them), `figures` (rows of `name`, `label`, `values`,
        `ratios` to the baseline, None where there is no number) and `notes`.

    Raises:
        PeagleError: there is no report, or one cannot be shown.
    """
    checked = [check_report(report) for report in reports]
    if not checked:
        raise PeagleError("there is no report to compare")
    baseline = next((i for i, one in enumerate(checked) if one["run"]["drafter"] is None), 0)
    figures = []
    for figure in FIGURES.values():
        values = [figure.value(one) for one in checked]
        ratios = [_ratio(value, values[baseline]) if figure.is_ratio else None for value in values]
        figures.append({"name": figure.name, "label": figure.label, "values": values, "ratios": ratios})
    return {
        "schema": SCHEMA,
        "labels": _labels(checked),
        "baseline": baseline,
        "figures": figures,
        "notes": _comparison_notes(checked, baseline),
    }


def _ratio(value: float | None, to: float | None) -> float | None:
    return value / to if value is not None and to else None


def _labels(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """The runs' labels: without the model where all have the same, and numbered where several are equal."""
    labels = [str(report["run"]["label"]) for report in reports]
    models = {report["run"]["model"] for report in reports}
    if len(reports) > 1 and len(models) == 1:
        model = models.pop()
        labels = [label.removeprefix(f"{model} with ").removeprefix(f"{model}, ") for label in labels]
    return [
        f"{label} ({labels[: i + 1].count(label)})" if labels.count(label) > 1 else label
        for i, label in enumerate(labels)
    ]


def _comparison_notes(reports: Sequence[Mapping[str, Any]], baseline: int) -> list[str]:
    base = reports[baseline]
    notes = []
    for label, report in zip(_labels(reports), reports, strict=True):
        if report is base:
            continue
        differing = [name for name in _CONDITIONS if report["run"][name] != base["run"][name]]
        ratio = _ratio(report["account"]["tokens_per_busy_usd"], base["account"]["tokens_per_busy_usd"])
        is_drafter_tried = report["run"]["drafter"] is not None and base["run"]["drafter"] is None
        if is_drafter_tried and ratio is not None and ratio < 1 and set(differing) <= {"num_input_rows"}:
            notes.append(f"{label}: the drafter costs more than it saves, {ratio:.2f} x the tokens per busy dollar.")
        if differing:
            notes.append(f"{label} differs from the baseline also in {_conditions(differing)}.")
    return notes


def _conditions(differing: Sequence[str]) -> str:
    named = ", ".join(name.removeprefix("num_").replace("_", " ") for name in differing)
    advice = (
        "; loading weighs more on the shorter run, so compare the busy time" if "num_input_rows" in differing else ""
    )
    return named + advice
