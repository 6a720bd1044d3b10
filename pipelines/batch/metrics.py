"""The metrics of a bulk run, updated by its driver.

Names and labels are in `pipelines.cluster.metrics`. The gauges of a run disappear when its driver exits.
"""

import time
from collections.abc import Iterable

from peagle.catalog.targets import name_of
from peagle.economics.usage import EngineSession, UnitUsage
from peagle.profiles.watch import break_even_at
from peagle.runs.meter import is_lent
from peagle.runs.progress import Tally
from pipelines.batch.request import RunRequest
from pipelines.batch.resolve import ResolvedRun
from pipelines.cluster.metrics import UsageMetrics, create_metric


class RunMetrics:
    """The metrics of one attempt at a run; Ray must be running."""

    def __init__(self, request: RunRequest, run: ResolvedRun) -> None:
        manifest, drafter = run.directory.manifest(), run.drafter.name
        model_name = manifest.get("served_name") or name_of(run.model.name)  # for a batch, the name that clients use
        self._request = request
        self._usage = UsageMetrics(model_name, drafter)
        self._labels = {"model_name": model_name, "drafter": drafter or ""}
        self._rows_total = create_metric("peagle_rows_total", **self._labels)
        self._rows, self._engines, self._usd, self._budget, self._deadline, self._end = (
            create_metric(name, **self._labels, run=manifest["run_id"])
            for name in (
                "peagle_run_rows",
                "peagle_run_engines",
                "peagle_run_usd",
                "peagle_run_budget_usd",
                "peagle_run_deadline_timestamp_seconds",
                "peagle_run_expected_end_timestamp_seconds",
            )
        )
        break_even = break_even_at(run.engine.break_even(run.hardware), run.spec.max_num_seqs)
        if break_even is not None:
            create_metric("peagle_break_even_acceptance_length", **self._labels).set(break_even)

    def record_committed(self, usage: UnitUsage) -> None:
        """Record a committed unit."""
        self._usage.record_work(usage)
        for outcome, num_rows in (("ok", usage.num_rows), ("failed", usage.num_failed_rows)):
            if num_rows:
                self._rows_total.inc(num_rows, {"outcome": outcome})

    def update(self, tally: Tally, sessions: Iterable[EngineSession]) -> None:
        """Update the gauges of the run. `sessions` are this attempt's."""
        for session in sessions:
            if not is_lent(session.session_id):  # seconds of a lent engine are recorded by its endpoint
                self._usage.record_heartbeat(session)
        num_rows_left = tally.num_rows_planned - tally.num_rows - tally.num_failed_rows
        for state, num_rows in (
            ("done", tally.num_rows),
            ("failed", tally.num_failed_rows),
            ("left", max(num_rows_left, 0)),
        ):
            self._rows.set(num_rows, {"state": state})
        self._engines.set(tally.num_engines)
        self._usd.set(tally.usd)
        if (budget_usd := self._request.budget_usd) is not None:
            self._budget.set(budget_usd)
        if (deadline_at := self._request.limits.deadline_at) is not None:
            self._deadline.set(deadline_at)
        if tally.seconds_left is not None:
            self._end.set(time.time() + tally.seconds_left)
