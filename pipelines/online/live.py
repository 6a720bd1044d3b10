"""Metrics of recent minutes for the web page and `/v1/live`, and notes on drafters that cost more than they save.

A request appears once it has ended. Its tokens are spread evenly from its first token to its end (or from its start, if
the time of the first token is unknown). The request's other figures count at its end. Time is divided into steps, and
only complete steps are shown.
"""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from peagle.economics.usage import RequestUsage
from peagle.errors import PeagleError
from peagle.profiles.watch import DrafterWatch, break_even_at, reliable_length
from peagle.speculation import drafter_warning
from pipelines.online.cost import CostView, request_totals
from pipelines.online.totals import Sums, Totals

STEP_S = 2
NUM_POINTS = 30  # of a time series, for any window
MAX_WINDOW_S = 900
_MAX_REPORT_AGE_S = 1.0
_BREAK_EVEN_WINDOW_S = 300


@dataclass(frozen=True, slots=True)
class LiveGroup:
    key: str
    model: str


@dataclass(slots=True)
class _StepMetrics:
    """The requests of one group that ended in one time step, and the tokens that were generated in this step."""

    by_session: dict[str, Sums] = field(default_factory=dict)
    ttft_s: list[float] = field(default_factory=list)
    num_generated_tokens: float = 0.0


class LiveView:
    """The recent minutes of a ledger.

    `break_even` has the break-even acceptance lengths by model and concurrency, if known.
    """

    def __init__(
        self,
        cost: CostView,
        break_even: Mapping[str, Mapping[int, float]] = MappingProxyType({}),
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._cost = cost
        self._break_even = break_even
        self._now = now
        self._steps: defaultdict[int, defaultdict[LiveGroup, _StepMetrics]] = defaultdict(
            lambda: defaultdict(_StepMetrics)
        )
        self._reports: dict[tuple[str | None, int], tuple[float, dict[str, Any]]] = {}
        self._lock = threading.Lock()
        cost.totals.add_follower(self)

    def report(self, key: str | None = None, window_s: int = 60) -> dict[str, Any]:
        """Return the metrics of the last `window_s` (a multiple of 60) as JSON, at most one second old.

        With a key, cover only its requests, and omit the costs of the engines (`account`).
        """
        made_at, report = self._reports.get((key, window_s), (float("-inf"), {}))
        if not 0 <= self._now() - made_at < _MAX_REPORT_AGE_S:
            account = self._cost.report(key, window_s).get("account")  # calls `on_ledger_record`
            with self._lock:
                report = self._report(key, window_s)
            report |= {} if account is None else {"account": account}
            self._reports[key, window_s] = self._now(), report
        return report

    def _report(self, key: str | None, window_s: int) -> dict[str, Any]:
        current_step = int(self._now() // STEP_S)
        for step in [step for step in self._steps if step < current_step - MAX_WINDOW_S // STEP_S]:
            del self._steps[step]
        steps = range(current_step - window_s // STEP_S, current_step)
        groups = {group for step in steps for group in self._steps.get(step, ())}
        models = sorted({group.model for group in groups if key in (None, group.key)})
        by_model = {model: self._figures(steps, key, model) for model in models}
        notes = []
        for model, figures in by_model.items():
            length = reliable_length(figures["num_drafts"], figures["acceptance_length"])
            if warning := drafter_warning(length, break_even=self._break_even_length(model, figures)):
                notes.append(f"{model}: {warning}")
        return {
            "ends_at_s": current_step * STEP_S,
            "window_s": window_s,
            "total": self._figures(steps, key, None),
            "by_model": by_model,
            "series": self._series(steps, key),
            "notes": notes,
        }

    def break_even_by_model(self) -> dict[str, float]:
        """Return the break-even acceptance lengths by model at the recent concurrency, if known."""
        self._cost.totals.catch_up()
        with self._lock:
            by_model = self._report(None, _BREAK_EVEN_WINDOW_S)["by_model"]
        lengths = {model: self._break_even_length(model, figures) for model, figures in by_model.items()}
        return {model: length for model, length in lengths.items() if length is not None}

    def _break_even_length(self, model: str, figures: Mapping[str, Any]) -> float | None:
        return break_even_at(self._break_even.get(model, {}), figures["requests_at_once"])

    def on_attach(self, totals: Totals) -> None:
        for request in totals.recent(self._now() - MAX_WINDOW_S):
            self.on_ledger_record(request)

    def on_ledger_record(self, request: RequestUsage) -> None:
        usage, group = request.usage, LiveGroup(request.key, request.model)
        end_step = int(usage.finished_at // STEP_S)
        if end_step < self._now() // STEP_S - MAX_WINDOW_S // STEP_S:
            return
        begins_at = min(usage.started_at + (request.ttft_s or 0.0), usage.finished_at)
        with self._lock:
            metrics = self._steps[end_step][group]
            metrics.by_session.setdefault(usage.session_id, Sums(usage)).add(request)
            if request.ttft_s is not None:
                metrics.ttft_s.append(request.ttft_s)
            for step, share in spread_over_steps(begins_at, usage.finished_at):
                self._steps[step][group].num_generated_tokens += share * usage.num_output_tokens

    def _select(self, steps: Collection[int], key: str | None, model: str | None) -> list[_StepMetrics]:
        return [
            metrics
            for step in steps
            for group, metrics in self._steps.get(step, {}).items()
            if key in (None, group.key) and model in (None, group.model)
        ]

    def _figures(self, steps: Collection[int], key: str | None, model: str | None) -> dict[str, Any]:
        selected = self._select(steps, key, model)
        return {
            "output_tokens_per_s": _rate(selected, len(steps)),
            "ttft_p50_s": _ttft_percentile(selected, 50),
            "ttft_p95_s": _ttft_percentile(selected, 95),
            **request_totals(sums for metrics in selected for sums in metrics.by_session.values()),
        }

    def _series(self, steps: range, key: str | None) -> dict[str, Any]:
        size = len(steps) // NUM_POINTS
        points = [steps[start : start + size] for start in range(0, len(steps), size)]
        metrics_by_point = [self._select(point, key, None) for point in points]
        return {
            "step_s": size * STEP_S,
            "output_tokens_per_s": [_rate(selected, size) for selected in metrics_by_point],
            "ttft_p50_s": [_ttft_percentile(selected, 50) for selected in metrics_by_point],
        }


def spread_over_steps(begins_at: float, ends_at: float) -> Iterator[tuple[int, float]]:
    """Yield the steps that an interval touches, with shares that sum to 1.

    >>> list(spread_over_steps(3.0, 7.0)), list(spread_over_steps(5.0, 5.0))
    ([(1, 0.25), (2, 0.5), (3, 0.25)], [(2, 1.0)])
    """
    first, last = int(begins_at // STEP_S), int(ends_at // STEP_S)
    if first == last:
        yield first, 1.0
        return
    for step in range(first, last + 1):
        inside_s = min(ends_at, (step + 1) * STEP_S) - max(begins_at, step * STEP_S)
        yield step, inside_s / (ends_at - begins_at)


def _rate(selected: Collection[_StepMetrics], num_steps: int) -> float:
    return sum(metrics.num_generated_tokens for metrics in selected) / (num_steps * STEP_S)


def _ttft_percentile(selected: Collection[_StepMetrics], percent: float) -> float | None:
    values = [value for metrics in selected for value in metrics.ttft_s]
    return float(np.percentile(values, percent)) if values else None


def watch_drafters(
    watches: Mapping[str, DrafterWatch],
    view: CostView,
    stopped: threading.Event,
    say: Callable[[str], None],
    *,
    every_s: float = 60.0,
) -> None:
    """Check the last ten minutes of each drafter periodically until the endpoint stops. `watches` is keyed by model."""
    while not stopped.wait(every_s):
        try:
            by_model = view.report(window_s=600.0)["by_model"]
        except PeagleError as error:
            say(f"cannot read the ledger, so drafters were not checked: {error}")
            continue
        for name in watches.keys() & by_model.keys():
            figures = by_model[name]
            for warning in watches[name].new_warnings(
                num_drafts=figures["num_drafts"],
                acceptance_length=figures["acceptance_length"],
                concurrency=figures["requests_at_once"],
            ):
                say(f"{name}: {warning}")


def publish_break_even_forever(view: LiveView, publish: Callable[[str, float], None], *, every_s: float = 15.0) -> None:
    while True:
        with contextlib.suppress(PeagleError, OSError):  # a temporarily unreadable ledger must not end the thread
            for model, length in view.break_even_by_model().items():
                publish(model, length)
        time.sleep(every_s)
