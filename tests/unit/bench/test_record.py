import json
import statistics

import pytest
from usage_records import drafts

from peagle.bench.engine import Answer, PassResult
from peagle.bench.plan import Pass
from peagle.bench.prompts import BenchPrompt
from peagle.bench.record import (
    UNCATEGORISED,
    CategoryResult,
    PassRecord,
    RequestTimes,
    by_category,
    make_record,
    mean_step_s,
    summarise,
)
from peagle.engine.fake import FakeEngine
from peagle.engine.interface import Generation
from peagle.speculation import SpeculationStats

from .conftest import engine_setup, make_pass_record


def request_times(num_output_tokens, elapsed_s, decode_s):
    return RequestTimes(num_output_tokens=num_output_tokens, elapsed_s=elapsed_s, decode_s=decode_s)


def test_request_times_have_ttft_tpot_and_speed():
    request = request_times(11, elapsed_s=2.5, decode_s=2.0)
    assert (request.ttft_s, request.tpot_s, request.tokens_per_s) == (0.5, 0.2, 4.4)
    assert request_times(1, 0.5, 0.0).tpot_s is None
    assert (request_times(5, 1.0, None).ttft_s, request_times(5, 1.0, None).tpot_s) == (None, None)


def test_summary_has_medians_over_passes():
    passes = [
        make_pass_record(
            repeat=i,
            wall_s=wall_s,
            requests=[request_times(11, 1.0 + i, 1.0), request_times(21, 2.0, 1.0)],
            speculation=drafts(8, 4),
        )
        for i, wall_s in enumerate((1.0, 2.0, 4.0))
    ]
    cell = summarise(passes, usd_per_s=0.001)
    assert cell["output_tokens_per_s"] == 16  # 32, 16 and 8
    assert cell["spread"] == (32 - 8) / 16
    assert cell["repeats"] == 3
    assert cell["ttft_s"]["p50"] == statistics.median([0.0, 1.0, 2.0, 1.0, 1.0, 1.0])
    assert cell["tpot_s"] == {"p50": pytest.approx(0.075), "p95": pytest.approx(0.1), "p99": pytest.approx(0.1)}
    assert cell["user_tokens_per_s"] == statistics.median([11, 5.5, 11 / 3, 10.5, 10.5, 10.5])
    assert cell["tokens_per_usd"] == 16_000
    assert (cell["num_drafts"], cell["acceptance_length"], cell["acceptance_rates"]) == (24, 1.5, [0.5])
    assert cell["num_responses"] == 6


def test_mean_step_time_is_decode_time_per_step():
    assert mean_step_s([make_pass_record()]) == pytest.approx(1.5 / 10)  # 10 drafts, each verified by a step
    assert mean_step_s([make_pass_record("none")]) == pytest.approx(1.5 / 20)  # 21 tokens, one of them from prefill
    # 4 of 20 tokens are accepted drafts: 16 steps, 5 of them with a draft.
    assert mean_step_s([make_pass_record(speculation=drafts(5, 3, 1, 0))]) == pytest.approx(1.5 / 16)
    assert mean_step_s([make_pass_record("ngram", speculation=drafts(5, 3, 1, 0))]) == pytest.approx(1.5 / 16)
    assert mean_step_s([make_pass_record(requests=[request_times(5, 1.0, None)])]) is None
    assert mean_step_s([make_pass_record("none", requests=[request_times(1, 1.0, 0.0)])]) is None


def test_pass_record_round_trip():
    original = make_pass_record(
        by_category={"maths": CategoryResult(num_responses=1, num_output_tokens=4, speculation=drafts(3, 2))}
    )
    loaded = PassRecord.from_dict(json.loads(json.dumps(original.to_dict())))
    assert (loaded.requests, loaded.speculation) == (list(original.requests), original.speculation)
    assert json.dumps(loaded.to_dict()) == json.dumps(original.to_dict())


def test_summary_of_passes_without_responses():
    cell = summarise([make_pass_record(requests=[], num_refused=3)] * 2, usd_per_s=1)
    assert (cell["output_tokens_per_s"], cell["spread"], cell["ttft_s"], cell["num_refused"]) == (0, None, None, 6)


def make_generation(speculation, num_output_tokens=5):
    return Generation(
        text="", finish_reason="stop", num_prompt_tokens=1, num_cached_tokens=0, num_output_tokens=num_output_tokens,
        speculation=speculation, ttft_s=None, latency_s=None,
    )  # fmt: skip


def record_of(*generations, drafted):
    """Return the record of a pass; `drafted` are the drafts that the engine counted."""
    pass_result = PassResult(
        answers=[Answer(generation=generation, elapsed_s=1.0) if generation else None for generation in generations],
        wall_s=1.0,
        drafted=drafted,
    )
    prompts = [BenchPrompt(token_ids=[1], category="a")] * len(generations)
    planned_pass = Pass(setup=engine_setup(), concurrency=1, repeat=0)
    return make_record(planned_pass, prompts, pass_result, FakeEngine(), start_s=1.0, peak_memory_gib=None)


def test_drafts_counted_by_requests_have_priority_over_engine_counts():
    responses = [make_generation(drafts(2, 1, 0)), make_generation(drafts(3, 3, 2)), make_generation(None), None]
    result = record_of(*responses, drafted=drafts(9, 9))
    assert result.speculation == drafts(5, 4, 2)
    assert (len(result.requests), result.num_refused, result.by_category["a"].num_responses) == (3, 1, 3)


def test_drafts_counted_by_the_engine_are_used_if_requests_have_none():
    result = record_of(make_generation(None), drafted=drafts(9, 4))
    assert (result.speculation, result.by_category) == (drafts(9, 4), {})
    assert record_of(make_generation(None), drafted=None).speculation == SpeculationStats.empty()


def test_responses_are_grouped_by_category():
    generations = [make_generation(drafts(2, 1)), None, make_generation(drafts(3, 3), 7), make_generation(drafts(1, 0))]
    results = by_category(generations, ["b", "b", "a", None])
    assert list(results) == [UNCATEGORISED, "a", "b"]
    assert results["a"] == CategoryResult(num_responses=1, num_output_tokens=7, speculation=drafts(3, 3))
    assert results["b"].num_responses == 1
