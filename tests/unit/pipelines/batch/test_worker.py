"""Tests of the engine actor, called directly instead of through Ray."""

import asyncio
import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from resolved_runs import resolve_run

from peagle.engine.fake import FakeEngine, FakeTraits
from peagle.engine.spec import EngineSpec
from peagle.errors import EngineError
from peagle.runs.meter import is_lent
from peagle.runs.plan import make_plan
from peagle.runs.prepare import prepare_unit
from peagle.runs.rows import encode_rows
from pipelines.batch import engine_start, watchdog, worker
from pipelines.batch.config import GenerateConfig
from pipelines.batch.engine_start import StartedEngine, start_engine
from pipelines.batch.worker import EngineWorker

SLOTS = 4


class EngineWithSlots(FakeEngine):
    """Like vLLM: a limited number of responses is decoded concurrently; other requests wait in the engine."""

    def __init__(self, row_s):
        super().__init__()
        self._slots, self._row_s = asyncio.Semaphore(SLOTS), row_s

    async def generate(self, request_id, prompt_token_ids, sampling):
        slots = [asyncio.create_task(self._slots.acquire()) for _ in range(sampling.get("n", 1))]
        try:
            await asyncio.gather(*slots)
            await asyncio.sleep(self._row_s)
        finally:
            for slot in slots:
                if slot.done() and not slot.cancelled():
                    self._slots.release()
        return await super().generate(request_id, prompt_token_ids, sampling)


class RunWithWorkers:
    """A run of two units of eight rows, and its engine actors."""

    def __init__(self, tmp_path, monkeypatch, **options):
        self._monkeypatch, self.workers = monkeypatch, []
        corpus = tmp_path / "prompts.jsonl"
        corpus.write_text("".join(json.dumps({"prompt": f"line {n}"}) + "\n" for n in range(16)))
        config = GenerateConfig(
            input=str(corpus), output=tmp_path / "run", engine="fake", usd_per_hour=1, rows_per_unit=8, **options
        )
        self.resolved = replace(resolve_run(config, make_plan(config)), slot_group="test-worker")
        self.directory = self.resolved.directory
        self.directory.create({}, self.resolved.plan)

    def make_worker(self, engine, lender=None, **options):
        if lender is None:
            started_engine = StartedEngine(engine=engine, checkable=engine.checkable)
            self._monkeypatch.setattr(worker, "start_engine", lambda *_: started_engine)
        config = self.resolved.config.model_copy(update=options)
        engine_worker = EngineWorker(replace(self.resolved, config=config, lender=lender).for_stages())
        self.workers.append(engine_worker)
        return engine_worker

    async def process_unit(self, engine_worker, unit):
        plan = self.resolved.plan
        batch = encode_rows(prepare_unit(plan.units[unit], plan.schema, self.resolved.request_builder()))
        return [receipt async for receipt in engine_worker(batch)]

    def counts(self, unit):
        usage = self.directory.usage(unit)
        return usage.num_rows, usage.num_failed_rows


def raise_process_ended(code):
    raise ProcessEnded(code)


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """Return a function that makes runs. Their actors do not redirect this process's output, and end with the test."""
    monkeypatch.setattr("pipelines.batch.session.redirect_output", lambda _: None)
    monkeypatch.setattr(worker, "atexit", SimpleNamespace(register=lambda _: None))
    monkeypatch.setattr(watchdog, "POLL_S", 0.05)
    monkeypatch.setattr(worker.os, "_exit", raise_process_ended)
    runs = []

    def make(**options):
        runs.append(RunWithWorkers(tmp_path, monkeypatch, max_num_seqs=SLOTS, **options))
        return runs[-1]

    yield make
    for actor in [actor for run in runs for actor in run.workers]:
        actor._session.end()


class ProcessEnded(BaseException):
    """Raised instead of ending the process."""


@pytest.mark.parametrize("options", [{}, {"n": 3, "temperature": 1.0}])
def test_time_limit_excludes_waiting_for_slots(make_run, options):
    run = make_run(**options)  # eight rows share four slots, so most of them wait
    asyncio.run(run.process_unit(run.make_worker(EngineWithSlots(row_s=0.3), row_timeout_s=0.55), 0))
    assert run.counts(0) == (8, 0)


def test_rows_wait_in_the_engine_only_without_a_time_limit(make_run):
    class CountingEngine(EngineWithSlots):
        peak = running = 0

        async def generate(self, *request):
            self.running += 1
            self.peak = max(self.peak, self.running)
            try:
                return await super().generate(*request)
            finally:
                self.running -= 1

    run, engines = make_run(), [CountingEngine(row_s=0.01), CountingEngine(row_s=0.01)]
    asyncio.run(run.process_unit(run.make_worker(engines[0]), 0))
    asyncio.run(run.process_unit(run.make_worker(engines[1], row_timeout_s=5), 1))
    assert [engine.peak for engine in engines] == [2 * SLOTS, SLOTS]


def call_until_committed(run, make_engine, unit, **options):
    """Call new actors until one commits the unit; return how many crashed, and the suspects after the last crash."""
    for num_ended in range(10):
        try:
            asyncio.run(run.process_unit(run.make_worker(make_engine(), **options), unit))
        except ProcessEnded:
            notes = [json.loads(path.read_bytes()) for path in run.directory.suspects.iterdir()]
        else:
            return num_ended, notes
    raise AssertionError("the unit was never committed")


@pytest.mark.parametrize("row_timeout_s", [None, 0.1])
def test_row_that_hangs_engines_becomes_a_dead_letter(make_run, row_timeout_s):
    run, killed_engines = make_run(), []

    class HangingEngine(FakeEngine):
        def __init__(self):
            super().__init__(FakeTraits(hang_on="line 3"))

        def kill(self):
            killed_engines.append(self)

    num_ended, notes = call_until_committed(run, HangingEngine, 0, row_timeout_s=row_timeout_s, engine_timeout_s=0.4)
    assert (num_ended, len(killed_engines)) == (3, 3)
    # The first engine died with several rows, the next two with only this row.
    assert sorted((note["alone"], note["died"], 3 in note["rows"]) for note in notes) == [
        (False, True, True),
        (True, True, True),
        (True, True, True),
    ]
    assert run.counts(0) == (7, 1)
    assert [(int(letter["id"]), letter["reason"]) for letter in run.directory.letters_of_unit(0)] == [
        (3, "engine_died")
    ]
    assert not list(run.directory.suspects.iterdir())


def test_blocked_event_loop_counts_as_a_crash(make_run, monkeypatch):
    monkeypatch.setattr(watchdog, "_MAX_GAP_S", 0.06)
    monkeypatch.setattr(watchdog, "_MIN_BLOCKED_S", 0.0)
    run, killed_engines, exit_calls, has_exited = make_run(), [], [], threading.Event()

    class BlockingEngine(FakeEngine):
        async def generate(self, request_id, prompt_token_ids, sampling):
            if b"line 3" in bytes(prompt_token_ids):
                assert has_exited.wait(20)
            return await super().generate(request_id, prompt_token_ids, sampling)

        def kill(self):
            killed_engines.append(self)

    def record_exit(code):
        if not has_exited.is_set():
            exit_calls.append((code, [json.loads(path.read_bytes()) for path in run.directory.suspects.iterdir()]))
        has_exited.set()

    monkeypatch.setattr(worker.os, "_exit", record_exit)
    asyncio.run(run.process_unit(run.make_worker(BlockingEngine(), engine_timeout_s=0.4), 0))
    ((code, (note,)),) = exit_calls
    assert (code, note["died"], 3 in note["rows"], bool(killed_engines)) == (1, True, True, True)
    (session,) = run.directory.sessions()
    assert session.ended


def test_slow_engine_is_not_killed(make_run):
    run = make_run()
    asyncio.run(run.process_unit(run.make_worker(EngineWithSlots(row_s=0.5), engine_timeout_s=0.2), 0))
    assert run.counts(0) == (8, 0)


def test_duplicate_unit_is_committed_once(make_run):
    run = make_run()
    actor = run.make_worker(EngineWithSlots(row_s=0.05))

    async def both_calls():
        return await asyncio.gather(run.process_unit(actor, 0), run.process_unit(actor, 0))

    receipts = [receipt.column("usage")[0].as_py() for (receipt,) in asyncio.run(both_calls())]
    assert sorted(usage is None for usage in receipts) == [False, True]
    assert run.counts(0) == (8, 0)
    assert not list(run.directory.suspects.iterdir())


def test_self_check_runs_once_before_the_first_row(make_run):
    class RecordingEngine(FakeEngine):
        def __init__(self, *, is_wrong=False):
            super().__init__(FakeTraits(is_wrong=is_wrong))
            self.events, answer = [], self.checkable.answer

            async def recorded(*arguments, **options):
                self.events.append("check")
                await asyncio.sleep(0.05)
                return await answer(*arguments, **options)

            self.checkable.answer = recorded

        async def generate(self, *request):
            self.events.append("row")
            return await super().generate(*request)

    async def process_both_units(actor):
        return await asyncio.gather(run.process_unit(actor, 0), run.process_unit(actor, 1), return_exceptions=True)

    run, right, wrong = make_run(), RecordingEngine(), RecordingEngine(is_wrong=True)
    refusals = asyncio.run(process_both_units(run.make_worker(wrong)))
    assert [type(refusal) for refusal in refusals] == [EngineError, EngineError]
    assert "failed its self-check: token 1 of" in refusals[0].message
    assert not run.directory.committed()
    asyncio.run(process_both_units(run.make_worker(right)))
    assert run.directory.committed() == {0, 1}
    # The self-check consists of a greedy and a sampled request, which run concurrently.
    assert (wrong.events, right.events[:3], right.events.count("check")) == (["check"] * 2, ["check"] * 2 + ["row"], 2)
    for engine_worker in run.workers:
        engine_worker._session.end()
    sessions = run.directory.sessions()
    assert sorted(json.loads(session.self_check)["outcome"] for session in sessions) == ["failed", "passed"]
    assert sum(session.num_output_tokens for session in sessions) == sum(
        run.directory.usage(unit).num_output_tokens for unit in (0, 1)
    ), "the self-check's tokens must not count as output"


def test_hanging_self_check_ends_the_run(make_run):
    class HangingEngine(FakeEngine):
        def signs_of_life(self):
            return 0

    async def never(*_, **__):
        await asyncio.sleep(60)

    run, engine = make_run(), HangingEngine()
    engine.checkable.answer = never
    with pytest.raises(EngineError, match=r"no sign of life in its self-check for 0\.2 s"):
        asyncio.run(run.process_unit(run.make_worker(engine, engine_timeout_s=0.2), 0))


@pytest.mark.parametrize(("is_lost", "expected_error"), [(True, ProcessEnded), (False, EngineError)])
def test_lost_node_ends_the_process_but_other_failures_end_the_run(make_run, monkeypatch, is_lost, expected_error):
    def start(spec, *, engine_index, num_engines_on_node, node_rank):
        assert node_rank == "rank"
        raise EngineError("vLLM did not start: its core ended")

    followers = SimpleNamespace(rank="rank", failure=EngineError("no memory on node 1"), is_lost=is_lost)
    monkeypatch.setattr(engine_start, "Followers", lambda run, session_id: followers)
    monkeypatch.setattr("pipelines.cluster.node.start_vllm", start)
    started_run = make_run()
    engine_worker = started_run.make_worker(FakeEngine())
    spec = EngineSpec(model="m", tensor_parallel_size=2, num_nodes=2)
    vllm = started_run.resolved.config.model_copy(update={"engine": "vllm"})
    run = replace(started_run.resolved, config=vllm, engine=replace(started_run.resolved.engine, spec=spec))
    with pytest.raises(expected_error) as error:
        start_engine(run, engine_worker._session)
    assert is_lost or error.value is followers.failure
    (session,) = started_run.directory.sessions()
    assert session.ended == is_lost


class Lender:
    """Stands in for an endpoint that lends a fake engine, and bills two seconds per row."""

    num_slots = 3

    def lend(self, meter):
        class BillingEngine(FakeEngine):
            async def generate(self, *request):
                meter.bill(2.0)
                return await super().generate(*request)

        return BillingEngine()


def test_lent_engine_is_billed_per_row(make_run):
    run = make_run()
    engine_worker = run.make_worker(None, lender=Lender())
    asyncio.run(run.process_unit(engine_worker, 0))
    engine_worker._close()
    (session,) = run.directory.sessions()
    assert is_lent(session.session_id)
    # Eight rows of two seconds each.
    assert (session.load_s, session.busy_s, session.idle_s, session.self_check) == (0.0, 16.0, 0.0, "")
    assert (run.counts(0), run.directory.usage(0).busy_s) == ((8, 0), 16.0)
