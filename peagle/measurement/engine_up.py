"""An engine that is up for a while: its prints in a file of their own, its failure to start told by its cause.

It knows neither Ray nor HTTP: the engine runs in this process, so that a GPU host needs vLLM and nothing else.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from peagle.engine.generation import Engine
from peagle.engine.self_check import require_passed, self_check
from peagle.engine.spec import EngineSpec
from peagle.engine.start_log import as_told, costly_warnings
from peagle.engine.vllm_engine import with_root_cause
from peagle.errors import EngineError
from peagle.hardware import Hardware
from peagle.quiet import QuietStderr

Result = TypeVar("Result")
Start = Callable[[EngineSpec, Hardware], Engine]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
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
    """
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for the table
    with QuietStderr() as quiet:
        quiet.move_to(log)
        began_at, started = log.stat().st_size, time.monotonic()
        try:
            engine = start(spec, hardware)
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
    """What was printed to a log since it ended at a position."""
    with log.open("rb") as file:
        file.seek(position)
        return file.read().decode(errors="replace")
