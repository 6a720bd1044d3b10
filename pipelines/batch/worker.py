"""Ray Data's second stage: generate a prepared unit on an engine, and commit it.

In the Ray dataset, each prepared unit is one row.

When an engine crashes, its actor records the rows that it was running (`suspects.py`) and exits. Ray starts another
actor with the same units. A hanging engine is killed (`watchdog.py`).
"""

import asyncio
import atexit
import os
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from typing import Any, NoReturn

import pyarrow as pa

from peagle import hardware
from peagle.economics.usage import UnitUsage
from peagle.engine.interface import Generation, RequestRefused
from peagle.engine.self_check import require_passed, self_check
from peagle.errors import EngineError
from peagle.requests.prompts import RowError
from peagle.runs.rows import PreparedUnit, decode_rows, is_unfinished
from peagle.runs.stopping import GraceClock
from peagle.runs.suspects import Note, RowsInEngine, UnitNotes, Verdict
from peagle.speculation import SpeculationStats
from pipelines.batch.engine_start import log_exit, start_engine
from pipelines.batch.locks import SharedExclusiveLock, WeightedSemaphore, rows_in_engine
from pipelines.batch.resolve import ResolvedRun
from pipelines.batch.session import Session, StartPolicy
from pipelines.batch.watchdog import OutOfTime, Watchdog

_POISONED = RowError(reason="engine_died", message="two engines crashed while they ran only this row")


class EngineWorker:
    """One engine, which generates and commits several units of Ray Data at a time.

    The rows of all its units run in one continuous batch. Unless rows have a time limit, the engine gets a few more
    requests than it has slots, so that a finished request is replaced in the next step.
    """

    def __init__(self, run: ResolvedRun, start_policy: StartPolicy | None = None) -> None:
        self._config, self._base_sampling = run.config, dict(run.sampling.base)
        self._spec, self._model, self._drafter = run.spec, run.model.name, run.drafter.name
        self._directory = directory = run.directory
        self._keeps_inputs = directory.keeps_inputs
        if start_policy is not None and not _is_replacement():
            start_policy.wait_until_needed(directory)
        grace = GraceClock(directory.stop.reader())
        self._session = Session(run)
        try:
            started_engine = start_engine(run, self._session)
        finally:
            self._session.copy_log()
        self._engine, self._checkable, self._followers = (
            started_engine.engine,
            started_engine.checkable,
            started_engine.followers,
        )
        self._session.meter.ready(started_engine.compile_s)
        self._session.beat()
        self._parser = run.response_parser()
        slots = run.num_slots
        # The time limit of a row must not pass while the row waits in the engine.
        self._slots = WeightedSemaphore(rows_in_engine(slots) if run.config.row_timeout_s is None else slots)
        self._lock = SharedExclusiveLock()
        self._rows = RowsInEngine()
        self._watchdog = Watchdog(
            self._engine.signs_of_life,
            limit_s=run.config.engine_timeout_s,
            grace=grace,
            is_busy=self._rows.has_rows,
            die=self._die,
            leave=self._kill_engine_and_exit,
        )
        self._check_task: asyncio.Task[None] | None = None
        atexit.register(self._close)
        if self._followers is not None:
            self._followers.set_started(self._die)

    async def __call__(self, batch: pa.Table) -> AsyncIterator[pa.Table]:
        """Generate and commit one prepared unit; if the run is being stopped, return immediately."""
        self._watchdog.watch_loop()
        table = decode_rows(batch)
        if is_unfinished(table) or self._watchdog.is_stopping():
            yield _receipt(None)
            return
        if self._check_task is None:  # not earlier, because vLLM is bound to the event loop of its first request
            self._check_task = asyncio.create_task(self._check_engine())
        await self._check_task
        prepared = PreparedUnit(table)
        started_at = time.time()
        unit = prepared.unit.unit
        notes = self._rows.start(unit, UnitNotes(self._directory.suspects, unit, self._session.session_id))
        verdict = await asyncio.to_thread(notes.verdict, table.num_rows)
        for index in verdict.poisoned:
            prepared.refuse(index, _POISONED)
        await asyncio.to_thread(notes.write, Note())
        work = asyncio.create_task(self._generate_all(prepared, verdict, notes))
        if not await self._watchdog.wait_for_unit(work):
            self._rows.end(unit)
            notes.discard()
            yield _receipt(None)
            return
        generations = work.result()
        usage = self._usage(prepared, list(generations.values()), started_at)
        output = prepared.output(
            generations, self._model, self._drafter, keeps_inputs=self._keeps_inputs, is_parsed=self._parser is not None
        )
        committed = await asyncio.to_thread(self._directory.commit, unit, output, usage, prepared.dead_letter_records())
        self._rows.end(unit)
        await asyncio.to_thread(notes.clear)
        yield _receipt(usage if committed else None)

    async def _check_engine(self) -> None:
        """Run the self-check of the engine.

        Raises:
            EngineError: the check failed, or the engine crashed or hangs. A restart would not help.
        """
        if self._checkable is None:
            return
        result = await self._watchdog.wait_for_self_check(self_check(self._checkable, self._spec, hardware.detect()))
        self._session.self_check = result.to_json()
        self._session.start_warnings += [result.describe()] * (result.outcome == "skipped")
        await asyncio.to_thread(self._session.beat)
        require_passed(result)

    async def _generate_all(self, prepared: PreparedUnit, verdict: Verdict, notes: UnitNotes) -> dict[int, Generation]:
        """Generate the rows of a unit together with other units, and then each suspected row alone."""
        indices = [index for index in range(len(prepared.prompts)) if index not in prepared.dead_letters]
        unsuspected = [index for index in indices if index not in verdict.suspects]
        outcomes = await asyncio.gather(*(self._generate_together(prepared, index) for index in unsuspected))
        generations = dict(zip(unsuspected, outcomes, strict=True))
        if suspects := sorted(verdict.suspects.intersection(indices)):
            async with self._lock.exclusive():
                for index in suspects:
                    # If this row crashes the engine, the driver must already know which rows finished since the last
                    # crash.
                    await asyncio.to_thread(self._session.beat)
                    await asyncio.to_thread(notes.write, Note(rows=(index,), alone=True))
                    generations[index] = await self._generate(prepared, index)
            await asyncio.to_thread(notes.write, Note())
        return {index: generation for index, generation in sorted(generations.items()) if generation is not None}

    async def _generate_together(self, prepared: PreparedUnit, index: int) -> Generation | None:
        async with self._slots.acquire(self._slots_of(prepared.sampling[index])), self._lock.shared():
            return await self._generate(prepared, index)

    async def _generate(self, prepared: PreparedUnit, index: int) -> Generation | None:
        """Generate one row. If it fails, make it a dead letter and return None."""
        unit, row_id = prepared.unit.unit, prepared.unit.row_id(index)
        prompt = prepared.prompts[index]
        assert prompt is not None, "a row without a prompt has a dead letter"
        # When Ray retries a unit, the same row might be in the engine twice.
        request_id = f"{row_id}-{uuid.uuid4().hex[:8]}"
        sampling, parsing = self._sampling(row_id, prepared.sampling[index]), prepared.parsing[index]
        num_tokens = 0
        self._session.meter.start(unit)
        try:
            if self._parser is not None and parsing is not None:
                sampling |= await asyncio.to_thread(self._parser.sampling, parsing)
            with self._rows.inside(unit, index):
                generation = await self._within_limit(self._engine.generate(request_id, prompt, sampling))
                num_tokens = generation.num_output_tokens
            if self._parser is not None and parsing is not None:
                generation = await asyncio.to_thread(self._parser.parse, generation, parsing)
        except RequestRefused as error:
            prepared.refuse(index, RowError(reason=error.reason, message=str(error)))
            return None
        except OutOfTime:
            prepared.refuse(index, _out_of_time(self._config.row_timeout_s))
            return None
        finally:
            self._session.meter.finish(unit, num_tokens)
        return generation

    async def _within_limit(self, answer: Coroutine[Any, Any, Generation]) -> Generation:
        """Wait for the answer of a row within the time limit of rows. If the engine dies, end this process.

        Raises:
            RequestRefused, OutOfTime: the row fails.
        """
        try:
            return await self._watchdog.wait_for_answer(self._config.row_timeout_s, answer)
        except EngineError as error:
            self._die(error.message)

    def _slots_of(self, row_sampling: dict[str, Any]) -> int:
        """Return the engine slots that a row waits for: 1, or one for each response if rows have a time limit."""
        sampling = self._base_sampling | row_sampling
        return 1 if self._config.row_timeout_s is None else int(sampling.get("n", 1))

    def _sampling(self, row_id: str, row_sampling: dict[str, Any]) -> dict[str, Any]:
        """Return the sampling parameters of the run, overridden by those of the row.

        The run's seed is varied by row, so that equal prompts get different answers; a row's own seed is not varied.
        """
        sampling = dict(self._base_sampling)
        if sampling.get("seed") is not None:
            sampling["seed"] = (sampling["seed"] + int(row_id)) % 2**31
        return sampling | row_sampling

    def _usage(self, prepared: PreparedUnit, generations: list[Generation], started_at: float) -> UnitUsage:
        drafts = [g.speculation for g in generations if g.speculation is not None]
        return UnitUsage(
            session_id=self._session.session_id,
            num_rows=len(generations),
            num_failed_rows=len(prepared.dead_letters),
            num_prompt_tokens=sum(g.num_prompt_tokens for g in generations),
            num_cached_tokens=sum(g.num_cached_tokens or 0 for g in generations),
            num_output_tokens=sum(g.num_output_tokens for g in generations),
            busy_s=self._session.meter.pop_busy_s(prepared.unit.unit),
            speculation=sum(drafts, start=SpeculationStats.empty()),
            started_at=started_at,
            finished_at=max(started_at, time.time()),  # the clock might have been set back
        )

    # --- the end of the process

    def _close(self) -> None:
        if self._followers is not None:
            self._followers.release()
        self._session.end()
        self._engine.shutdown()

    def _die(self, reason: str) -> NoReturn:
        """Record the rows in the engine and end this process, which Ray replaces."""
        log_exit(reason)
        self._rows.mark_suspected(alone=self._lock.is_exclusive)
        self._session.end()
        self._kill_engine_and_exit()

    def _kill_engine_and_exit(self) -> NoReturn:
        try:
            self._engine.kill()  # otherwise a hanging process would keep the memory that the next engine needs
        finally:
            os._exit(1)


def _is_replacement() -> bool:
    """Whether this process replaces a crashed one, whose units already wait for it."""
    import ray

    return bool(ray.is_initialized() and ray.get_runtime_context().was_current_actor_reconstructed)


def _out_of_time(limit_s: float | None) -> RowError:
    return RowError(reason="time_limit", message=f"not finished within {limit_s:g} s (--row-timeout-s)")


def _receipt(usage: UnitUsage | None) -> pa.Table:
    """Return the receipt of a unit: its usage if this attempt committed it, or null."""
    return pa.table({"usage": pa.array([usage and usage.to_json()], pa.binary())})
