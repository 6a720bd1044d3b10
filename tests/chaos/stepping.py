"""Run `peagle generate` in a process that stops itself (SIGSTOP) at chosen durable steps.

A step is any change in the run directory. Python's audit hook reports every link, rename, deletion and new folder in
it, and every PUT, POST and DELETE to S3, so steps that are added to the code are noticed automatically. Drivers do not
use Ray, and run the fake engine in their own process. They are forked from this process, which has imported everything,
so a driver takes only a fraction of a second.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import cli
from peagle.engine.fake import FakeEngine
from peagle.engine.interface import RequestRefused
from peagle.runs import lease
from peagle.runs.plan import WorkUnit
from peagle.runs.prepare import prepare_unit
from peagle.runs.rows import encode_rows
from pipelines.batch import session, streaming
from pipelines.batch.resolve import ResolvedRun
from pipelines.batch.worker import EngineWorker
from pipelines.cluster import ray as cluster

LEASE_S = 0.4
_CHANGES = ("os.link", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
_REQUESTS = (b"PUT ", b"POST ", b"DELETE ")
# The parts of paths that differ from run to run, such as session names.
_UNIQUE = re.compile(r"[0-9a-f]{12,32}|\d{8}T\d{6}-[0-9a-f]{8}|(?<=\d\.)[0-9a-f]{8}(?=\.jsonl)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps at which a driver stops.

    Attributes:
        at: numbers of the steps, from 1.
        under: text that is in the path or URL of every file in the run directory.
        at_renewals: True counts only the steps of lease renewals and heartbeats; False counts only the others.
        log: file that lists the steps at which a driver stopped.
    """

    at: frozenset[int]
    under: str
    log: Path
    at_renewals: bool = False

    def install(self) -> None:
        """Make this process stop at these steps from now on."""
        log_descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        count, count_lock = 0, threading.Lock()

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            if (step := self._step(event, arguments)) is None:
                return
            with count_lock:
                count += 1
                if count in self.at:
                    os.write(log_descriptor, f"{step}\n".encode())
                    os.kill(os.getpid(), signal.SIGSTOP)

        sys.addaudithook(hook)

    def _step(self, event: str, arguments: tuple[Any, ...]) -> str | None:
        """Describe the step of an audit event; return None if the event is not a step."""
        if event in _CHANGES:
            action, path = event.removeprefix("os."), os.fspath(arguments[event in ("os.link", "os.rename")])
        elif event == "http.client.send" and bytes(arguments[1][:8]).startswith(_REQUESTS):
            action, path = bytes(arguments[1]).decode(errors="replace").split(" ", 2)[:2]
        else:
            return None
        if self.under not in str(path) or self._is_renewal() != self.at_renewals:
            return None
        return f"{action} {_UNIQUE.sub('ID', str(path).partition(self.under)[2].partition('?')[0]) or '/'}"

    def _is_renewal(self) -> bool:
        """Return whether this thread renews the lease or sends heartbeats, whose steps occur at random times."""
        name = threading.current_thread().name
        return "(_renew)" in name or "(_keep_beating)" in name


class Driver:
    """A driver that was forked from this process.

    Args:
        log: file for the driver's output.
        refused: ids of rows that the driver's engine refuses.
    """

    def __init__(
        self, arguments: Sequence[str], log: Path, *, steps: Steps | None = None, refused: frozenset[int] = frozenset()
    ) -> None:
        self._log = log
        self.pid = os.fork()
        if self.pid == 0:
            _drive(arguments, log, steps, refused)
        self.exit_code: int | None = None

    def wait(self) -> bool:
        """Wait until the driver stops itself (return True) or has ended (return False)."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            return True
        self.exit_code = os.waitstatus_to_exitcode(status)
        return False

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        if self.exit_code is None:
            os.kill(self.pid, signal.SIGKILL)
            while self.wait():
                pass

    def read_output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""


def _drive(arguments: Sequence[str], log: Path, steps: Steps | None, refused: frozenset[int]) -> None:
    """Run the driver in the forked process, and exit."""
    code = 70  # if the driver raises an exception
    try:
        log_descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log_descriptor, 1)
        os.dup2(log_descriptor, 2)
        _replace_ray(refused)
        if steps is not None:
            steps.install()
        code = cli.run(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _replace_ray(refused: frozenset[int]) -> None:
    """Make the driver run its stages in this process, with a short lease."""
    original_acquire = lease._acquire
    cluster.ray_cluster = lambda **_: contextlib.nullcontext()
    for name in ("require_capacity", "release_nodes", "abandon"):
        setattr(cluster, name, lambda *_, **__: None)
    streaming._dataset = _InProcessDataset
    session.redirect_output = lambda _: None
    lease._acquire = lambda root, _, *rest: original_acquire(root, LEASE_S, *rest)
    original_generate = FakeEngine.generate

    async def generate(self: FakeEngine, request_id: str, *rest: Any) -> Any:
        if int(request_id.partition("-")[0]) in refused:
            raise RequestRefused("refused by the test")
        return await original_generate(self, request_id, *rest)

    FakeEngine.generate = generate


class _InProcessDataset:
    """A replacement for the Ray dataset: each unit is prepared, generated and committed in the thread that iterates."""

    def __init__(self, run: ResolvedRun, units: Sequence[WorkUnit]) -> None:
        self._units, self._run = units, run

    def iter_rows(self) -> Iterator[dict[str, Any]]:
        loop = asyncio.new_event_loop()
        worker = EngineWorker(self._run.for_stages())
        builder = self._run.request_builder()
        for unit in self._units:
            prepared = encode_rows(prepare_unit(unit, self._run.plan.schema, builder))
            yield from loop.run_until_complete(self._receipts(worker, prepared))
        worker._session.end()

    async def _receipts(self, worker: EngineWorker, batch: Any) -> list[dict[str, Any]]:
        return [row async for table in worker(batch) for row in table.to_pylist()]


def run_in_fork(check: Callable[[], list[str]], result_file: Path) -> list[str]:
    """Run `check` in a fork and return its result, so that this process, which forks again, has no threads."""
    pid = os.fork()
    if pid == 0:
        try:
            result_file.write_text("\n".join(check()))
        except BaseException as error:
            result_file.write_text(f"the check crashed: {type(error).__name__}: {error}")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return result_file.read_text().splitlines()
