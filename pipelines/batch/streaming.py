"""Stream units through Ray Data, from the plan to committed files, while the supervisor watches.

The driver hands out units and adds up their receipts, which are the usage of committed units. It keeps no rows in
memory, so its memory grows with units, not with rows.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from peagle.corpus.cutting import concurrent_units
from peagle.economics.usage import UnitUsage
from peagle.engine.startup import format_start_warning
from peagle.errors import EngineError, PeagleError, StoppedEarly
from peagle.runs.lease import taken_over_error
from peagle.runs.plan import WorkUnit, chunks, longest_first, unit_from_json, unit_to_json
from peagle.runs.prepare import prepare_unit
from peagle.runs.progress import RunProgress
from peagle.runs.rows import encode_rows, require_storable, unfinished_unit
from pipelines.batch.metrics import RunMetrics
from pipelines.batch.resolve import ResolvedRun
from pipelines.batch.session import StartPolicy, work_by_unit
from pipelines.batch.supervision import Supervisor
from pipelines.batch.worker import EngineWorker
from pipelines.cluster import ray as cluster
from pipelines.cluster.failures import to_peagle_error
from pipelines.cluster.placement import PREPARE_CPUS

_POLL_S = 1.0
_LOGS_HINT = "see the run's logs/ folder; the same command continues the run"


def stream(
    run: ResolvedRun, units: Sequence[WorkUnit], supervisor: Supervisor, progress: RunProgress, metrics: RunMetrics
) -> None:
    """Generate and commit `units`. Returns when all are committed.

    If another driver takes over the run, this driver no longer changes the run directory.

    Args:
        metrics: updated with committed units and with the supervisor's observations.

    Raises:
        StoppedEarly, TooManyFailedRows, EngineError: the supervisor ended the run.
        RunInUse: another driver has taken over.
        InputError: a planned unit could not be committed.
    """
    require_storable(run.plan.schema)
    receipts = _Receipts(lambda: _dataset(run, units))
    try:
        _watch(run, receipts, supervisor, progress, metrics)
        progress.show(supervisor.tally, final=True)
    finally:
        progress.close()
    run.directory.stop.clear()
    if run.plan.remaining_units(run.directory.committed()):
        raise supervisor.error()


def _watch(
    run: ResolvedRun, receipts: "_Receipts", supervisor: Supervisor, progress: RunProgress, metrics: RunMetrics
) -> None:
    """Record receipts and observe the run until the dataset ends or is abandoned."""
    observed_at = -math.inf
    drafter_watch = run.drafter_watch()
    for usage in _until_stopped(receipts, supervisor):
        if usage is not None:
            supervisor.tally.add(usage)
            metrics.record_committed(usage)
        if time.monotonic() - observed_at < _POLL_S:
            continue
        if run.directory.lease is not None and run.directory.lease.lost.is_set():
            cluster.abandon()
            raise taken_over_error(run.directory.root)
        observed_at, was_already_ending = time.monotonic(), supervisor.ending is not None
        _observe(supervisor)
        metrics.update(supervisor.tally, supervisor.sessions)
        _show_warnings(supervisor, progress)
        progress.show(supervisor.tally)
        stats = supervisor.tally.speculation
        if drafter_watch is not None:
            for warning in drafter_watch.new_warnings(
                num_drafts=stats.num_drafts, acceptance_length=stats.acceptance_length
            ):
                progress.say(warning)
        if supervisor.ending is not None and not was_already_ending:
            grace = f"running units have {run.config.grace_s:g} s (--grace-s) to be committed"
            progress.say(f"stopping: {supervisor.ending.message}\n{grace}")
        if supervisor.ending is not None and supervisor.should_give_up:
            cluster.abandon()
            break
    supervisor.observe()
    metrics.update(supervisor.tally, supervisor.sessions)
    _show_warnings(supervisor, progress)


def _show_warnings(supervisor: Supervisor, progress: RunProgress) -> None:
    for warning in supervisor.new_warnings():
        progress.say(format_start_warning(warning))


def _until_stopped(receipts: "_Receipts", supervisor: Supervisor) -> Iterator[UnitUsage | None]:
    """Yield receipts, or None while there are no new ones.

    If a signal has stopped the run, an error ends the iteration without a message, because the signal may have ended
    Ray, too.
    """
    try:
        yield from receipts
    except PeagleError:
        cluster.require_alive()
        _observe(supervisor)
        if supervisor.ending is None or supervisor.ending.error is not StoppedEarly:
            raise
        cluster.abandon()


def _observe(supervisor: Supervisor) -> None:
    """Let the supervisor observe the run.

    If that fails, exit without `ray.shutdown`, which would abort while engines are loading.
    """
    try:
        supervisor.observe()
    except (PeagleError, OSError):
        cluster.abandon()
        raise


def _dataset(run: ResolvedRun, units: Sequence[WorkUnit]) -> Any:
    """Return the dataset: chunks of units -> prepared units -> receipts. Each unit is a row in its own block."""
    import ray
    from ray.data import ActorPoolStrategy, TaskPoolStrategy

    cluster.use_one_block_per_row()
    cluster.scale_actors_with_queue()
    unit_chunks = chunks(longest_first(units))
    calls_per_engine = min(len(units), concurrent_units(run.plan.cut, run.num_slots))
    engines = run.config.engine_range
    stage_run = run.for_stages()
    return (
        ray.data.from_items(
            [{"units": "\n".join(map(unit_to_json, chunk))} for chunk in unit_chunks],
            override_num_blocks=len(unit_chunks),
        )
        .map_batches(
            prepare_units,
            batch_size=None,
            batch_format="pyarrow",
            # One task for each engine; a task prepares 400,000 prompt tokens/s (AMD EPYC, 2026-11-22).
            compute=TaskPoolStrategy(engines.largest),
            num_cpus=PREPARE_CPUS,
            fn_kwargs={"run": stage_run},
        )
        .map_batches(
            EngineWorker,
            batch_size=None,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(
                min_size=engines.smallest,
                max_size=engines.largest,
                initial_size=engines.initial_number(cluster.room_for(run.placement), len(units), calls_per_engine),
                max_concurrent_calls_per_actor=calls_per_engine,
                max_tasks_in_flight_per_actor=calls_per_engine + 1,  # one waits in the actor's queue
            ),
            **run.placement.options,
            fn_constructor_args=(stage_run, _start_policy(run)),
        )
    )


def prepare_units(batch: pa.Table, *, run: ResolvedRun) -> Iterator[pa.Table]:
    """Ray Data's first stage: read, template and tokenise units, one after the other.

    Args:
        batch: one row, with the units as lines of JSON.

    Yields:
        One row per unit, as soon as it is ready. If the run is being stopped, the next unit is yielded unprepared, and
        no more units follow.
    """
    builder = run.request_builder()
    for unit in map(unit_from_json, batch.column("units")[0].as_py().split("\n")):
        if run.directory.stop.grace_s() is not None:
            yield encode_rows(unfinished_unit(unit))
            return
        yield encode_rows(prepare_unit(unit, run.plan.schema, builder))


def _start_policy(run: ResolvedRun) -> StartPolicy | None:
    """Return the start policy for a varying number of engines. With a fixed number, each engine loads immediately."""
    engines = run.config.engine_range
    if engines.fixed is not None:
        return None
    return StartPolicy(
        num_engines=engines.smallest,
        work=work_by_unit(run.plan),
        sessions_before=frozenset(session.session_id for session in run.directory.sessions()),
        heartbeat_s=run.config.heartbeat_s,
    )


class _Receipts:
    """Runs a dataset in a thread, so that the driver can show progress and be interrupted."""

    def __init__(self, dataset: Callable[[], Any]) -> None:
        self._queue: queue.Queue[UnitUsage | BaseException | None] = queue.Queue()
        self._dataset = dataset
        threading.Thread(target=self._consume, daemon=True).start()

    def __iter__(self) -> Iterator[UnitUsage | None]:
        """Yield the usage of each committed unit, and None whenever no receipt arrives for a second."""
        while True:
            try:
                item = self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                yield None
                continue
            if item is None:
                return
            if not isinstance(item, UnitUsage):
                raise to_peagle_error(item, "the run failed", hint=_LOGS_HINT, otherwise=EngineError) from item
            yield item

    def _consume(self) -> None:
        try:
            for row in self._dataset().iter_rows():
                if row["usage"] is not None:
                    self._queue.put(UnitUsage.from_json(row["usage"]))
            self._queue.put(None)
        except BaseException as error:  # re-raised in the driver's thread
            self._queue.put(error)
