"""Ray Data's second stage: generate a prepared unit on an engine, commit it.

A unit is one row. What the stage needs travels in one picklable job record, and names of models are resolved on the
node that uses them. It knows nothing of the driver.

An engine that dies takes its actor with it, after a note of the rows that were in it (`suspects.py`); Ray starts
another actor and gives it the same units again. One that hangs is made to die.
"""

import asyncio
import atexit
import os
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pyarrow as pa

from peagle import hardware
from peagle.economics.prices import Device
from peagle.economics.usage import UnitUsage
from peagle.engine.interface import Engine, Generation, RequestRefused
from peagle.engine.self_check import require_passed, self_check
from peagle.engine.spec import EngineSpec
from peagle.errors import EngineError
from peagle.requests.prompts import RowError
from peagle.runs.directory import RunDirectory
from peagle.runs.rows import PreparedUnit, is_given_back, unpacked
from peagle.runs.stopping import GraceClock
from peagle.runs.suspects import Note, UnitNotes, Verdict
from peagle.speculation import SpeculationStats
from pipelines.batch.locks import Places, Turns, rows_in_engine
from pipelines.batch.multinode import FollowerJob, OtherNodes
from pipelines.batch.session import Admission, Session
from pipelines.batch.watchdog import ENGINE_TIMEOUT_S, POLL_S, LoopWatch, OutOfTime, SilenceClock, within


@dataclass(frozen=True, kw_only=True)
class EngineJob:
    """The job of an engine actor.

    `model` and `drafter` are labels; `spec` names them as the user did.

    Attributes:
        driver: the number of the lease of who runs it; only that one can stop it.
        places: the name under which engines that share a node number their places on it.
        part: what an engine on several nodes takes of each of them, by Ray's names.
        fake: what the fake engine is like where it stands in for vLLM, as `FakeEngine` takes it.
    """

    run_dir: str
    places: str
    spec: EngineSpec
    model: str
    drafter: str | None
    driver: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)
    fake: dict[str, Any] | None = None
    row_timeout_s: float | None = None
    engine_timeout_s: float = ENGINE_TIMEOUT_S
    num_devices: int = 1
    device: Device = "vcpu"
    num_engines_on_node: int = 1
    part: dict[str, float] = field(default_factory=dict)
    heartbeat_s: float = 5.0
    admission: Admission | None = None


_KILLER = RowError(reason="engine_died", message="engines died while this row was alone in them, twice")


class EngineWorker:
    """One engine, which commits the units that Ray Data gives it, several at a time.

    Rows of all its units run in one continuous batch. A few more requests than the engine runs at once are in it
    at any moment, so that a finished one is replaced in the next step; not where rows have a time limit.
    """

    def __init__(self, job: EngineJob) -> None:
        self._job = job
        self._run = RunDirectory(job.run_dir, driver=job.driver)
        if job.admission is not None and not _takes_the_place_of_another():
            job.admission.wait(self._run)
        self._grace = GraceClock(self._run.stop.reader())
        self._session = Session(
            self._run,
            places=job.places,
            num_devices=job.num_devices,
            device=job.device,
            heartbeat_s=job.heartbeat_s,
        )
        self._meter = self._session.meter
        self._others: OtherNodes | None = None
        try:
            self._engine, compile_s = self._start_engine()
        finally:
            self._session.keep_log()
        self._meter.ready(compile_s)
        self._session.beat()
        slots = job.spec.max_num_seqs
        # A row's limit must not pass while it waits in the engine for others to end.
        self._places = Places(rows_in_engine(slots) if job.row_timeout_s is None else slots)
        self._turns = Turns()
        self._silence = SilenceClock(self._engine.signs_of_life)
        self._loop_watch: LoopWatch | None = None
        self._check: asyncio.Task[None] | None = None
        self._notes: dict[int, UnitNotes] = {}
        self._in_engine: defaultdict[int, list[int]] = defaultdict(list)
        atexit.register(self._close)
        if self._others is not None:
            self._others.started(self._die)

    async def __call__(self, batch: pa.Table) -> AsyncIterator[pa.Table]:
        """Generate and commit one prepared unit; a run being stopped gets it back undone."""
        if self._loop_watch is None:
            loop = asyncio.get_running_loop()
            limit_s = self._job.engine_timeout_s
            self._loop_watch = LoopWatch(loop, limit_s=limit_s, die=self._die, leave=self._leave)
        table = unpacked(batch)
        if is_given_back(table) or self._grace.is_asked():
            yield _receipt(None)
            return
        if self._check is None:  # here: vLLM answers in the loop in which it is first asked, and in no other
            self._check = asyncio.create_task(self._check_engine())
        await self._check
        prepared = PreparedUnit(table)
        started_at = time.time()
        unit = prepared.unit.unit
        notes = self._notes[unit] = UnitNotes(self._run.suspects, unit, self._session.session_id)
        verdict = await asyncio.to_thread(notes.verdict, table.num_rows)
        for index in verdict.guilty:
            prepared.refuse(index, _KILLER)
        await asyncio.to_thread(notes.write, Note())
        work = asyncio.create_task(self._generate_all(prepared, verdict, notes))
        if not await self._finished_in_time(work):
            self._notes.pop(unit, None)
            notes.withdraw()
            yield _receipt(None)
            return
        generations = work.result()
        usage = self._usage(prepared, list(generations.values()), started_at)
        output = prepared.output(generations, self._job.model, self._job.drafter)
        committed = await asyncio.to_thread(self._run.commit, unit, output, usage, prepared.letters())
        self._notes.pop(unit, None)  # gone already where this process had the unit twice
        await asyncio.to_thread(notes.clear)
        yield _receipt(usage if committed else None)

    async def _check_engine(self) -> None:
        """Let the engine work only where its answers are its target's.

        Raises:
            EngineError: they are not, or it died or hangs. Another one of these settings would do the same.
        """
        limit_s = self._job.engine_timeout_s
        work = asyncio.create_task(self_check(self._engine.checkable, self._job.spec, hardware.detect()))
        while not (await asyncio.wait([work], timeout=POLL_S))[0]:
            if self._silence.look(is_busy=True) > limit_s:
                work.cancel()
                raise EngineError(f"the engine showed no sign of life in its self-check for {limit_s:g} s")
        self._session.self_check = work.result().to_json()
        self._session.start_warnings += [work.result().describe()] * (work.result().outcome == "skipped")
        await asyncio.to_thread(self._session.beat)
        require_passed(work.result())

    async def _finished_in_time(self, work: "asyncio.Task[dict[int, Generation]]") -> bool:
        """Wait for a unit's rows; False, rows cancelled, when a stop's grace is over.

        Who waits also watches: an engine that is silent for too long ends here. `LoopWatch` sees whether anybody waits.
        """
        while not (await asyncio.wait([work], timeout=POLL_S))[0]:
            if self._grace.is_over():
                work.cancel()
                return False
            silent_s = self._silence.look(is_busy=any(self._in_engine.values()))
            if silent_s > (limit_s := self._job.engine_timeout_s):
                self._die(f"the engine has shown no sign of life for {limit_s:g} s (--engine-timeout-s)")
        return True

    async def _generate_all(self, prepared: PreparedUnit, verdict: Verdict, notes: UnitNotes) -> dict[int, Generation]:
        """Generate unsuspected rows with those of other units, then suspects alone."""
        indices = [index for index in range(len(prepared.prompts)) if index not in prepared.dead_letters]
        together = [index for index in indices if index not in verdict.suspects]
        outcomes = await asyncio.gather(*(self._generate_together(prepared, index) for index in together))
        found = dict(zip(together, outcomes, strict=True))
        if suspects := sorted(verdict.suspects.intersection(indices)):
            async with self._turns.alone():
                for index in suspects:
                    await asyncio.to_thread(self._session.beat)  # the driver should see what was finished until here
                    await asyncio.to_thread(notes.write, Note(rows=(index,), alone=True))
                    found[index] = await self._generate(prepared, index)
            await asyncio.to_thread(notes.write, Note())
        return {index: generation for index, generation in sorted(found.items()) if generation is not None}

    async def _generate_together(self, prepared: PreparedUnit, index: int) -> Generation | None:
        async with self._places.take(self._places_of(prepared.sampling[index])), self._turns.together():
            return await self._generate(prepared, index)

    async def _generate(self, prepared: PreparedUnit, index: int) -> Generation | None:
        """One row; None, with a dead letter, where it cannot be done."""
        unit, row_id = prepared.unit.unit, prepared.unit.row_id(index)
        prompt = prepared.prompts[index]
        assert prompt is not None, "a row without a prompt has a dead letter"
        # The same row may be here twice, when Ray runs a unit again: the engine must tell them apart.
        request_id = f"{row_id}-{uuid.uuid4().hex[:8]}"
        sampling = self._sampling(row_id, prepared.sampling[index])
        num_tokens = 0
        self._meter.start(unit)
        self._in_engine[unit].append(index)
        try:
            answer = self._engine.generate(request_id, prompt, sampling)
            generation = await within(self._job.row_timeout_s, answer, self._engine.signs_of_life)
            num_tokens = generation.num_output_tokens
        except RequestRefused as error:
            prepared.refuse(index, RowError(reason=error.reason, message=str(error)))
            return None
        except OutOfTime:
            prepared.refuse(index, _out_of_time(self._job.row_timeout_s))
            return None
        except EngineError as error:
            self._die(error.message)
        finally:
            self._in_engine[unit].remove(index)
            self._meter.finish(unit, num_tokens)
        return generation

    def _die(self, why: str) -> NoReturn:
        """Note the engine's rows and end this process, which Ray replaces."""
        sys.stderr.write(f"peagle: {why}; this process ends and is replaced\n")
        sys.stderr.flush()
        for unit, notes in list(self._notes.items()):
            if rows := self._in_engine[unit]:
                notes.write(Note(rows=tuple(sorted(rows)), alone=self._turns.is_alone, died=True))
            else:
                notes.withdraw()
        self._session.end()
        self._leave()

    def _leave(self) -> NoReturn:
        try:
            self._engine.kill()  # what hangs would keep the memory that the next engine needs
        finally:
            os._exit(1)

    def _places_of(self, own: dict[str, Any]) -> int:
        """A row's places in the engine: one for each response where its time counts."""
        sampling = self._job.sampling | own
        return 1 if self._job.row_timeout_s is None else int(sampling.get("n", 1))

    def _sampling(self, row_id: str, own: dict[str, Any]) -> dict[str, Any]:
        """The run's sampling parameters and the row's own.

        The run's seed varies by row, else equal prompts would get equal answers; a row's own is taken as it is.
        """
        sampling = dict(self._job.sampling)
        if sampling.get("seed") is not None:
            sampling["seed"] = (sampling["seed"] + int(row_id)) % 2**31
        return sampling | own

    def _usage(self, prepared: PreparedUnit, generations: list[Generation], started_at: float) -> UnitUsage:
        drafts = [g.speculation for g in generations if g.speculation is not None]
        return UnitUsage(
            session_id=self._session.session_id,
            num_rows=len(generations),
            num_failed_rows=len(prepared.dead_letters),
            num_prompt_tokens=sum(g.num_prompt_tokens for g in generations),
            num_cached_tokens=sum(g.num_cached_tokens or 0 for g in generations),
            num_output_tokens=sum(g.num_output_tokens for g in generations),
            busy_s=self._meter.take(prepared.unit.unit),
            speculation=sum(drafts, start=SpeculationStats.empty()),
            started_at=started_at,
            finished_at=max(started_at, time.time()),  # a clock may be set back in between
        )

    # --- start and end

    def _start_engine(self) -> tuple[Engine, float]:
        job = self._job
        if job.fake is not None:
            from peagle.engine.fake import FakeEngine

            k = job.spec.drafter.num_speculative_tokens if job.spec.drafter else 0
            return FakeEngine(num_speculative_tokens=k, max_num_seqs=job.spec.max_num_seqs, **job.fake), 0.0
        from peagle.engine.startup import costly_warnings
        from peagle.engine.vllm import compile_seconds, with_root_cause
        from pipelines.cluster.node import start_vllm

        if job.spec.num_nodes > 1:
            self._others = self._other_nodes()
        try:
            vllm = start_vllm(
                job.spec,
                engine_index=self._session.slot,
                num_engines_on_node=job.num_engines_on_node,
                node_rank=self._others.rank if self._others is not None else None,
            )
        except EngineError as error:
            if self._others is not None and self._others.failure is not None:
                self._end_if_lost(self._others)
                raise self._others.failure from error
            raise with_root_cause(error, self._session.log.read_text(errors="replace")) from error
        log = self._session.log.read_text(errors="replace")
        self._session.start_warnings = costly_warnings(log)
        return vllm, compile_seconds(log)

    def _end_if_lost(self, others: OtherNodes) -> None:
        """End this process where a node is lost during the start; Ray restarts it."""
        if others.is_lost and others.failure is not None:
            sys.stderr.write(f"peagle: {others.failure.message}; this process ends and is replaced\n")
            sys.stderr.flush()
            self._session.end()
            os._exit(1)

    def _other_nodes(self) -> OtherNodes:
        job = self._job
        follower = FollowerJob(
            run_dir=job.run_dir,
            places=job.places,
            spec=job.spec,
            num_engines_on_node=job.num_engines_on_node,
            session_id=self._session.session_id,
        )
        return OtherNodes(follower, job.part)

    def _close(self) -> None:
        if self._others is not None:
            self._others.release()
        self._session.end()
        self._engine.shutdown()


def _takes_the_place_of_another() -> bool:
    """Whether Ray started this process for an actor that died: its units wait for it."""
    import ray

    return bool(ray.is_initialized() and ray.get_runtime_context().was_current_actor_reconstructed)


def _out_of_time(limit_s: float | None) -> RowError:
    return RowError(reason="time_limit", message=f"not finished within {limit_s:g} s (--row-timeout-s)")


def _receipt(usage: UnitUsage | None) -> pa.Table:
    """The receipt of a unit: its usage if this attempt committed it, else null."""
    return pa.table({"usage": pa.array([usage and usage.to_json()], pa.binary())})
