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


class Scene:
    """A run of two units of eight rows, and its engine actors."""

    def __init__(self, tmp_path, monkeypatch, **keys):
        self._monkeypatch, self.workers = monkeypatch, []
        corpus = tmp_path / "prompts.jsonl"
        corpus.write_text("".join(json.dumps({"prompt": f"line {n}"}) + "\n" for n in range(16)))
        config = GenerateConfig(
            input=str(corpus), output=tmp_path / "run", engine="fake", usd_per_hour=1, rows_per_unit=8, **keys
        )
        self.resolved = replace(resolve_run(config, make_plan(config)), slot_group="test-worker")
        self.run = self.resolved.directory
        self.run.create({}, self.resolved.plan)

    def worker(self, engine, lender=None, **keys):
        if lender is None:
            started = StartedEngine(engine=engine, checkable=engine.checkable)
            self._monkeypatch.setattr(worker, "start_engine", lambda *_: started)
        config = self.resolved.config.model_copy(update=keys)
        engine_worker = EngineWorker(replace(self.resolved, config=config, lender=lender).for_stages())
        self.workers.append(engine_worker)
        return engine_worker

    async def call(self, engine_worker, unit):
        plan = self.resolved.plan
        batch = encode_rows(prepare_unit(plan.units[unit], plan.schema, self.resolved.request_builder()))
        return [receipt async for receipt in engine_worker(batch)]

    def counts(self, unit):
        usage = self.run.usage(unit)
        return usage.num_rows, usage.num_failed_rows


def end(code):
    raise ProcessEnded(code)


@pytest.fixture
def scene(tmp_path, monkeypatch):
    """Return a function that makes scenes. Their actors keep this process's output, and end with the test."""
    monkeypatch.setattr("pipelines.batch.session.redirect_output", lambda _: None)
    monkeypatch.setattr(worker, "atexit", SimpleNamespace(register=lambda _: None))
    monkeypatch.setattr(watchdog, "POLL_S", 0.05)
    monkeypatch.setattr(worker.os, "_exit", end)
    scenes = []

    def make(**keys):
        scenes.append(Scene(tmp_path, monkeypatch, max_num_seqs=SLOTS, **keys))
        return scenes[-1]

    yield make
    for actor in [actor for created in scenes for actor in created.workers]:
        actor._session.end()


class ProcessEnded(BaseException):
    """Raised instead of ending the process."""


@pytest.mark.parametrize("keys", [{}, {"n": 3, "temperature": 1.0}])
def test_time_limit_excludes_waiting_for_slots(scene, keys):
    run = scene(**keys)
    asyncio.run(run.call(run.worker(EngineWithSlots(row_s=0.3), row_timeout_s=0.55), 0))
    assert run.counts(0) == (8, 0)


def test_rows_without_limit_wait_in_the_engine(scene):
    class Counting(EngineWithSlots):
        peak = running = 0

        async def generate(self, *request):
            self.running += 1
            self.peak = max(self.peak, self.running)
            try:
                return await super().generate(*request)
            finally:
                self.running -= 1

    run, engines = scene(), [Counting(row_s=0.01), Counting(row_s=0.01)]
    asyncio.run(run.call(run.worker(engines[0]), 0))
    asyncio.run(run.call(run.worker(engines[1], row_timeout_s=5), 1))
    assert [engine.peak for engine in engines] == [2 * SLOTS, SLOTS]


def until_done(run, make_engine, unit, **options):
    """Call new actors until one commits the unit; return the number of crashed actors and their notes of suspects."""
    for num_ended in range(10):
        try:
            asyncio.run(run.call(run.worker(make_engine(), **options), unit))
        except ProcessEnded:
            notes = [json.loads(path.read_bytes()) for path in run.run.suspects.iterdir()]
        else:
            return num_ended, notes
    raise AssertionError("the unit was never committed")


@pytest.mark.parametrize("row_timeout_s", [None, 0.1])
def test_row_that_hangs_engines_becomes_a_dead_letter(scene, row_timeout_s):
    run, killed = scene(), []

    class Hanging(FakeEngine):
        def __init__(self):
            super().__init__(FakeTraits(hang_on="line 3"))

        def kill(self):
            killed.append(self)

    num_ended, notes = until_done(run, Hanging, 0, row_timeout_s=row_timeout_s, engine_timeout_s=0.4)
    assert (num_ended, len(killed)) == (3, 3)
    assert sorted((note["alone"], note["died"], 3 in note["rows"]) for note in notes) == [
        (False, True, True),
        (True, True, True),
        (True, True, True),
    ]
    assert run.counts(0) == (7, 1)
    assert [(int(letter["id"]), letter["reason"]) for letter in run.run.letters_of_unit(0)] == [(3, "engine_died")]
    assert not list(run.run.suspects.iterdir())


def test_blocked_event_loop_counts_as_a_crash(scene, monkeypatch):
    monkeypatch.setattr(watchdog, "_MAX_GAP_S", 0.06)
    monkeypatch.setattr(watchdog, "_MIN_BLOCKED_S", 0.0)
    run, killed, ends, ended = scene(), [], [], threading.Event()

    class Blocking(FakeEngine):
        async def generate(self, request_id, prompt_token_ids, sampling):
            if b"line 3" in bytes(prompt_token_ids):
                assert ended.wait(20)
            return await super().generate(request_id, prompt_token_ids, sampling)

        def kill(self):
            killed.append(self)

    def leave(code):
        if not ended.is_set():
            ends.append((code, [json.loads(path.read_bytes()) for path in run.run.suspects.iterdir()]))
        ended.set()

    monkeypatch.setattr(worker.os, "_exit", leave)
    asyncio.run(run.call(run.worker(Blocking(), engine_timeout_s=0.4), 0))
    ((code, (note,)),) = ends
    assert (code, note["died"], 3 in note["rows"], bool(killed)) == (1, True, True, True)
    (session,) = run.run.sessions()
    assert session.ended


def test_slow_engine_is_not_killed(scene):
    run = scene()
    asyncio.run(run.call(run.worker(EngineWithSlots(row_s=0.5), engine_timeout_s=0.2), 0))
    assert run.counts(0) == (8, 0)


def test_duplicate_unit_is_committed_once(scene):
    run = scene()
    actor = run.worker(EngineWithSlots(row_s=0.05))

    async def both_actors():
        return await asyncio.gather(run.call(actor, 0), run.call(actor, 0))

    receipts = [receipt.column("usage")[0].as_py() for (receipt,) in asyncio.run(both_actors())]
    assert sorted(usage is None for usage in receipts) == [False, True]
    assert run.counts(0) == (8, 0)
    assert not list(run.run.suspects.iterdir())


def test_self_check_runs_once_before_the_first_row(scene):
    class Counting(FakeEngine):
        def __init__(self, *, is_wrong=False):
            super().__init__(FakeTraits(is_wrong=is_wrong))
            self.events, answer = [], self.checkable.answer

            async def counted(*arguments, **options):
                self.events.append("check")
                await asyncio.sleep(0.05)
                return await answer(*arguments, **options)

            self.checkable.answer = counted

        async def generate(self, *request):
            self.events.append("row")
            return await super().generate(*request)

    async def both(actor):
        return await asyncio.gather(run.call(actor, 0), run.call(actor, 1), return_exceptions=True)

    run, right, wrong = scene(), Counting(), Counting(is_wrong=True)
    refusals = asyncio.run(both(run.worker(wrong)))
    assert [type(refusal) for refusal in refusals] == [EngineError, EngineError]
    assert "failed its self-check: token 1 of" in refusals[0].message
    assert not run.run.committed()
    asyncio.run(both(run.worker(right)))
    assert run.run.committed() == {0, 1}
    # The greedy request and a concurrent sampled one.
    assert (wrong.events, right.events[:3], right.events.count("check")) == (["check"] * 2, ["check"] * 2 + ["row"], 2)
    for engine_worker in run.workers:
        engine_worker._session.end()
    sessions = run.run.sessions()
    assert sorted(json.loads(session.self_check)["outcome"] for session in sessions) == ["failed", "passed"]
    assert sum(session.num_output_tokens for session in sessions) == sum(
        run.run.usage(unit).num_output_tokens for unit in (0, 1)
    ), "the self-check's tokens must not count as output"


def test_hanging_self_check_ends_the_run(scene):
    class Hanging(FakeEngine):
        def signs_of_life(self):
            return 0

    async def never(*_, **__):
        await asyncio.sleep(60)

    run, engine = scene(), Hanging()
    engine.checkable.answer = never
    with pytest.raises(EngineError, match=r"no sign of life in its self-check for 0\.2 s"):
        asyncio.run(run.call(run.worker(engine, engine_timeout_s=0.2), 0))


@pytest.mark.parametrize(("is_lost", "ends_with"), [(True, ProcessEnded), (False, EngineError)])
def test_lost_node_restarts_the_engine(scene, monkeypatch, is_lost, ends_with):
    def start(spec, *, engine_index, num_engines_on_node, node_rank):
        assert node_rank == "rank"
        raise EngineError("vLLM did not start: its core ended")

    followers = SimpleNamespace(rank="rank", failure=EngineError("no memory on node 1"), is_lost=is_lost)
    monkeypatch.setattr(engine_start, "Followers", lambda run, session_id: followers)
    monkeypatch.setattr("pipelines.cluster.node.start_vllm", start)
    run_scene = scene()
    engine_worker = run_scene.worker(FakeEngine())
    spec = EngineSpec(model="m", tensor_parallel_size=2, num_nodes=2)
    vllm = run_scene.resolved.config.model_copy(update={"engine": "vllm"})
    run = replace(run_scene.resolved, config=vllm, engine=replace(run_scene.resolved.engine, spec=spec))
    with pytest.raises(ends_with) as ended:
        start_engine(run, engine_worker._session)
    assert is_lost or ended.value is followers.failure
    (session,) = run_scene.run.sessions()
    assert session.ended == is_lost


class Lender:
    """Lends a fake engine that bills two seconds per row."""

    num_slots = 3

    def lend(self, meter):
        class Billing(FakeEngine):
            async def generate(self, *request):
                meter.bill(2.0)
                return await super().generate(*request)

        return Billing()


def test_lent_engine_is_billed_per_row(scene):
    run = scene()
    engine_worker = run.worker(None, lender=Lender())
    asyncio.run(run.call(engine_worker, 0))
    engine_worker._close()
    (session,) = run.run.sessions()
    assert is_lent(session.session_id)
    assert (session.load_s, session.busy_s, session.idle_s, session.self_check) == (0.0, 16.0, 0.0, "")
    assert (run.counts(0), run.run.usage(0).busy_s) == ((8, 0), 16.0)
