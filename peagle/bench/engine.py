"""An engine that is up for a measurement: its log, its failures, its memory.

Its prints go to a file of their own; a failure to start is told by its cause.

It knows neither Ray nor HTTP: the engine runs in this process, so that a GPU host needs vLLM and nothing else.

An engine's memory on a CPU is the resident memory of this process and everything below it (pages that two of them share
count twice); on a GPU it is what the driver says is in use, less what was before the first engine started. vLLM fills a
GPU up to `gpu_memory_utilization` with its KV cache, so there the figure says what it took, not what it needed.
"""

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from peagle.catalog.int8 import converted_spec
from peagle.catalog.local import fetched_spec
from peagle.engine.interface import Engine
from peagle.engine.self_check import require_passed, self_check
from peagle.engine.spec import EngineSpec
from peagle.engine.startup import as_told
from peagle.engine.vllm_internals import costly_warnings, with_root_cause
from peagle.errors import EngineError
from peagle.hardware import Hardware
from peagle.quiet import QuietStderr

Result = TypeVar("Result")
Start = Callable[[EngineSpec, Hardware], Engine]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementListener:
    """Who is told what happens: sentences, and responses done of how many."""

    say: Callable[[str], None] = lambda message: None
    progress: Callable[[int, int], None] = lambda done, total: None


def with_engine(
    spec: EngineSpec,
    hardware: Hardware,
    start: Start,
    log: Path,
    use: Callable[[Engine, float], Coroutine[Any, Any, Result]],
) -> Result:
    """Start an engine, check its answers, use it, and shut it down.

    Args:
        start: starts an engine.
        log: where the engine prints to; what earlier ones printed there stays.
        use: is given the engine, and what it took to start in seconds.

    Raises:
        EngineError: it did not start, did not pass its self-check, or died.
        PeagleError: its head could not be fetched, or its target not be converted to INT8.
    """
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for the table
    with QuietStderr() as quiet:
        quiet.move_to(log)
        began_at, started = log.stat().st_size, time.monotonic()
        try:
            engine = start(converted_spec(fetched_spec(spec)), hardware)
        except EngineError as error:
            raise with_root_cause(error, read_from(log, began_at)) from error
        start_s = time.monotonic() - started
        for warning in costly_warnings(read_from(log, began_at)):
            _warn(quiet, warning)

        return asyncio.run(_used(engine, spec, hardware, quiet, lambda: use(engine, start_s)))


async def _used(
    engine: Engine, spec: EngineSpec, hardware: Hardware, quiet: QuietStderr, use: Callable[[], Awaitable[Result]]
) -> Result:
    """vLLM has tasks in the loop that it was used in, so it is shut down there too."""
    try:
        engine.self_check = await self_check(engine.checkable, spec, hardware)
        if engine.self_check.outcome == "skipped":
            _warn(quiet, engine.self_check.describe())
        require_passed(engine.self_check)
        return await use()
    finally:
        engine.shutdown()


def _warn(quiet: QuietStderr, warning: str) -> None:
    quiet.tell(as_told(warning))


def read_from(log: Path, position: int) -> str:
    """The text printed to a log after a position."""
    with log.open("rb") as file:
        file.seek(position)
        return file.read().decode(errors="replace")


class Measuring(Protocol):
    """A measurement by one command, part by part."""

    @property
    def done(self) -> Mapping[Any, Any]:
        """The parts that are finished, by this command and earlier ones."""

    def measure(self) -> None:
        """Do the others."""

    def write_report(self) -> dict[str, Any]:
        """Write the report of everything measured so far to the folder."""


def reported(run: Measuring, root: Path, listener: MeasurementListener, *, parts: str) -> dict[str, Any]:
    """Measure, and write the report.

    Args:
        root: the folder that holds it.
        parts: what they are called: "cells".

    Raises:
        BaseException: whatever ended it, an interrupt, too; the report of the parts that were finished is there.
    """
    try:
        run.measure()
    except BaseException:
        if run.done:
            run.write_report()
            listener.say(f"report of the finished {parts}: {root / 'report.md'}")
        raise
    return run.write_report()


_GIB = 1024**3
_EVERY_S = 1.0


class PeakMemory:
    """The largest reading between enter and exit.

    Args:
        read: memory in GiB; None where it cannot be told.
    """

    def __init__(self, read: Callable[[], float | None], every_s: float = _EVERY_S) -> None:
        self._read, self._every_s = read, every_s
        self.gib: float | None = None

    def __enter__(self) -> Self:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._ended.wait(self._every_s):
            self._look()

    def _look(self) -> None:
        found = self._read()
        if found is not None:
            self.gib = max(found, self.gib or 0.0)


def memory_reader(hardware: Hardware) -> Callable[[], float | None]:
    """A reader of this hardware's memory, made before the first engine starts."""
    if hardware.platform == "cpu":
        return tree_rss_gib
    before = device_gib()

    def read() -> float | None:
        now = device_gib()
        return None if now is None or before is None else max(now - before, 0.0)

    return read


def tree_rss_gib(pid: int | None = None, proc: Path = Path("/proc")) -> float | None:
    """Resident memory of a process and all below it; of this one where none is named.

    None without a `/proc`.
    """
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    parents: dict[int, int] = {}
    pages: dict[int, int] = {}
    for stat in proc.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        process = int(stat.parent.name)
        parents[process], pages[process] = int(fields[1]), int(fields[21])
    root = os.getpid() if pid is None else pid
    if root not in pages:
        return None
    return sum(pages[process] for process in _tree(root, parents)) * page_bytes / _GIB


def device_gib() -> float | None:
    """Memory in use on all GPUs, None where the driver does not say."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return sum(float(line) for line in answer.split()) / 1024
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _tree(root: int, parents: dict[int, int]) -> list[int]:
    """A process and all below it."""
    found = [root]
    for process in found:  # grows while it is walked
        found += [child for child, parent in parents.items() if parent == process and child != process]
    return found
