"""The two plots of a benchmark, each an SVG file of its own: tokens/s by concurrency, and what a step costs by K."""

from collections.abc import Mapping
from typing import Any

from peagle.bench.config import NONE
from peagle.bench.report import best
from peagle.measurement.cells import METHOD_NAMES
from peagle.measurement.lines import Axes, Curve, line_chart
from peagle.svg import standalone

_SPEED_AXES = Axes(
    name="Output tokens per second by concurrency",
    x_name="requests at once",
    y_name="output tokens/s",
    place="concurrency ",
    decimals=0,
    is_even=True,
)
_COST_AXES = Axes(
    name="Time of a decoding step by K",
    x_name="draft tokens a step (K)",
    y_name="ms a step, drafting and verifying included",
    place="K=",
    decimals=1,
)


def speed_plot(report: Mapping[str, Any]) -> str:
    """A line a method: at each concurrency the output tokens/s of its best K."""
    concurrencies = report["configuration"]["concurrency"]
    curves: list[Curve] = []
    for method in _methods(report):
        bests = [(c, best(report["cells"], method, c)) for c in concurrencies]
        points = [(c, cell["output_tokens_per_s"]) for c, cell in bests if cell]
        name = METHOD_NAMES[method]
        curves.append((name if method == NONE else f"{name}, best K", points))
    return _plot(report, "Output tokens/s", curves, _SPEED_AXES)


def cost_plot(report: Mapping[str, Any]) -> str | None:
    """A line a method: what a step takes by K, at the smallest concurrency; a step without drafts is level.

    It is the whole step, in which K + 1 tokens are verified; `benchmarks/gpu/step_profile.py` has the drafter's part.
    None where no method that drafts has times of its steps.
    """
    concurrency = min(report["configuration"]["concurrency"])
    here = [c for c in report["cells"] if c["concurrency"] == concurrency and c["step_s"] is not None]
    ks = sorted({cell["k"] for cell in here if cell["k"]})
    if not ks:
        return None
    curves: list[Curve] = []
    for method in _methods(report):
        steps_ms = {cell["k"]: cell["step_s"] * 1000 for cell in here if cell["method"] == method}
        points = [(k, steps_ms[0]) for k in ks] if 0 in steps_ms else sorted(steps_ms.items())
        if points:
            curves.append((METHOD_NAMES[method], points))
    return _plot(report, f"Time of a whole step, concurrency {concurrency}", curves, _COST_AXES)


def _methods(report: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(cell["method"] for cell in report["cells"]))


def _plot(report: Mapping[str, Any], subject: str, curves: list[Curve], axes: Axes) -> str:
    label = f"{report['labels'][0].split()[0]}, " if report["labels"] else ""
    heading = f"{label}{subject}, {report['model']}, {report['dataset']['name']}"
    return standalone(line_chart(curves, axes), heading, [(words, series) for series, (words, _) in enumerate(curves)])
