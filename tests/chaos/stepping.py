"""`peagle generate` in a process that stops itself (SIGSTOP) at chosen durable steps, with its engine.

A step is any change of the run directory. An audit hook of the interpreter sees every link, rename, deletion and new
folder below it, and every PUT, POST and DELETE to S3, so new steps in the code are found automatically. Ray is left
out: a driver is forked from this process, which has loaded everything, and takes part of a second.
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
_UNIQUE = re.compile(r"[0-9a-f]{12,32}|\d{8}T\d{6}-[0-9a-f]{8}|(?<=\d\.)[0-9a-f]{8}(?=\.jsonl)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps at which a driver stops.

    Attributes:
        under: part of the names of files in the run directory.
        of_renewals: count only the steps of the thread that renews the lease, instead of all others.
        log: file that gets each step at which it stopped.
    """

    at: frozenset[int]
    under: str
    log: Path
    of_renewals: bool = False

    def install(self) -> None:
        """Let this process stop at these steps from now on."""
        sink = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        count, counting = 0, threading.Lock()

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            if (step := self._step(event, arguments)) is None:
                return
            with counting:
                count += 1
                if count in self.at:
                    os.write(sink, f"{step}\n".encode())
                    os.kill(os.getpid(), signal.SIGSTOP)

        sys.addaudithook(hook)

    def _step(self, event: str, arguments: tuple[Any, ...]) -> str | None:
        """Return the step that an event is, or None."""
        if event in _CHANGES:
            what, where = event.removeprefix("os."), os.fspath(arguments[event in ("os.link", "os.rename")])
        elif event == "http.client.send" and bytes(arguments[1][:8]).startswith(_REQUESTS):
            what, where = bytes(arguments[1]).decode(errors="replace").split(" ", 2)[:2]
        else:
            return None
        if self.under not in str(where) or self._is_renewal() != self.of_renewals:
            return None
        return f"{what} {_UNIQUE.sub('ID', str(where).partition(self.under)[2].partition('?')[0]) or '/'}"

    def _is_renewal(self) -> bool:
        """Whether this thread renews the lease or sends heartbeats. These steps come at random moments."""
        name = threading.current_thread().name
        return "(_renew)" in name or "(_keep_beating)" in name


class Driver:
    """A driver, forked from this process.

    Args:
        log: file for its output.
        refused: ids of rows that its engine refuses.
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
        """Return True when it stops itself, False when it has ended."""
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
    """Run the driver; does not return."""
    code = 70
    try:
        sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        _replace_ray(refused)
        if steps is not None:
            steps.install()
        code = cli.run(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _replace_ray(refused: frozenset[int]) -> None:
    """Run the engine actor and the stage before it in this process, with a short lease."""
    taken = lease._take
    cluster.ray_cluster = lambda **_: contextlib.nullcontext()
    for name in ("require_capacity", "release_nodes", "abandon"):
        setattr(cluster, name, lambda *_, **__: None)
    streaming._dataset = _InProcess
    session.redirect_output = lambda _: None
    lease._take = lambda root, _, *rest: taken(root, LEASE_S, *rest)
    answer = FakeEngine.generate

    async def generate(self: FakeEngine, request_id: str, *rest: Any) -> Any:
        if int(request_id.partition("-")[0]) in refused:
            raise RequestRefused("not today")
        return await answer(self, request_id, *rest)

    FakeEngine.generate = generate


class _InProcess:
    """Replaces the dataset: prepares, generates and commits each unit in the driver's receipt thread."""

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


def forked(check: Callable[[], list[str]], answer: Path) -> list[str]:
    """Return the result of `check` from a fork, so that this process never has threads or connections."""
    pid = os.fork()
    if pid == 0:
        try:
            answer.write_text("\n".join(check()))
        except BaseException as error:
            answer.write_text(f"the audit broke off: {type(error).__name__}: {error}")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return answer.read_text().splitlines()
