"""A bulk run, from its configuration to its report.

    config -> hardware -> resolved run -> plan -> Ray Data -> committed units -> report

This is the driver. It decides, streams and reports; it touches no row, so its memory grows with units and not with
rows. What happens to rows is in `worker.py`.
"""

import contextlib
import math
import os
import queue
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from peagle import errors, hardware
from peagle.economics.usage import UnitUsage
from peagle.errors import EngineError, PeagleError, StoppedEarly
from pipelines.batch import cluster, manifest
from pipelines.batch.config import GenerateConfig
from pipelines.batch.plan import Plan, WorkUnit, make_plan, unit_to_row
from pipelines.batch.progress import Progress, Tally
from pipelines.batch.quiet import QuietStderr
from pipelines.batch.reporting import make_report
from pipelines.batch.resolve import ResolvedRun, resolve
from pipelines.batch.rundir import RunDirectory
from pipelines.batch.worker import EngineJob, EngineWorker, PrepareJob, prepare_unit

_POLL_S = 1.0
_LOGS = "the run's logs/ folder says more; the same command continues it"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        report: as in `report.json`.
        did_nothing: the run was finished before.
    """

    report: dict[str, Any]
    did_nothing: bool = False


def generate(config: GenerateConfig, progress: Progress, *, command: Sequence[str]) -> Outcome:
    """Start a bulk run, or continue the unfinished one in the same directory.

    Args:
        command: the command line, for `run.json`.

    Raises:
        ConfigError: bad usage; nothing was started.
        CapacityError: the cluster can never hold the engines.
        EngineError: an engine did not start or died; what is committed stays.
        StoppedEarly: interrupted; the same command continues.
    """
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(_stop_on_signal())
        quiet = stack.enter_context(QuietStderr())
        run = RunDirectory(config.output)
        plan = run.plan() if run.exists else make_plan(config)
        is_remote = bool(os.environ.get("RAY_ADDRESS"))
        if is_remote:
            stack.enter_context(cluster.ray_cluster())
        here = cluster.inspect() if is_remote else hardware.detect()
        resolved = resolve(
            config,
            here,
            plan.schema.names,
            num_nodes=cluster.num_nodes() if is_remote else 1,
            announce=progress.say,
        )
        progress.say(_announcement(resolved, plan))
        plan = _open(run, plan, resolved, command)
        committed = run.committed()
        units = [unit for unit in plan.units if unit.unit not in committed]
        if not units:
            return Outcome(report=make_report(run), did_nothing=True)
        quiet.move_to(run.logs / "driver.log")
        if not is_remote:
            stack.enter_context(cluster.ray_cluster())
        cluster.require_capacity(
            resolved.placement, config.engines, wait_s=config.cluster_wait_s, announce=progress.say
        )
        _stream(run, plan, units, resolved, progress, stop)
    run.remove_orphans()
    return Outcome(report=make_report(run))


def _announcement(resolved: ResolvedRun, plan: Plan) -> str:
    where = f"{resolved.hardware.describe()}, {resolved.precision.describe()}"
    return (
        f"{plan.num_rows} rows; {resolved.model.name} on {where}\n"
        f"drafter: {_drafter(resolved)} ({resolved.drafter.note})"
    )


def _drafter(resolved: ResolvedRun) -> str:
    drafter = resolved.spec.drafter
    return f"{resolved.drafter.name}, K={drafter.num_speculative_tokens}" if drafter else "none"


def _open(run: RunDirectory, plan: Plan, resolved: ResolvedRun, command: Sequence[str]) -> Plan:
    """Create the run directory, or make sure that it holds this very run."""
    if not run.exists:
        run.create(_manifest(resolved, plan, command), plan)
        return plan
    current = make_plan(resolved.config.model_copy(update={"rows_per_unit": plan.rows_per_unit}))
    manifest.require_same(run.manifest()["fingerprint"], resolved.fingerprint(current.corpus_fingerprint), str(run))
    run.open()
    return current  # the same units, at the paths where the corpus is now


def _manifest(resolved: ResolvedRun, plan: Plan, command: Sequence[str]) -> dict[str, Any]:
    drafter = resolved.spec.drafter
    return {
        "schema": manifest.SCHEMA,
        "run_id": f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}",
        "created_at": time.time(),
        "command": list(command),
        "config": resolved.config.model_dump(mode="json"),
        "fingerprint": resolved.fingerprint(plan.corpus_fingerprint),
        "engine": resolved.spec.to_dict(),
        "price": resolved.price.to_dict(),
        "git_revision": manifest.git_revision(),
        "run": {
            "model": resolved.model.name,
            "drafter": resolved.drafter.name,
            "num_speculative_tokens": drafter.num_speculative_tokens if drafter else None,
            "precision": resolved.precision.describe(),
            "concurrency": resolved.spec.max_num_seqs,
            "num_engines": resolved.config.engines,
            "sampling": resolved.config.sampling(),
            "hardware": resolved.hardware.to_dict(),
            "versions": manifest.versions(),
        },
    }


# --- streaming units through Ray Data


def _stream(
    run: RunDirectory,
    plan: Plan,
    units: Sequence[WorkUnit],
    resolved: ResolvedRun,
    progress: Progress,
    stop: threading.Event,
) -> None:
    """Generate and commit `units`; returns when all are committed."""
    tally = Tally(num_rows_planned=plan.num_rows, price=resolved.price)
    for earlier in run.usages():
        tally.add(earlier, before=True)
    started_at = time.time()
    receipts = _Receipts(lambda: _dataset(run, plan, units, resolved))
    try:
        for usage in receipts.until(stop):
            if usage is not None:
                tally.add(usage)
            tally.observe(run.sessions(), started_at)
            progress.show(tally)
        progress.show(tally, final=True)
    finally:
        progress.close()
    if stop.is_set():
        done = len(run.committed())
        raise StoppedEarly(
            f"stopped with {done} of {len(plan.units)} units committed",
            hint="the same command continues the run",
        )


def _dataset(run: RunDirectory, plan: Plan, units: Sequence[WorkUnit], resolved: ResolvedRun) -> Any:
    """units -> prepared units -> receipts; one unit is one block throughout."""
    import ray
    from ray.data import ActorPoolStrategy, DataContext, ExecutionOptions

    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = None  # a unit must stay one block, however long its rows are
    context.execution_options = ExecutionOptions(preserve_order=False)
    rows_per_unit = units[0].span.num_rows
    calls = min(len(units), math.ceil(2 * resolved.spec.max_num_seqs / rows_per_unit) + 1)
    prepare_job, engine_job = _jobs(run, plan, resolved)
    return (
        ray.data.from_items([unit_to_row(unit) for unit in units], override_num_blocks=len(units))
        .map_batches(
            prepare_unit,
            batch_size=None,
            batch_format="pyarrow",
            num_cpus=cluster.PREPARE_CPUS,
            fn_kwargs={"job": prepare_job},
        )
        .map_batches(
            EngineWorker,
            batch_size=None,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(
                size=resolved.config.engines,
                max_concurrent_calls_per_actor=calls,
                max_tasks_in_flight_per_actor=calls + 1,
            ),
            num_cpus=resolved.placement.num_cpus,
            num_gpus=resolved.placement.num_gpus or None,
            fn_constructor_args=(engine_job,),
        )
    )


def _jobs(run: RunDirectory, plan: Plan, resolved: ResolvedRun) -> tuple[PrepareJob, EngineJob]:
    config, placement = resolved.config, resolved.placement
    prepare_job = PrepareJob(
        model=resolved.tokenizer,
        prompts=resolved.prompts,
        max_model_len=resolved.max_model_len,
        schema=plan.schema,
    )
    sampling = {**config.sampling(), "stop": list(config.stop) or None}
    engine_job = EngineJob(
        run_dir=str(run),
        run_id=run.manifest()["run_id"],
        spec=resolved.spec,
        model=resolved.model.name,
        drafter=resolved.drafter.name,
        sampling=sampling,
        backend=config.engine,
        num_devices=placement.num_devices,
        device=placement.device,
        num_engines_on_node=placement.num_engines_on_node,
        heartbeat_s=config.heartbeat_s,
    )
    return prepare_job, engine_job


class _Receipts:
    """Runs a dataset in a thread, so that the driver can draw, be interrupted and give up at any moment."""

    def __init__(self, dataset: Callable[[], Any]) -> None:
        self._queue: queue.Queue[UnitUsage | BaseException | None] = queue.Queue()
        self._dataset = dataset
        threading.Thread(target=self._consume, daemon=True).start()

    def until(self, stop: threading.Event) -> Iterator[UnitUsage | None]:
        """Usages as units commit, and None once in a while; ends with the dataset or at `stop`."""
        while not stop.is_set():
            try:
                item = self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                yield None
                continue
            if item is None:
                return
            if isinstance(item, UnitUsage):
                yield item
            else:
                raise _explain(item) from item

    def _consume(self) -> None:
        try:
            for row in self._dataset().iter_rows():
                if row["committed"]:
                    self._queue.put(UnitUsage.from_json(row["usage"]))
            self._queue.put(None)
        except BaseException as error:  # it belongs to the driver's thread
            self._queue.put(error)


def _explain(error: BaseException) -> PeagleError:
    """The error of ours that lies at the bottom of what Ray made of it; else Ray's, in short.

    Ray Data keeps the cause of a failed actor as an exception, that of a failed task only in the traceback's text.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PeagleError):
            return cause
        cause = getattr(cause, "cause", None) or cause.__cause__
    named = re.findall(r"^peagle\.errors\.(\w+): (.*)$", str(error), re.MULTILINE)
    if named:
        kind, message = named[-1]
        return getattr(errors, kind)(message, hint=_LOGS)  # type: ignore[no-any-return]
    last = str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
    return EngineError(f"the run broke off: {last}", hint=_LOGS)


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[threading.Event]:
    """SIGINT and SIGTERM ask for a stop; elsewhere than in the main thread they are left as they are."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
