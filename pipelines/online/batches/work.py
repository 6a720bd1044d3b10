"""The work on a batch: run it in bulk, and collect what came of it.

In a process of its own; it schedules nothing.

The output and error files are the run's own export; what was not executed when a batch ends early is added to the
errors, as OpenAI has it.
"""

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rich.console import Console

from peagle.corpus.lines import Lines, lines_of
from peagle.economics.account import account
from peagle.economics.prices import Price
from peagle.economics.tags import tags_to_text
from peagle.economics.usage import EngineSession, RequestUsage, UnitUsage
from peagle.errors import StoppedEarly
from peagle.requests.openai import error_line
from peagle.runs import progress
from peagle.runs.directory import RunDirectory
from peagle.runs.export import Export, export
from peagle.runs.meter import is_lent
from peagle.runs.report import make_report
from peagle.storage import atomic_file, open_to_read, place
from pipelines.batch import run
from pipelines.batch.config import GenerateConfig
from pipelines.batch.request import Allowance, RunRequest
from pipelines.cluster.placement import Neighbours
from pipelines.online.batches.lent import EndpointLender

_Record = TypeVar("_Record", UnitUsage, EngineSession)

Reason = str
"""Why a batch ends early: a code of `UNEXECUTED`."""
BUDGET: Reason = "insufficient_quota"
KEY_REVOKED: Reason = "key_revoked"
MODEL_WITHDRAWN: Reason = "model_not_allowed"
UNEXECUTED: Mapping[Reason, str] = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was not executed: the batch was cancelled.",
    "batch_failed": "This request was not executed: the batch failed.",
    BUDGET: "This request was not executed: a budget that pays for it is spent.",
    KEY_REVOKED: "This request was not executed: the key of the batch was revoked, or has expired.",
    MODEL_WITHDRAWN: "This request was not executed: the key of the batch may not use its model any more.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of a process that works on a batch.

    Attributes:
        owner: name of the key.
        account: of the key; its budget pays.
        model: what clients call it.
        input, run, errors: where they are, or are to be.
        config, commits: of the run, if it is not there already: then it has its own.
        lender: lends its engine; None where it has engines of its own.
        budget_usd: what the run may cost beyond what the endpoint's ledger has of it; None is no limit.
    """

    batch_id: str
    owner: str
    account: str
    model: str
    input: str
    run: str
    errors: str
    config: Mapping[str, Any]
    neighbours: Neighbours | None
    lender: EndpointLender | None = None
    commits: Mapping[str, str] = field(default_factory=dict)
    budget_usd: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a batch.

    Attributes:
        reason: why it ended early; None if every request was executed.
        output, errors: sizes in bytes of the files that are not empty; `output` with where it is.
        usage: of all its requests; None where nothing was run.
        record: for the endpoint's ledger: what engines of its own used and cost; None where nothing was run.
    """

    reason: Reason | None
    num_completed: int
    num_failed: int
    output: tuple[str, int] | None
    errors: int
    usage: UnitUsage | None
    record: RequestUsage | None


class Counts(progress.RunProgress):
    """The progress of a run as three numbers, for whoever asks."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))
        self.num_completed = self.num_failed = 0
        self.usd = 0.0

    def show(self, tally: progress.Tally, *, final: bool = False) -> None:
        """Remember the present state."""
        self.num_completed, self.num_failed, self.usd = tally.num_rows, tally.num_failed_rows, tally.usd


def run_batch(task: Task, stop: "Stop", counts: Counts, allowance: Allowance) -> Result:
    """Run a batch, or continue it, and collect what came of it.

    Args:
        allowance: what it may cost, which may change.

    Raises:
        PeagleError: what ends a bulk run before its time, but for a stop.
    """
    directory = RunDirectory(task.run)
    # A run that is there has its own keys, whatever the endpoint was started with since.
    config = dict(directory.manifest()["config"]) if directory.exists else dict(task.config)
    config |= {"input": task.input, "output": task.run, "budget_usd": task.budget_usd}
    if task.lender is not None:  # one process asks for as many rows as there are slots
        config["engines"] = "1"
    billed_usd = _usd(directory, lent=True) if directory.exists else 0.0
    allowance.usd = None if task.budget_usd is None else billed_usd + task.budget_usd
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


class Stop:
    """The word that ends a run, and why."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.reason: Reason | None = None

    def ask(self, reason: Reason) -> None:
        """Stop."""
        self.reason = reason
        self.event.set()


def collect(task: Task, reason: Reason | None) -> Result:
    """Collect a batch's files and figures as far as it came, run or not.

    Raises:
        PeagleError: a file of the run is damaged, or cannot be written.
    """
    directory = RunDirectory(task.run)
    exported = export(directory, "openai-batch", partial=True, again=False) if directory.exists else None
    num_unexecuted, num_bytes = _write_errors(task, directory, exported, reason)
    output_bytes = exported.files["output.jsonl"] if exported and exported.num_rows else 0
    return Result(
        reason=reason,
        num_completed=exported.num_rows if exported else 0,
        num_failed=(exported.num_failed_rows if exported else 0) + num_unexecuted,
        output=("export/openai-batch/output.jsonl", output_bytes) if output_bytes else None,
        errors=num_bytes,
        usage=_usage(task, directory.usages()) if exported else None,
        record=_record(task, directory, reason) if exported else None,
    )


def _write_errors(
    task: Task, directory: RunDirectory, exported: Export | None, reason: Reason | None
) -> tuple[int, int]:
    """Write the error file, if it has lines.

    Returns the requests not executed, and its bytes.
    """
    failed = place(exported.folder) / "errors.jsonl" if exported and exported.num_failed_rows else None
    unexecuted = _unexecuted(task, directory) if reason else iter(())
    first = next(unexecuted, None)
    if failed is None and first is None:
        return 0, 0
    target, num_unexecuted = place(task.errors), 0
    with atomic_file(target) as file:
        if failed is not None:
            with open_to_read(failed) as lines:
                shutil.copyfileobj(lines, file)
        while first is not None and reason is not None:
            letter = {"id": first, "reason": reason, "message": UNEXECUTED[reason]}
            line = error_line(letter, custom_id=first, run_id=task.batch_id)
            file.write(json.dumps(line).encode() + b"\n")
            num_unexecuted += 1
            first = next(unexecuted, None)
    return num_unexecuted, target.stat().st_size


def _unexecuted(task: Task, directory: RunDirectory) -> Iterator[str]:
    """The `custom_id`s of the requests that are in no committed unit."""
    if not directory.exists:
        with contextlib.closing(Lines(task.input)) as lines:
            yield from _custom_ids(lines)
        return
    committed = directory.committed()
    for unit in directory.plan().units:
        if unit.unit not in committed:
            with lines_of(replace(unit.span, path=task.input)) as lines:
                yield from _custom_ids(lines)


def _custom_ids(lines: Lines) -> Iterator[str]:
    for line in lines:
        if line.strip():
            yield json.loads(line)["custom_id"]


def _record(task: Task, directory: RunDirectory, reason: Reason | None) -> RequestUsage:
    """Record what the run used of engines of its own, as one request of the key.

    They were started for it, so their every second counts. The endpoint's engines have recorded what it used of them.
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
        usage=_usage(task, _of_sessions(directory.usages(), lent=False)),
    )


def _usage(task: Task, usages: Iterable[UnitUsage]) -> UnitUsage:
    now = time.time()
    nothing = UnitUsage.empty(task.batch_id, started_at=now, finished_at=now)
    return sum((replace(usage, session_id=task.batch_id) for usage in usages), start=nothing)


def _usd(directory: RunDirectory, *, lent: bool) -> float:
    """The price of a run's own engines, or of those that were lent."""
    usages, sessions = _of_sessions(directory.usages(), lent=lent), _of_sessions(directory.sessions(), lent=lent)
    return account(usages, sessions, Price.from_dict(directory.manifest()["price"])).total_usd


def _of_sessions(records: Iterable[_Record], *, lent: bool) -> Iterator[_Record]:
    return (one for one in records if is_lent(one.session_id) is lent)
