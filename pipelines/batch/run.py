"""A bulk run, from its configuration to its report.

    config -> hardware -> resolved run -> plan -> units through Ray Data -> report

It decides and reports; `streaming.py` moves the units, and what happens to rows is in `worker.py`.
"""

import contextlib
import functools
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peagle import provenance
from peagle.catalog.targets import NO_COMMITS
from peagle.economics.price_options import machine_of, require_same_price
from peagle.economics.prices import Price
from peagle.engine.spec import EngineSpec
from peagle.engine_options import DEFAULT_MAX_NUM_SEQS
from peagle.errors import ConfigError
from peagle.quiet import QuietStderr
from peagle.runs.directory import RunDirectory
from peagle.runs.export import Export, export
from peagle.runs.lease import hold_lease
from peagle.runs.limits import Limits
from peagle.runs.logs import copied
from peagle.runs.plan import Plan, make_plan
from peagle.runs.prepare import plan_retry
from peagle.runs.progress import Progress
from peagle.runs.report import make_report
from peagle.signals import interrupted_by_signal, stop_on_signal
from pipelines.batch.config import GenerateConfig
from pipelines.batch.resolve import ResolvedRun, hardware_for, resolve
from pipelines.batch.streaming import stream
from pipelines.batch.supervision import (
    BY_SIGNAL,
    Supervisor,
    limits_of,
    require_few_failures,
    require_time,
    stopped_at_once,
    stopped_before_engines,
)
from pipelines.cluster import ray as cluster
from pipelines.cluster.placement import Neighbours

_NO_RUN = "leave --retry-failed out to start one"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        report: as in `report.json`.
        did_nothing: the run was finished before.
        export: the rows in the form that was asked for; None where that is the units themselves.
    """

    report: dict[str, Any]
    did_nothing: bool = False
    export: Export | None = None


def generate(
    config: GenerateConfig,
    progress: Progress,
    *,
    command: Sequence[str],
    stop: threading.Event | None = None,
    neighbours: Neighbours | None = None,
    commits: Mapping[str, str] = NO_COMMITS,
    served_name: str | None = None,
) -> Outcome:
    """Start a bulk run, or continue the unfinished one in the same directory.

    Args:
        command: the command line, for `run.json`.
        stop: asks it to stop when it is set; signals do so too.
        neighbours: engines of others that share the nodes.
        commits: by hub id, of the engine that a new run's is to equal; a run that is there keeps its own.
        served_name: what the model of a new run is called in its answers in OpenAI's form; None is its own name.

    Raises:
        ConfigError: bad usage; nothing was started.
        RunInUse: another driver is at work in the same directory.
        CapacityError: the cluster can never hold the engines.
        EngineError: an engine did not start or died; what is committed stays.
        TooManyFailedRows: more dead letters than the user allows.
        StoppedEarly: a signal, the budget or the deadline; the error names the command that continues.
    """
    with interrupted_by_signal(), cluster.exit_code_kept():
        try:
            return _generate(
                config,
                progress,
                command=command,
                stop=stop or threading.Event(),
                neighbours=neighbours,
                commits=commits,
                served_name=served_name,
            )
        except KeyboardInterrupt:
            raise stopped_before_engines(BY_SIGNAL, command) from None


def _generate(
    config: GenerateConfig,
    progress: Progress,
    *,
    command: Sequence[str],
    stop: threading.Event,
    neighbours: Neighbours | None,
    commits: Mapping[str, str],
    served_name: str | None,
) -> Outcome:
    limits = limits_of(config)
    with contextlib.ExitStack() as held, contextlib.ExitStack() as stack:
        quiet = stack.enter_context(QuietStderr())
        run = RunDirectory(config.output)
        run.require_usable()
        run.require_own()
        if config.retry_failed and not run.exists:
            raise ConfigError(f"{run} holds no run whose failed rows could be taken up again", hint=_NO_RUN)
        is_remote = cluster.is_remote()
        if config.nodes_per_engine > 1 and not is_remote:
            raise ConfigError(
                f"nodes_per_engine {config.nodes_per_engine}: RAY_ADDRESS names no cluster, so there is one node",
                hint="set RAY_ADDRESS to a cluster's address, or leave --nodes-per-engine out",
            )
        if not is_remote:
            cluster.require_startable()
        else:
            stack.enter_context(cluster.ray_cluster())
            stack.callback(cluster.release_nodes)
        plan = _plan_without_looking(run, config)
        check = functools.partial(require_time, limits, stop, command)
        here = neighbours.hardware if neighbours else hardware_for(run, config, check=check, announce=progress.say)
        plan = plan or make_plan(config, max_num_seqs=DEFAULT_MAX_NUM_SEQS[here.platform])
        resolved = resolve(
            config,
            here,
            plan.schema.names,
            is_batch=plan.is_batch,
            num_nodes=cluster.num_nodes(
                here,
                num_engines=config.engine_range.smallest,
                accelerators_per_engine=config.accelerators_per_engine,
                nodes_per_engine=config.nodes_per_engine,
                accelerator_type=config.accelerator_type,
            )
            if is_remote
            else 1,
            neighbours=neighbours,
            commits=EngineSpec.from_dict(run.manifest()["engine"]).commits if run.exists else commits,
            announce=progress.say,
        )
        progress.say(_announcement(resolved, plan))
        if resolved.tuned:
            for note in resolved.tuned.at_start(_concurrency(resolved, plan)):
                progress.say(note)
        lease = held.enter_context(
            hold_lease(
                run.root,
                expiry_s=config.lease_s,
                heartbeat_s=config.heartbeat_s,
                command=command,
                announce=progress.say,
            )
        )
        run.hold(lease)
        plan = _open(run, plan, resolved, command, served_name)
        if config.retry_failed:
            plan = _retry(run, plan, progress)
        units = plan.left(run.committed())
        if not units:
            # Leftovers may be there of a driver that was killed between the last commit and its own end.
            return _finish(run, plan, config, limits, command, did_nothing=True)
        supervisor = Supervisor(run, plan, resolved, limits, stop, command=command)
        supervisor.require_room()
        log = run.logs / "driver.log"
        stack.enter_context(copied(run.root, log, f"driver-{lease.number}.log"))
        quiet.move_to(log)
        if not is_remote:
            stack.enter_context(cluster.ray_cluster())
        stack.enter_context(stop_on_signal(stop, last_words=stopped_at_once(command)))
        cluster.require_capacity(
            resolved.placement,
            config.engine_range.smallest,
            wait_s=config.cluster_wait_s,
            check=supervisor.require_room,
            announce=progress.say,
        )
        cluster.release_nodes()  # from here on it is the engines that need them
        stream(run, plan, units, resolved, supervisor, progress, lease.lost)
        stack.close()  # the rest needs no cluster
        return _finish(run, plan, config, limits, command)


def _finish(
    run: RunDirectory,
    plan: Plan,
    config: GenerateConfig,
    limits: Limits,
    command: Sequence[str],
    *,
    did_nothing: bool = False,
) -> Outcome:
    """The account and the export of a run whose units are all committed.

    Raises:
        TooManyFailedRows: more of its rows failed than the user allows; both are made all the same.
        RunInUse: another driver has taken over.
    """
    run.remove_leftovers()
    run.require_lease()
    report = make_report(run)
    run.require_lease()
    outcome = Outcome(report=report, did_nothing=did_nothing, export=_export(run, plan, config))
    require_few_failures(report, run, limits, command)
    return outcome


def _plan_without_looking(run: RunDirectory, config: GenerateConfig) -> Plan | None:
    """The plan where it does not depend on what the nodes are; None where it does.

    A wrong input is told before accelerators are waited for.
    """
    if run.exists:
        return run.plan()
    return make_plan(config, max_num_seqs=DEFAULT_MAX_NUM_SEQS["cuda"]) if config.accelerator_type else None


def _export(run: RunDirectory, plan: Plan, config: GenerateConfig) -> Export | None:
    output_format = config.output_format
    if output_format == "auto":
        output_format = "openai-batch" if plan.is_batch else "parquet"
    return None if output_format == "parquet" else export(run, output_format, again=False)


def _announcement(resolved: ResolvedRun, plan: Plan) -> str:
    where = f"{resolved.hardware.describe()}, {resolved.precision.describe()}"
    return (
        f"{plan.num_rows} rows; {resolved.model.name} on {where}\n"
        f"drafter: {_drafter(resolved)} ({resolved.drafter.note})"
    )


def _concurrency(resolved: ResolvedRun, plan: Plan) -> int:
    """Requests in an engine at once, as many as it takes and there are rows for."""
    rows_per_engine = math.ceil(plan.num_rows / resolved.config.engine_range.smallest)
    return min(resolved.spec.max_num_seqs, rows_per_engine)


def _drafter(resolved: ResolvedRun) -> str:
    drafter = resolved.spec.drafter
    return f"{resolved.drafter.name}, K={drafter.num_speculative_tokens}" if drafter else "none"


def _open(
    run: RunDirectory, plan: Plan, resolved: ResolvedRun, command: Sequence[str], served_name: str | None = None
) -> Plan:
    """Create the run directory, or require that it holds this very run.

    Returns the plan that counts.

    Another driver may have created it until now, whatever the lease says: then its plan counts.

    Args:
        plan: made, or read, before this driver had the lease.
    """
    if not run.exists and run.create(_manifest(resolved, plan, command, served_name), plan):
        return plan
    # `plan` may be of this driver's own cut, if another created the run in between: only what is written down counts.
    written, before = run.plan(), run.manifest()
    current = make_plan(resolved.config, written.cut, like=written.corpus_fingerprint)
    provenance.require_same(before["fingerprint"], resolved.fingerprint(current.corpus_fingerprint), str(run))
    if resolved.places is None:  # else the endpoint's price, which may have changed since, and a batch keeps its own
        require_same_price(
            resolved.config,
            resolved.price,
            resolved.hardware,
            before=Price.from_dict(before["price"]),
            keys_before=before["config"],
            machine=machine_of(before["run"]["hardware"]),
        )
    run.open()
    return run.with_retries(current)  # the same units, at the paths where the corpus is now


def _retry(run: RunDirectory, plan: Plan, progress: Progress) -> Plan:
    with_retry = plan_retry(run, plan)
    added = with_retry.units[len(plan.units) :]
    if added:
        progress.say(f"{sum(unit.num_rows for unit in added)} failed rows are taken up again")
    else:
        progress.say("there is no failed row to take up again")
    return with_retry


def _manifest(
    resolved: ResolvedRun, plan: Plan, command: Sequence[str], served_name: str | None = None
) -> dict[str, Any]:
    drafter = resolved.spec.drafter
    return {
        "schema": provenance.SCHEMA,
        "run_id": f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}",
        "created_at": time.time(),
        "command": list(command),
        "served_name": served_name,
        "config": resolved.config.model_dump(mode="json"),
        "fingerprint": resolved.fingerprint(plan.corpus_fingerprint),
        "engine": resolved.spec.to_dict(),
        "price": resolved.price.to_dict(),
        "tuned": resolved.tuned.to_dict(_concurrency(resolved, plan)) if resolved.tuned else None,
        "git_revision": provenance.git_revision(),
        "run": {
            "model": resolved.model.name,
            "drafter": resolved.drafter.name,
            "num_speculative_tokens": drafter.num_speculative_tokens if drafter else None,
            "precision": resolved.precision.describe(),
            "concurrency": resolved.spec.max_num_seqs,
            "num_engines": resolved.config.engine_range.fixed,
            "sampling": resolved.config.sampling(),
            # What is free at the moment is no property of the machine, and would tell equal machines apart.
            "hardware": {k: v for k, v in resolved.hardware.to_dict().items() if k != "free_memory_gib"},
            "versions": provenance.versions(),
        },
    }
