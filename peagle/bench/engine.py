"""Run an engine for a measurement, with its log, its failures and its memory.

The engine runs in this process, so that a GPU host only needs vLLM.

Memory on a CPU is the resident memory of this process and its descendants; shared pages count twice. On a GPU it is the
memory in use according to the driver, minus the memory in use before the first engine started. vLLM fills a GPU up to
`gpu_memory_utilization` with KV cache, so on a GPU this is what vLLM reserves, not what it needs.
"""

import asyncio
import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from peagle.bench.prompts import BenchPrompt
from peagle.catalog.int8 import converted_spec
from peagle.catalog.local import fetched_spec
from peagle.engine.interface import Engine, Generation, RequestRefused
from peagle.engine.self_check import require_passed, self_check
from peagle.engine.spec import EngineSpec
from peagle.engine.startup import format_start_warning
from peagle.engine.vllm_internals import costly_warnings, with_root_cause
from peagle.errors import EngineError
from peagle.hardware import Hardware
from peagle.quiet import QuietStderr
from peagle.speculation import SpeculationStats

Result = TypeVar("Result")
Start = Callable[[EngineSpec, Hardware], Engine]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementListener:
    say: Callable[[str], None] = lambda message: None
    progress: Callable[[int, int], None] = lambda done, total: None


def with_engine(
    spec: EngineSpec,
    hardware: Hardware,
    start: Start,
    log: Path,
    use: Callable[[Engine, float], Coroutine[Any, Any, Result]],
) -> Result:
    """Start an engine, run its self-check, use it, and shut it down.

    Args:
        use: called with the engine and its start time in seconds.
    """
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # keep standard output for the tables
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

        return asyncio.run(_use(engine, spec, hardware, quiet, lambda: use(engine, start_s)))


async def _use(
    engine: Engine, spec: EngineSpec, hardware: Hardware, quiet: QuietStderr, use: Callable[[], Awaitable[Result]]
) -> Result:
    # Shut the engine down in the same event loop, because vLLM has tasks in it.
    try:
        engine.self_check = await self_check(engine.checkable, spec, hardware)
        if engine.self_check.outcome == "skipped":
            _warn(quiet, engine.self_check.describe())
        require_passed(engine.self_check)
        return await use()
    finally:
        engine.shutdown()


def _warn(quiet: QuietStderr, warning: str) -> None:
    quiet.tell(format_start_warning(warning))


def read_from(log: Path, position: int) -> str:
    with log.open("rb") as file:
        file.seek(position)
        return file.read().decode(errors="replace")


def reported(run: Any, root: Path, listener: MeasurementListener, *, parts: str) -> dict[str, Any]:
    """Measure and write the report, also after an error or interrupt."""
    try:
        run.measure()
    except BaseException:
        if run.done:
            run.write_report()
            listener.say(f"report of the finished {parts}: {root / 'report.md'}")
        raise
    report: dict[str, Any] = run.write_report()
    return report


_GIB = 1024**3
_EVERY_S = 1.0


class PeakMemory:
    """The largest reading between enter and exit."""

    def __init__(self, read: Callable[[], float | None], every_s: float = _EVERY_S) -> None:
        self._read, self._every_s = read, every_s
        self.gib: float | None = None

    def __enter__(self) -> Self:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self._update()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._update()

    def _watch(self) -> None:
        while not self._ended.wait(self._every_s):
            self._update()

    def _update(self) -> None:
        gib = self._read()
        if gib is not None:
            self.gib = max(gib, self.gib or 0.0)


def memory_reader(hardware: Hardware) -> Callable[[], float | None]:
    """Return a function that reads memory in use. Call this before the first engine starts."""
    if hardware.platform == "cpu":
        return tree_rss_gib
    before = device_gib()

    def read() -> float | None:
        now = device_gib()
        return None if now is None or before is None else max(now - before, 0.0)

    return read


def tree_rss_gib(pid: int | None = None, proc: Path = Path("/proc")) -> float | None:
    """Return the resident memory of a process (default: this one) and its descendants; None without `/proc`."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    parents: dict[int, int] = {}
    pages: dict[int, int] = {}
    for stat in proc.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # the process has exited
            continue
        process = int(stat.parent.name)
        parents[process], pages[process] = int(fields[1]), int(fields[21])
    root = os.getpid() if pid is None else pid
    if root not in pages:
        return None
    return sum(pages[process] for process in _tree(root, parents)) * page_bytes / _GIB


def device_gib() -> float | None:
    """Return the memory in use on all GPUs; None if the driver does not report it."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return sum(float(line) for line in answer.split()) / 1024
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _tree(root: int, parents: dict[int, int]) -> list[int]:
    processes = [root]
    for process in processes:  # grows during the iteration
        processes += [child for child, parent in parents.items() if parent == process and child != process]
    return processes


_WARM_UP_TOKENS = 8
# vLLM returns a response before it updates its counters.
_COUNTERS_SETTLE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    generation: Generation
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The result of one pass over all prompts.

    Attributes:
        drafted: drafts counted by the engine during the pass; None if the engine does not count drafts.
    """

    answers: Sequence[Answer | None]
    wall_s: float
    drafted: SpeculationStats | None

    @property
    def generations(self) -> list[Generation | None]:
        return [answer.generation if answer else None for answer in self.answers]

    @property
    def responses(self) -> list[Generation]:
        return [answer.generation for answer in self.answers if answer]


async def run_loop(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    *,
    sampling: Mapping[str, Any],
    concurrency: int,
    progress: Callable[[int, int], None],
    num_warm_up: int,
) -> Loop:
    """Send every prompt once, after a short warm-up that is not measured."""
    warm_up = {**sampling, "max_tokens": min(_WARM_UP_TOKENS, sampling["max_tokens"])}
    await asyncio.gather(*(_send(engine, f"warm-up-{i}", p, warm_up) for i, p in enumerate(prompts[:num_warm_up])))
    await asyncio.sleep(_COUNTERS_SETTLE_S)
    before = engine.speculation_totals()
    started = time.monotonic()
    answers = await _send_all(engine, prompts, sampling, concurrency, progress)
    wall_s = time.monotonic() - started
    await asyncio.sleep(_COUNTERS_SETTLE_S)
    return Loop(answers=answers, wall_s=wall_s, drafted=difference(engine.speculation_totals(), before))


def difference(after: SpeculationStats | None, before: SpeculationStats | None) -> SpeculationStats | None:
    """Return the drafts between two readings of an engine's counters; None if it does not count drafts."""
    if after is None or before is None:
        return None
    pairs = zip_longest(after.accepted_per_position, before.accepted_per_position, fillvalue=0)
    return SpeculationStats(
        num_drafts=after.num_drafts - before.num_drafts,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        accepted_per_position=tuple(a - b for a, b in pairs),
    )


async def _send_all(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    sampling: Mapping[str, Any],
    concurrency: int,
    progress: Callable[[int, int], None],
) -> list[Answer | None]:
    slots = asyncio.Semaphore(concurrency)
    num_done = 0

    async def send(index: int) -> Answer | None:
        nonlocal num_done
        async with slots:
            try:
                return await _send(engine, str(index), prompts[index], sampling)
            finally:
                num_done += 1
                progress(num_done, len(prompts))

    return list(await asyncio.gather(*map(send, range(len(prompts)))))


async def _send(engine: Engine, request_id: str, prompt: BenchPrompt, sampling: Mapping[str, Any]) -> Answer | None:
    started = time.monotonic()
    with contextlib.suppress(RequestRefused):
        generation = await engine.generate(request_id, prompt.token_ids, sampling)
        return Answer(generation=generation, elapsed_s=time.monotonic() - started)
    return None
