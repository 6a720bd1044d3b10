"""A bulk run, from its request to its report.

`decide.py` resolves the request, `streaming.py` moves units through Ray Data, and `worker.py` generates rows.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from peagle import provenance
from peagle.economics.price_options import billed_hardware, require_same_price
from peagle.economics.prices import Price
from peagle.economics.tags import tags_to_text
from peagle.private import user_path
from peagle.runs.budget_draws import TagBudgets
from peagle.runs.directory import RunDirectory
from peagle.runs.export import Export, export
from peagle.runs.lease import hold_lease
from peagle.runs.logs import copy_log
from peagle.runs.plan import Plan, WorkUnit
from peagle.runs.prepare import plan_retry
from peagle.runs.progress import RunProgress
from peagle.runs.report import make_report
from peagle.signals import signals_as_interrupts, stop_on_signal
from pipelines.batch.decide import decide, replan
from pipelines.batch.metrics import RunMetrics
from pipelines.batch.request import BY_SIGNAL, RunRequest
from pipelines.batch.resolve import ResolvedRun
from pipelines.batch.streaming import stream
from pipelines.batch.supervision import Supervisor, require_few_failures
from pipelines.cluster import ray as ray_cluster
from pipelines.cluster.connection import Connection, connection


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run.

    Attributes:
        report: as in `report.json`.
        export: None means Parquet, the format of the units.
    """

    report: dict[str, Any]
    was_already_finished: bool = False
    export: Export | None = None


def generate(request: RunRequest, progress: RunProgress) -> Outcome:
    """Start a bulk run, or continue the run in the same directory.

    Raises:
        ConfigError: invalid configuration; nothing was started.
        RunInUse: another driver holds the run.
        CapacityError: the engines do not fit on the cluster.
        EngineError: an engine failed to start or crashed; committed units are kept.
        TooManyFailedRows: more dead letters than allowed.
        StoppedEarly: a signal, the budget or the deadline; the error names the command that continues the run.
    """
    with stoppable(request), contextlib.closing(progress), connection() as cluster:
        progress.enter("planning")
        resolved = decide(request, cluster, progress.say)
        with open_run(request, resolved, progress) as run:
            units = run.plan.remaining_units(run.directory.committed())
            if units:
                execute(request, run, units, cluster, progress)
            return finish(request, run, was_already_finished=not units)


@contextlib.contextmanager
def stoppable(request: RunRequest) -> Iterator[None]:
    """Raise an error if a signal arrives while no engine is running.

    Raises:
        StoppedEarly: names the command that continues the run.
    """
    with signals_as_interrupts(), ray_cluster.recording_exit_code():
        try:
            yield
        except KeyboardInterrupt:
            raise request.stopped_before_engines(BY_SIGNAL) from None


# --- open


@contextlib.contextmanager
def open_run(request: RunRequest, run: ResolvedRun, progress: RunProgress) -> Iterator[ResolvedRun]:
    """Acquire the lease, and create or continue the run. Yields the run with its stored plan.

    Raises:
        RunInUse: another driver holds the run.
        ConfigError: the directory contains a different run.
    """
    with hold_lease(
        run.directory.root,
        expiry_s=request.config.lease_s,
        heartbeat_s=request.config.heartbeat_s,
        command=request.command,
        announce=progress.say,
    ) as lease:
        run.directory.hold(lease)
        plan = create_or_continue(request, run)
        if request.config.retry_failed:
            plan = _add_retries(run.directory, plan, progress)
        yield replace(run, plan=plan)


def create_or_continue(request: RunRequest, run: ResolvedRun) -> Plan:
    """Create the run directory, or check that it belongs to this run.

    Returns:
        The plan with the stored units, which another driver might have planned.
    """
    directory = run.directory
    if not directory.exists and directory.create(manifest(request, run), run.plan):
        return run.plan
    # If another driver created the run, its plan might have different units, and only the stored plan is valid.
    stored_manifest, current_plan = directory.manifest(), replan(request, directory)
    provenance.require_same_fingerprint(
        stored_manifest["fingerprint"], run.fingerprint(current_plan.corpus_fingerprint), str(directory)
    )
    # Only batches of the endpoint have a slot group. They keep their price even if the endpoint's has changed.
    if run.slot_group is None:
        require_same_price(
            run.config,
            run.price,
            run.hardware,
            before=Price.from_dict(stored_manifest["price"]),
            recorded_options=stored_manifest["config"],
            machine=billed_hardware(stored_manifest["run"]["hardware"]),
        )
    directory.open()
    return directory.with_retries(current_plan)  # the stored units, with the current paths of the corpus


def manifest(request: RunRequest, run: ResolvedRun) -> dict[str, Any]:
    """Return `run.json` of a new run."""
    drafter, drafter_watch, baseline = run.spec.drafter, run.drafter_watch(), run.baseline
    return {
        "schema": provenance.SCHEMA,
        "keeps_inputs": True,  # input columns keep their names
        "run_id": f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}",
        "created_at": time.time(),
        "command": list(request.command),
        "served_name": request.served_name,
        "config": run.config.model_dump(mode="json"),
        "fingerprint": run.fingerprint(run.plan.corpus_fingerprint),
        "engine": run.spec.to_dict(),
        "price": run.price.to_dict(),
        "git_revision": provenance.git_revision(),
        "run": {
            "model": run.model.name,
            "drafter": run.drafter.name,
            "num_speculative_tokens": drafter.num_speculative_tokens if drafter else None,
            "precision": run.precision.describe(),
            "concurrency": run.spec.max_num_seqs,
            "break_even_acceptance_length": drafter_watch.break_even_length if drafter_watch else None,
            "baseline": asdict(baseline) if baseline else None,
            "num_engines": run.config.engine_range.fixed,
            "sampling": run.config.sampling(),
            # Free memory would make equal machines look different.
            "hardware": {k: v for k, v in run.hardware.to_dict().items() if k != "free_memory_gib"},
            "versions": provenance.versions(),
        },
    }


def _add_retries(directory: RunDirectory, plan: Plan, progress: RunProgress) -> Plan:
    plan_with_retries = plan_retry(directory, plan)
    retry_units = plan_with_retries.units[len(plan.units) :]
    if retry_units:
        progress.say(f"failed rows to retry: {sum(unit.num_rows for unit in retry_units)}")
    else:
        progress.say("there are no failed rows to retry")
    return plan_with_retries


# --- execute


def execute(
    request: RunRequest, run: ResolvedRun, units: Sequence[WorkUnit], cluster: Connection, progress: RunProgress
) -> None:
    """Generate and commit `units`, then disconnect from the cluster.

    Raises:
        CapacityError: the engines do not fit on the cluster.
        PeagleError: see `stream`.
    """
    directory = run.directory
    log = directory.logs / "driver.log"
    with contextlib.ExitStack() as stack:
        supervisor = stack.enter_context(contextlib.closing(Supervisor(request, run, _tag_budgets(run))))
        supervisor.require_within_limits()
        stack.enter_context(copy_log(directory.root, log, f"driver-{directory.driver}.log"))
        stack.enter_context(contextlib.closing(cluster))
        cluster.log_to(log)
        progress.enter("starting Ray")
        cluster.start()
        with stop_on_signal(request.stop, message=request.killed_message):
            ray_cluster.require_capacity(
                run.placement,
                run.config.engine_range.smallest,
                wait_s=run.config.cluster_wait_s,
                check=supervisor.require_within_limits,
                announce=progress.say,
            )
            ray_cluster.release_nodes()  # from now on, the engines request nodes
            progress.enter("loading" if run.spec.enforce_eager else "loading and compiling")
            stream(run, units, supervisor, progress, RunMetrics(request, run))


def _tag_budgets(run: ResolvedRun) -> TagBudgets | None:
    """Return the budgets that the run shares with the endpoint `draw_on` through its tags; None without `draw_on`."""
    config = run.config
    if config.draw_on is None:
        return None
    ledger = user_path(config.draw_on) / "ledger"
    return TagBudgets(ledger, run.directory.manifest()["run_id"], tags_to_text(config.tags))


# --- finish


def finish(request: RunRequest, run: ResolvedRun, *, was_already_finished: bool) -> Outcome:
    """Write the report and the export of a run whose units are all committed.

    Also called for a run that was already finished, since its driver might have been killed before it wrote them.

    Raises:
        TooManyFailedRows: more rows failed than allowed; report and export are written anyway.
        RunInUse: another driver has taken over.
    """
    directory = run.directory
    directory.remove_leftovers()
    directory.require_lease()
    report = make_report(directory)
    directory.require_lease()
    outcome = Outcome(report=report, was_already_finished=was_already_finished, export=_export(run))
    require_few_failures(report, directory, request)
    return outcome


def _export(run: ResolvedRun) -> Export | None:
    output_format = run.config.output_format
    if output_format == "auto":
        output_format = "openai-batch" if run.plan.is_batch else "parquet"
    return None if output_format == "parquet" else export(run.directory, output_format, force=False)
