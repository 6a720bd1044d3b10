"""Validate, run and collect batches in Ray actors on any node.

Each run has its own actor; validations and collections reuse idle actors. `collect` writes the results.

A batch is run as a bulk run, and its output and error files are the run's export. If it ends early, the error file also
has the requests that were not executed, as at OpenAI. When the ingress dies, Ray ends its actors and their engines,
and the next ingress resumes the runs.
"""

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from rich.console import Console

from peagle.corpus.lines import Lines, open_span
from peagle.economics.account import account
from peagle.economics.prices import Price
from peagle.economics.tags import tags_to_text
from peagle.economics.usage import EngineSession, RequestUsage, UnitUsage
from peagle.errors import PeagleError, StoppedEarly
from peagle.private import restrict_new_files
from peagle.requests.openai import error_line
from peagle.runs import progress
from peagle.runs.directory import RunDirectory
from peagle.runs.export import Export, export
from peagle.runs.meter import is_lent
from peagle.runs.report import make_report
from peagle.storage import atomic_file, open_to_read, storage_path
from pipelines.batch import run
from pipelines.batch.config import GenerateConfig
from pipelines.batch.request import Allowance, RunRequest
from pipelines.cluster.failures import to_peagle_error
from pipelines.cluster.placement import Neighbours
from pipelines.online.batches.lent import EndpointLender
from pipelines.online.batches.validation import BatchRules, CheckedInput, check_input

_UsageOrSession = TypeVar("_UsageOrSession", UnitUsage, EngineSession)

Reason = str
"""Why a batch ended early: a key of `UNEXECUTED_MESSAGES`."""
BUDGET: Reason = "insufficient_quota"
KEY_REVOKED: Reason = "key_revoked"
MODEL_WITHDRAWN: Reason = "model_not_allowed"
UNEXECUTED_MESSAGES: Mapping[Reason, str] = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was not executed: the batch was cancelled.",
    "batch_failed": "This request was not executed: the batch failed.",
    BUDGET: "This request was not executed: a budget that the batch counts toward is spent.",
    KEY_REVOKED: "This request was not executed: the key of the batch was revoked, or has expired.",
    MODEL_WITHDRAWN: "This request was not executed: the key of the batch may no longer use its model.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTask:
    """Everything a process needs to work on a batch."""

    batch_id: str
    # owner, account: name and account of the batch's key
    owner: str
    account: str
    model: str  # served name of the model
    # input, run, errors: paths of the input file, the run directory and the error file
    input: str
    run: str
    errors: str
    # config, commits: configuration and model revisions of a new run; a resumed run keeps its own
    config: Mapping[str, Any]
    neighbours: Neighbours | None  # other engines on the same nodes
    lender: EndpointLender | None = None  # provides the endpoint's engines; None if the run starts its own
    commits: Mapping[str, str] = field(default_factory=dict)
    budget_usd: float | None = None  # limit for the cost that is not yet in the endpoint's ledger; None is unlimited


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """The result of a batch."""

    reason: Reason | None  # why the batch ended early, or None
    num_completed: int
    num_failed: int  # includes requests that were not executed
    output: tuple[str, int] | None  # path and size in bytes of the output file; None if empty
    errors: int  # size in bytes of the error file
    usage: UnitUsage | None  # usage of all requests; None if nothing ran
    # usage and cost of the batch's own engines for the endpoint's ledger; None if nothing ran
    record: RequestUsage | None


class RunCounts(progress.RunProgress):
    """Records the latest counts of a run, and prints nothing."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))
        self.num_completed = self.num_failed = 0
        self.usd = 0.0

    def show(self, tally: progress.Tally, *, final: bool = False) -> None:
        self.num_completed, self.num_failed, self.usd = tally.num_rows, tally.num_failed_rows, tally.usd


def run_batch(task: BatchTask, stop: "StopRequest", counts: RunCounts, allowance: Allowance) -> BatchResult:
    """Run or resume a batch, and collect its results. A requested stop is not an error."""
    directory = RunDirectory(task.run)
    # A resumed run keeps its configuration, even if the endpoint's has changed.
    config = dict(directory.manifest()["config"]) if directory.exists else dict(task.config)
    config |= {"input": task.input, "output": task.run, "budget_usd": task.budget_usd}
    if task.lender is not None:  # a single process can fill all slots of the endpoint's engines
        config["engines"] = "1"
    # The ledger of the endpoint already contains the cost in borrowed engines.
    recorded_usd = _usd(directory, lent=True) if directory.exists else 0.0
    allowance.usd = None if task.budget_usd is None else recorded_usd + task.budget_usd
    request = RunRequest(
        config=GenerateConfig(**config),
        command=["POST", "/v1/batches", task.batch_id],
        stop=stop.event,
        neighbours=task.neighbours,
        lender=task.lender,
        commits=task.commits,
        served_name=task.model,
        allowance=allowance,
    )
    try:
        run.generate(request, counts)
    except StoppedEarly:
        if stop.reason is None and task.budget_usd is None:
            raise
        return collect(task, stop.reason or BUDGET)
    return collect(task, None)


class StopRequest:
    """A request to end a run early, with its reason."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.reason: Reason | None = None

    def request(self, reason: Reason) -> None:
        self.reason = reason
        self.event.set()


def collect(task: BatchTask, reason: Reason | None) -> BatchResult:
    """Export the results of a run, and write the error file of its batch."""
    directory = RunDirectory(task.run)
    exported = export(directory, "openai-batch", partial=True, force=False) if directory.exists else None
    num_unexecuted, num_bytes = _write_errors(task, directory, exported, reason)
    output_bytes = exported.files["output.jsonl"] if exported and exported.num_rows else 0
    return BatchResult(
        reason=reason,
        num_completed=exported.num_rows if exported else 0,
        num_failed=(exported.num_failed_rows if exported else 0) + num_unexecuted,
        output=("export/openai-batch/output.jsonl", output_bytes) if output_bytes else None,
        errors=num_bytes,
        usage=_usage(task, directory.usages()) if exported else None,
        record=_record(task, directory, reason) if exported else None,
    )


def _write_errors(
    task: BatchTask, directory: RunDirectory, exported: Export | None, reason: Reason | None
) -> tuple[int, int]:
    """Write the error file unless it would be empty. Returns the number of unexecuted requests and the file's size."""
    failed = storage_path(exported.folder) / "errors.jsonl" if exported and exported.num_failed_rows else None
    unexecuted = _unexecuted(task, directory) if reason else iter(())
    next_id = next(unexecuted, None)
    if failed is None and next_id is None:
        return 0, 0
    target, num_unexecuted = storage_path(task.errors), 0
    with atomic_file(target) as file:
        if failed is not None:
            with open_to_read(failed) as lines:
                shutil.copyfileobj(lines, file)
        while next_id is not None and reason is not None:
            dead_letter = {"id": next_id, "reason": reason, "message": UNEXECUTED_MESSAGES[reason]}
            line = error_line(dead_letter, custom_id=next_id, run_id=task.batch_id)
            file.write(json.dumps(line).encode() + b"\n")
            num_unexecuted += 1
            next_id = next(unexecuted, None)
    return num_unexecuted, target.stat().st_size


def _unexecuted(task: BatchTask, directory: RunDirectory) -> Iterator[str]:
    """Yield the `custom_id`s of all requests that are not in a committed unit."""
    if not directory.exists:
        with contextlib.closing(Lines(task.input)) as lines:
            yield from _custom_ids(lines)
        return
    committed = directory.committed()
    for work_unit in directory.plan().units:
        if work_unit.unit not in committed:
            with open_span(replace(work_unit.span, path=task.input)) as lines:
                yield from _custom_ids(lines)


def _custom_ids(lines: Lines) -> Iterator[str]:
    for line in lines:
        if line.strip():
            yield json.loads(line)["custom_id"]


def _record(task: BatchTask, directory: RunDirectory, reason: Reason | None) -> RequestUsage:
    """Return the run's usage and cost in its own engines, as one record billed to the key.

    The record covers all seconds of these engines. Borrowed engines write their own records.
    """
    make_report(directory)
    manifest = directory.manifest()
    return RequestUsage(
        request_id=task.batch_id,
        key=task.owner,
        account=task.account,
        model=task.model,
        drafter=manifest["run"]["drafter"],
        tags=tags_to_text(manifest["config"].get("tags") or {}),
        outcome="cut" if reason else "ok",
        ttft_s=None,
        usd=_usd(directory, lent=False),
        usage=_usage(task, _in_engines(directory.usages(), lent=False)),
    )


def _usage(task: BatchTask, usages: Iterable[UnitUsage]) -> UnitUsage:
    now = time.time()
    no_usage = UnitUsage.empty(task.batch_id, started_at=now, finished_at=now)
    return sum((replace(usage, session_id=task.batch_id) for usage in usages), start=no_usage)


def _usd(directory: RunDirectory, *, lent: bool) -> float:
    """Return the run's cost in borrowed engines (`lent`) or in its own engines."""
    usages, sessions = _in_engines(directory.usages(), lent=lent), _in_engines(directory.sessions(), lent=lent)
    return account(usages, sessions, Price.from_dict(directory.manifest()["price"])).total_usd


def _in_engines(records: Iterable[_UsageOrSession], *, lent: bool) -> Iterator[_UsageOrSession]:
    return (record for record in records if is_lent(record.session_id) is lent)


_Result = TypeVar("_Result")


class Runner:
    """Starts an actor for each run. Validations and collections reuse an idle actor if there is one.

    Starting another process would take seconds of CPU time, too much for tiny batches.
    """

    def __init__(self) -> None:
        self._idle: list[Any] = []

    def check(self, path: str, rules: BatchRules) -> "Handle[CheckedInput]":
        return Handle(self._idle_or_new_actor(), "check", path, rules, idle=self._idle)

    def run(self, task: BatchTask) -> "Handle[BatchResult]":
        return Handle(_new_actor(), "run", task)

    def collect(self, task: BatchTask, reason: Reason) -> "Handle[BatchResult]":
        return Handle(self._idle_or_new_actor(), "collect", task, reason, idle=self._idle)

    def _idle_or_new_actor(self) -> Any:
        return self._idle.pop() if self._idle else _new_actor(niceness=10)


def _new_actor(niceness: int = 0) -> Any:
    import ray

    options = {"num_cpus": 0, "max_concurrency": 3, "max_restarts": 0}  # the work, `counts` and `stop` run concurrently
    return ray.remote(BatchActor).options(**options).remote(niceness)


class BatchActor:
    """A process for work on batches. `niceness` lowers its CPU priority."""

    def __init__(self, niceness: int) -> None:
        os.nice(niceness)
        restrict_new_files()
        self._stop, self._counts, self._allowance = StopRequest(), RunCounts(), Allowance(usd=None)

    def check(self, path: str, rules: BatchRules) -> CheckedInput:
        return check_input(path, rules)

    def run(self, task: BatchTask) -> BatchResult:
        return run_batch(task, self._stop, self._counts, self._allowance)

    def collect(self, task: BatchTask, reason: Reason) -> BatchResult:
        return collect(task, reason)

    def stop(self, reason: Reason) -> None:
        self._stop.request(reason)

    def set_cost_limit(self, usd: float | None) -> None:
        self._allowance.usd = usd

    def counts(self) -> tuple[int, int, float]:
        return self._counts.num_completed, self._counts.num_failed, self._counts.usd


class Handle(Generic[_Result]):
    """A method call in an actor. Afterwards the actor joins `idle` if that is an empty list; otherwise it is killed."""

    def __init__(self, actor: Any, method: str, *arguments: Any, idle: list[Any] | None = None) -> None:
        self._actor, self._idle = actor, idle
        self._pending_result = getattr(actor, method).remote(*arguments)
        self._pending_counts: Any = None

    def poll(self) -> _Result | None:
        """Return the result, or None while the method is running. Raises PeagleError if the method failed."""
        import ray

        if not ray.wait([self._pending_result], timeout=0)[0]:
            return None
        try:
            result: _Result = ray.get(self._pending_result)
        except Exception as error:
            self.kill()
            raise to_peagle_error(error, "the work on the batch failed", hint="", otherwise=PeagleError) from error
        if self._idle == []:
            self._idle.append(self._actor)
        else:
            self.kill()
        return result

    def counts(self) -> tuple[int, int, float] | None:
        """Return completed requests, failed requests and cost in US dollars; None until known."""
        import ray

        self._pending_counts = self._pending_counts or self._actor.counts.remote()
        if not ray.wait([self._pending_counts], timeout=0)[0]:
            return None
        pending, self._pending_counts = self._pending_counts, None
        try:
            counts: tuple[int, int, float] = ray.get(pending)
        except ray.exceptions.RayError:  # the actor died; poll() raises the reason
            return None
        return counts

    def stop(self, reason: Reason) -> None:
        self._actor.stop.remote(reason)

    def set_cost_limit(self, usd: float | None) -> None:
        """Change the run's cost limit; None is unlimited."""
        self._actor.set_cost_limit.remote(usd)

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)
