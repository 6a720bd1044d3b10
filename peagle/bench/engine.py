"""Run an engine for a measurement in this process, and read its memory."""

import asyncio
import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil

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
StartEngine = Callable[[EngineSpec, Hardware], Engine]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementListener:
    """Callbacks: `say` gets messages, `progress` the numbers of finished prompts and of all prompts of a pass."""

    say: Callable[[str], None] = lambda message: None
    progress: Callable[[int, int], None] = lambda done, total: None


def with_engine(
    spec: EngineSpec,
    hardware: Hardware,
    start: StartEngine,
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
        log_start, started_at = log.stat().st_size, time.monotonic()
        try:
            engine = start(converted_spec(fetched_spec(spec)), hardware)
        except EngineError as error:
            raise with_root_cause(error, read_from(log, log_start)) from error
        start_s = time.monotonic() - started_at
        for warning in costly_warnings(read_from(log, log_start)):
            quiet.print_to_terminal(format_start_warning(warning))

        async def check_and_use() -> Result:
            # Shut the engine down in the same event loop, because vLLM has tasks in it.
            try:
                engine.self_check = await self_check(engine.checkable, spec, hardware)
                if engine.self_check.outcome == "skipped":
                    quiet.print_to_terminal(format_start_warning(engine.self_check.describe()))
                require_passed(engine.self_check)
                return await use(engine, start_s)
            finally:
                engine.shutdown()

        return asyncio.run(check_and_use())


def read_from(log: Path, position: int) -> str:
    with log.open("rb") as file:
        file.seek(position)
        return file.read().decode(errors="replace")


def measure_and_report(run: Any, root: Path, listener: MeasurementListener, *, pass_noun: str) -> dict[str, Any]:
    """Measure and write the report, also after an error or interrupt. `pass_noun` is a plural, such as "passes"."""
    try:
        run.measure()
    except BaseException:
        if run.done:
            run.write_report()
            listener.say(f"report of the finished {pass_noun}: {root / 'report.md'}")
        raise
    report: dict[str, Any] = run.write_report()
    return report


class PeakMemory:
    """The largest reading between enter and exit, read every second."""

    def __init__(self, read: Callable[[], float | None]) -> None:
        self._read = read
        self.gib: float | None = None

    def __enter__(self) -> Self:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self._update()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._update()

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            self._update()

    def _update(self) -> None:
        gib = self._read()
        if gib is not None:
            self.gib = max(gib, self.gib or 0.0)


def memory_reader(hardware: Hardware) -> Callable[[], float | None]:
    """Return a function that reads memory in use. Call this before the first engine starts.

    vLLM fills a GPU up to `gpu_memory_utilization` with KV cache, so on a GPU the reading is what vLLM reserves, not
    what it needs.
    """
    if hardware.platform == "cpu":
        return tree_rss_gib
    gib_before = device_gib()

    def read() -> float | None:
        gib = device_gib()
        return None if gib is None or gib_before is None else max(gib - gib_before, 0.0)

    return read


def tree_rss_gib(pid: int | None = None) -> float | None:
    """Return the resident memory of a process (default: this one) and its descendants; None if it has exited.

    Memory that processes share counts once for each of them.
    """
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return None
    rss_bytes = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            rss_bytes += process.memory_info().rss
    return rss_bytes / 1024**3


def device_gib() -> float | None:
    """Return the memory in use on all GPUs; None if the driver does not report it."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return sum(float(line) for line in output.split()) / 1024
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


_COUNTERS_SETTLE_S = 0.2  # vLLM returns a response before it updates its counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    generation: Generation
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """The responses of one pass over all prompts.

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
    def completed(self) -> list[Generation]:
        return [answer.generation for answer in self.answers if answer]


async def run_pass(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    *,
    sampling: Mapping[str, Any],
    concurrency: int,
    progress: Callable[[int, int], None],
    num_warm_up: int,
) -> PassResult:
    """Send every prompt once. Before the measurement, request short responses to the first `num_warm_up` prompts."""
    warm_up = {**sampling, "max_tokens": min(8, sampling["max_tokens"])}
    await asyncio.gather(*(_send(engine, f"warm-up-{i}", p, warm_up) for i, p in enumerate(prompts[:num_warm_up])))
    await asyncio.sleep(_COUNTERS_SETTLE_S)
    totals_before = engine.speculation_totals()
    started_at = time.monotonic()
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

    answers = await asyncio.gather(*map(send, range(len(prompts))))
    wall_s = time.monotonic() - started_at
    await asyncio.sleep(_COUNTERS_SETTLE_S)
    return PassResult(
        answers=answers, wall_s=wall_s, drafted=drafts_between(engine.speculation_totals(), totals_before)
    )


def drafts_between(after: SpeculationStats | None, before: SpeculationStats | None) -> SpeculationStats | None:
    """Return the drafts between two readings of an engine's counters; None if the engine does not count drafts."""
    if after is None or before is None:
        return None
    accepted = zip_longest(after.accepted_per_position, before.accepted_per_position, fillvalue=0)
    return SpeculationStats(
        num_drafts=after.num_drafts - before.num_drafts,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        accepted_per_position=tuple(count_after - count_before for count_after, count_before in accepted),
    )


async def _send(engine: Engine, request_id: str, prompt: BenchPrompt, sampling: Mapping[str, Any]) -> Answer | None:
    started_at = time.monotonic()
    with contextlib.suppress(RequestRefused):
        generation = await engine.generate(request_id, prompt.token_ids, sampling)
        return Answer(generation=generation, elapsed_s=time.monotonic() - started_at)
    return None
