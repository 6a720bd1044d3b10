"""Stream units through Ray Data, from the plan to committed files, while the supervisor watches.

The driver hands out units and sums receipts. It holds no rows, so its memory grows with units and not with rows.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from peagle.corpus.cutting import calls_per_engine
from peagle.economics.tags import tags_to_text
from peagle.economics.usage import EngineFacts, UnitUsage
from peagle.engine.startup import as_told
from peagle.errors import EngineError, PeagleError, StoppedEarly
from peagle.runs.directory import RunDirectory
from peagle.runs.lease import taken_over
from peagle.runs.plan import Plan, WorkUnit, chunks, longest_first, unit_to_json
from peagle.runs.prepare import PrepareJob, prepare_units
from peagle.runs.progress import RunProgress
from peagle.runs.rows import require_storable
from pipelines.batch.config import GenerateConfig
from pipelines.batch.engine_job import EngineJob
from pipelines.batch.metrics import RunMetrics
from pipelines.batch.resolve import ResolvedRun
from pipelines.batch.session import Admission, work_by_unit
from pipelines.batch.supervision import Supervisor
from pipelines.batch.worker import EngineWorker
from pipelines.cluster import ray as cluster
from pipelines.cluster.failures import explain
from pipelines.cluster.placement import PREPARE_CPUS

_POLL_S = 1.0
_GRACE = "running units have --grace-s to be committed"
_LOGS = "the run's logs/ folder says more; the same command continues it"


def stream(
    run: RunDirectory,
    plan: Plan,
    units: Sequence[WorkUnit],
    resolved: ResolvedRun,
    supervisor: Supervisor,
    progress: RunProgress,
    metrics: RunMetrics,
    lost: threading.Event,
) -> None:
    """Generate and commit `units`; returns when all are committed.

    Args:
        metrics: updated with committed units and with what the supervisor sees.
        lost: set when another driver takes over the run; then the directory is not changed any more.

    Raises:
        StoppedEarly, TooManyFailedRows, EngineError: decided by the supervisor.
        RunInUse: `lost` was set.
        InputError: a planned unit could not be committed.
    """
    require_storable(plan.schema)
    receipts = _Receipts(lambda: _dataset(run, plan, units, resolved))
    try:
        _watch(run, receipts, resolved, supervisor, progress, metrics, lost)
        progress.show(supervisor.tally, final=True)
    finally:
        progress.close()
    run.stop.clear()
    if not run.committed() >= {unit.unit for unit in plan.units}:
        raise supervisor.error()


def _watch(
    run: RunDirectory,
    receipts: "_Receipts",
    resolved: ResolvedRun,
    supervisor: Supervisor,
    progress: RunProgress,
    metrics: RunMetrics,
    lost: threading.Event,
) -> None:
    """Watch until the dataset ends or is abandoned."""
    looked_at = -math.inf
    for usage in _until_broken(receipts, supervisor):
        if usage is not None:
            supervisor.tally.add(usage)
            metrics.committed(usage)
        if time.monotonic() - looked_at < _POLL_S:
            continue
        if lost.is_set():
            cluster.abandon()
            raise taken_over(run.root)
        looked_at, before = time.monotonic(), supervisor.ending
        _observe(supervisor)
        metrics.look(supervisor.tally, supervisor.sessions)
        _tell_warnings(supervisor, progress)
        progress.show(supervisor.tally)
        drafted = supervisor.tally.speculation
        if watch := resolved.drafter_watch:
            for note in watch.new(num_drafts=drafted.num_drafts, acceptance_length=drafted.acceptance_length):
                progress.say(note)
        if supervisor.ending is not None and before is None:
            progress.say(f"stopping: {supervisor.ending.message}\n{_GRACE}")
        if supervisor.ending is not None and supervisor.gives_up:
            cluster.abandon()
            break
    supervisor.observe()
    metrics.look(supervisor.tally, supervisor.sessions)
    _tell_warnings(supervisor, progress)


def _tell_warnings(supervisor: Supervisor, progress: RunProgress) -> None:
    for warning in supervisor.new_warnings():
        progress.say(as_told(warning))


def _until_broken(receipts: "_Receipts", supervisor: Supervisor) -> Iterator[UnitUsage | None]:
    """Yield receipts, until they break off while the run is stopped: the signal may have ended Ray as well."""
    try:
        yield from receipts
    except PeagleError:
        cluster.require_alive()
        _observe(supervisor)
        if supervisor.ending is None or supervisor.ending.error is not StoppedEarly:
            raise
        cluster.abandon()


def _observe(supervisor: Supervisor) -> None:
    """Let the supervisor observe the run. If it fails, abandon Ray, because engines are still working."""
    try:
        supervisor.observe()
    except (PeagleError, OSError):
        cluster.abandon()
        raise


def _dataset(run: RunDirectory, plan: Plan, units: Sequence[WorkUnit], resolved: ResolvedRun) -> Any:
    """Pieces of the plan -> prepared units -> receipts.

    A unit is one row and one block.
    """
    import ray
    from ray.data import ActorPoolStrategy, TaskPoolStrategy

    cluster.keep_rows_apart()
    cluster.scale_with_the_queue()
    pieces = chunks(longest_first(units))
    prepare_job, engine_job = _jobs(run, plan, resolved)
    calls = min(len(units), calls_per_engine(plan.cut, engine_job.num_slots))
    engines = resolved.config.engine_range
    return (
        ray.data.from_items(
            [{"units": "\n".join(map(unit_to_json, piece))} for piece in pieces], override_num_blocks=len(pieces)
        )
        .map_batches(
            prepare_units,
            batch_size=None,
            batch_format="pyarrow",
            # One for each engine: 400,000 prompt tokens/s (AMD EPYC, 2026-11-22).
            compute=TaskPoolStrategy(engines.largest),
            num_cpus=PREPARE_CPUS,
            fn_kwargs={"job": prepare_job},
        )
        .map_batches(
            EngineWorker,
            batch_size=None,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(
                min_size=engines.smallest,
                max_size=engines.largest,
                initial_size=engines.at_start(cluster.room_for(resolved.placement), len(units), calls),
                max_concurrent_calls_per_actor=calls,
                max_tasks_in_flight_per_actor=calls + 1,
            ),
            **resolved.placement.options,
            fn_constructor_args=(engine_job,),
        )
    )


def _jobs(run: RunDirectory, plan: Plan, resolved: ResolvedRun) -> tuple[PrepareJob, EngineJob]:
    config, placement, drafter = resolved.config, resolved.placement, resolved.spec.drafter
    prepare_job = PrepareJob(
        run_dir=str(run),
        driver=run.driver,
        model=resolved.tokenizer,
        revision=resolved.spec.revision,
        prompts=resolved.prompts,
        sampling=resolved.sampling,
        schema=plan.schema,
    )
    engine_job = EngineJob(
        run_dir=str(run),
        driver=run.driver,
        slot_group=resolved.slot_group or run.manifest()["run_id"],
        spec=resolved.spec,
        facts=EngineFacts.priced(
            resolved.price,
            model=resolved.model.name,
            drafter=resolved.drafter.name,
            num_devices=placement.num_devices,
            device=placement.device,
            tags=tags_to_text(config.tags),
            num_speculative_tokens=drafter.num_speculative_tokens if drafter else None,
            baseline=resolved.baseline,
            is_stand_in=config.engine == "fake",
        ),
        sampling=dict(resolved.sampling.base),
        fake=config.fake if config.engine == "fake" else None,
        row_timeout_s=config.row_timeout_s,
        engine_timeout_s=config.engine_timeout_s,
        num_engines_on_node=placement.num_engines_on_node,
        part=placement.part,
        heartbeat_s=config.heartbeat_s,
        admission=_admission(run, plan, config),
        lender=resolved.lender,
    )
    return prepare_job, engine_job


def _admission(run: RunDirectory, plan: Plan, config: GenerateConfig) -> Admission | None:
    """Return the admission for a varying number of engines; with a fixed number, each loads at once."""
    engines = config.engine_range
    if engines.fixed is not None:
        return None
    return Admission(
        num_engines=engines.smallest,
        work=work_by_unit(plan),
        sessions_before=frozenset(session.session_id for session in run.sessions()),
        heartbeat_s=config.heartbeat_s,
    )


class _Receipts:
    """Runs a dataset in a thread, so that the driver can show progress and be interrupted."""

    def __init__(self, dataset: Callable[[], Any]) -> None:
        self._queue: queue.Queue[UnitUsage | BaseException | None] = queue.Queue()
        self._dataset = dataset
        threading.Thread(target=self._consume, daemon=True).start()

    def __iter__(self) -> Iterator[UnitUsage | None]:
        """Yield the usage of each committed unit, and None at least every second."""
        while True:
            try:
                item = self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                yield None
                continue
            if item is None:
                return
            if not isinstance(item, UnitUsage):
                raise explain(item, "the run broke off", hint=_LOGS, otherwise=EngineError) from item
            yield item

    def _consume(self) -> None:
        try:
            for row in self._dataset().iter_rows():
                if row["usage"] is not None:
                    self._queue.put(UnitUsage.from_json(row["usage"]))
            self._queue.put(None)
        except BaseException as error:  # it belongs to the driver's thread
            self._queue.put(error)
