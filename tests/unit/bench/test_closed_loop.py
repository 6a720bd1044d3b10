import asyncio
from typing import Any

import pytest

from peagle.bench import engine as bench_engine
from peagle.bench.engine import Loop, difference, run_loop
from peagle.bench.prompts import BenchPrompt
from peagle.engine.fake import FakeEngine
from peagle.engine.interface import Generation, RequestRefused
from peagle.speculation import SpeculationStats

PROMPTS = [BenchPrompt(token_ids=[i], category=None) for i in range(6)]
SAMPLING = {"temperature": 0.0, "max_tokens": 20}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engine, "_COUNTERS_SETTLE_S", 0.0)


class Watched(FakeEngine):
    """Notes who asks for what, and how many at once; refuses one of the requests."""

    def __init__(self, refused: str = "") -> None:
        super().__init__(num_speculative_tokens=2)
        self.asked: list[tuple[str, int]] = []
        self.most_running = self._running = 0
        self._refused = refused

    async def generate(self, request_id: str, prompt: list[int], sampling: Any) -> Generation:
        if request_id == self._refused:
            raise RequestRefused("not this one")
        self.asked.append((request_id, sampling["max_tokens"]))
        self._running += 1
        self.most_running = max(self.most_running, self._running)
        try:
            return await super().generate(request_id, prompt, sampling)
        finally:
            self._running -= 1


def run(engine: Watched, concurrency: int = 2, num_warm_up: int = 1) -> tuple[Loop, list[tuple[int, int]]]:
    seen: list[tuple[int, int]] = []
    loop = asyncio.run(
        run_loop(
            engine,
            PROMPTS,
            sampling=SAMPLING,
            concurrency=concurrency,
            progress=lambda done, total: seen.append((done, total)),
            num_warm_up=num_warm_up,
        )
    )
    return loop, seen


def test_every_prompt_is_asked_once_with_so_many_at_a_time() -> None:
    engine = Watched()
    loop, seen = run(engine, concurrency=3)
    assert engine.most_running == 3
    assert [request for request, _ in engine.asked[1:]] == [str(i) for i in range(6)]
    assert len(loop.responses) == 6
    assert seen == [(i, 6) for i in range(1, 7)]


def test_the_warm_up_is_short_and_in_no_figure() -> None:
    engine = Watched()
    loop, _ = run(engine, concurrency=4, num_warm_up=4)
    assert engine.asked[:4] == [(f"warm-up-{i}", 8) for i in range(4)]
    assert loop.drafted == sum((g.speculation for g in loop.responses if g.speculation), start=SpeculationStats.empty())


def test_a_refused_request_has_no_answer_and_the_others_go_on() -> None:
    loop, seen = run(Watched(refused="2"))
    assert [answer is None for answer in loop.answers] == [False, False, True, False, False, False]
    assert loop.generations[2] is None
    assert seen[-1] == (6, 6)


def test_difference_of_two_readings() -> None:
    def stats(num_drafts: int, *accepted: int) -> SpeculationStats:
        return SpeculationStats(
            num_drafts=num_drafts, num_draft_tokens=num_drafts * len(accepted), accepted_per_position=accepted
        )

    assert difference(stats(10, 6, 3), stats(4, 3, 1)) == stats(6, 3, 2)
    assert difference(stats(10, 6, 3), SpeculationStats.empty()) == stats(10, 6, 3)
    assert difference(None, stats(1, 1)) is None
