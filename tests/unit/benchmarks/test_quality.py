"""What the quality benchmark asks an engine, and what its figures add up to."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.precision.quality import drawn, greedy_answers, nats
from benchmarks.precision.summary import summarize
from peagle.speculation import SpeculationStats

DRAFTS = SpeculationStats.from_histogram([1, 1], 2)


class Engine:
    """Answers with its prompt's ids; each token's log-probability is minus its id."""

    def __init__(self) -> None:
        self.checkable: Any = self
        self.asked: list[Any] = []

    async def generate(self, request_id: str, prompt: list[int], sampling: Any) -> Any:
        self.asked.append(sampling)
        await asyncio.sleep(0.05 / len(prompt))  # the last one is answered first
        return SimpleNamespace(text=f"{prompt}", speculation=DRAFTS)

    async def judge(self, token_ids: Sequence[int], begin: int) -> list[Any]:
        return [SimpleNamespace(logprob=-float(token)) for token in token_ids[begin:]]


def test_a_likelihood_is_that_of_the_response_alone() -> None:
    assert asyncio.run(nats(Engine(), {"a": ([5, 5], [1, 2]), "b": ([7], [3])})) == {"a": 3.0, "b": 3.0}  # type: ignore[arg-type]


def test_answers_are_greedy_and_stand_by_their_prompts() -> None:
    engine = Engine()
    answers, stats = asyncio.run(greedy_answers(engine, {"a": [1], "b": [2, 3]}, 9))  # type: ignore[arg-type]
    assert (answers, stats) == ({"a": "[1]", "b": "[2, 3]"}, DRAFTS + DRAFTS)
    assert engine.asked == [{"temperature": 0.0, "max_tokens": 9}] * 2


def test_more_responses_begin_with_the_fewer() -> None:
    rows = [{"id": number} for number in range(20)]
    assert drawn(rows, 20)[:5] == drawn(rows, 5) != rows[:5]


def test_the_figures_add_up() -> None:
    def alone(nats: Sequence[float], passed: Sequence[bool]) -> dict[str, Any]:
        return {
            "answers": dict(zip("ab", map(str, passed), strict=True)),
            "passed": dict(zip("ab", passed, strict=True)),
            "solutions": dict(zip("ab", nats, strict=True)),
        }

    bf16 = {"none": alone([5.0, 9.0], [True, True]), "peagle": {"drafts": DRAFTS.to_dict()}}
    result = {"num_tokens": {"solutions": {"a": 10, "b": 30}}, "engines": {"bf16": bf16, "int8": {}}}
    found = summarize(result)
    assert (found["passed"], found["acceptance"]["bf16"]["peagle"]) == ({"bf16": 2}, {"length": 1.5, "rates": [0.5]})
    assert found["nats_per_token"]["solutions"]["bf16"] == 14 / 40

    result["engines"]["int8"] = {"none": alone([6.0, 9.0], [True, False])}
    found = summarize(result)
    assert found["passed"] == {"bf16": 2, "int8": 1}
    assert (found["passed_with_bf16_alone"], found["passed_with_int8_alone"], found["equal_answers"]) == (1, 0, 1)
    texts = found["nats_per_token"]["solutions"]
    assert (texts["bf16"], texts["int8"], texts["num_texts"], texts["num_tokens"]) == (14 / 40, 15 / 40, 2, 40)
    assert (texts["more"], texts["standard_error"]) == (pytest.approx(0.05), pytest.approx(0.05))
