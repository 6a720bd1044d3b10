"""The self-check with simulated engines: outcomes, refusals and messages."""

import asyncio
import dataclasses
import json
import math

import pytest
from devices import cpu

from peagle.engine.fake import FakeEngine, FakeTraits
from peagle.engine.interface import Judgement, RequestRefused, SelfCheck
from peagle.engine.self_check import (
    LIMIT_S,
    NUM_TOKENS,
    count_outcomes,
    require_none_failed,
    require_passed,
    self_check,
)
from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.errors import EngineError

CPU = cpu("avx512f")
SPEC = EngineSpec(model="m", precision="bf16", max_num_seqs=4)
SPEC_WITH_DRAFTER = dataclasses.replace(
    SPEC, drafter=DrafterSpec(method="peagle", model="head", num_speculative_tokens=3)
)


class Engine:
    """An engine whose answers have the given logprob margins to the likeliest tokens. The last margin is repeated."""

    def __init__(self, *margins, max_model_len=512, num_tokens=None):
        self.max_model_len = max_model_len
        self._margins, self._num_tokens = margins or (0.0,), num_tokens
        self.requests = []
        self.judged = []

    def to_token_ids(self, text):
        return list(range(100, 100 + len(text.split())))

    async def answer(self, prompt, *, num_tokens, temperature):
        self.requests.append((len(prompt), num_tokens, temperature))
        return list(range(num_tokens if self._num_tokens is None else self._num_tokens))

    async def judge(self, token_ids, begin):
        self.judged = list(token_ids)
        positions = range(len(token_ids) - begin)
        margins = [self._margins[min(position, len(self._margins) - 1)] for position in positions]
        return [Judgement(token=" a", logprob=-1 - m, likeliest=" b", likeliest_logprob=-1.0) for m in margins]


def check(engine, spec=SPEC_WITH_DRAFTER, limit_s=LIMIT_S):
    return asyncio.run(self_check(engine, spec, CPU, limit_s=limit_s))


def test_likeliest_tokens_and_ties_pass(capsys):
    result = check(Engine(0.0, 0.25, 0.0))
    assert (result.outcome, result.num_tokens) == ("passed", NUM_TOKENS)
    assert (result.num_ties, result.largest_margin) == (1, 0.25)
    require_passed(result)
    assert "self-check passed: 32 tokens, 1 ties" in capsys.readouterr().err


@pytest.mark.parametrize("margin", [0.26, 8.0, math.inf, math.nan])
def test_one_wrong_token_fails(margin):
    result = check(Engine(0.0, 0.0, margin, 0.0))
    assert result.outcome == "failed"
    assert "token 2 of the greedy answer is ' a' (log-probability " in result.seen
    assert "without a drafter the target prefers ' b' (-1.000); 1 of 32 tokens differ" in result.seen
    json.dumps(result.to_dict(), allow_nan=False)


def test_tolerance_depends_on_the_precision():
    float32_spec = dataclasses.replace(SPEC_WITH_DRAFTER, precision="float32")
    assert check(Engine(0.2)).outcome == "passed"
    assert check(Engine(0.2), float32_spec).outcome == "failed"


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (SPEC_WITH_DRAFTER, "--drafter none or --enforce-eager"),
        (
            dataclasses.replace(SPEC, precision="fp8", enforce_eager=True),
            "--kv-cache-precision bf16",
        ),
        (dataclasses.replace(SPEC_WITH_DRAFTER, precision="auto"), "--drafter none or --enforce-eager"),
    ],
)
def test_failed_check_has_a_hint(spec, options):
    with pytest.raises(EngineError, match=r"failed its self-check: token 0 of .* is ' a'") as caught:
        require_passed(check(Engine(8.0), spec))
    assert caught.value.hint.endswith(f"; try {options} to find out which kernel it is")


def test_failed_check_among_recorded_checks_is_an_error():
    passed, failed = check(Engine()).to_json(), check(Engine(8.0), SPEC_WITH_DRAFTER).to_json()
    require_none_failed([passed, ""])
    with pytest.raises(EngineError, match="failed its self-check") as caught:
        require_none_failed([passed, "", failed])
    assert "--drafter none" in caught.value.hint


def test_sampled_request_runs_in_the_same_batch():
    engine, unbatched = Engine(), Engine()
    check(engine)
    check(unbatched, dataclasses.replace(SPEC_WITH_DRAFTER, max_num_seqs=1))
    assert [request[1:] for request in engine.requests] == [(NUM_TOKENS, 0.0), (NUM_TOKENS // 4, 1.0)]
    assert [request[1:] for request in unbatched.requests] == [(NUM_TOKENS, 0.0)]
    assert engine.judged[-NUM_TOKENS:] == list(range(NUM_TOKENS)), "the greedy answer is judged"


@pytest.mark.parametrize(("max_model_len", "num_tokens"), [(2, 0), (3, 1), (8, 3), (40, 21), (64, NUM_TOKENS)])
def test_short_context_has_a_short_check(max_model_len, num_tokens):
    engine = Engine(max_model_len=max_model_len)
    result = check(engine)
    assert result.num_tokens == num_tokens
    assert result.outcome == ("passed" if num_tokens else "skipped")
    assert len(engine.judged) < max_model_len, "judging needs room for one more token"


def test_engine_without_drafts_checks_fewer_tokens():
    assert check(Engine(), SPEC).num_tokens == NUM_TOKENS // 2


def test_empty_answer_fails():
    assert check(Engine(num_tokens=0)).seen == "the answer is empty"
    assert check(Engine(num_tokens=5)).num_tokens == 5


def test_synthetic_acceptance_is_skipped():
    synthetic = DrafterSpec(method="peagle", model="h", num_speculative_tokens=1, synthetic_rates=(0.5,))
    result = check(Engine(8.0), dataclasses.replace(SPEC, drafter=synthetic))
    assert result.outcome == "skipped"
    require_passed(result)


def test_engine_without_logprobs_is_skipped():
    class WithoutLogprobs(Engine):
        async def judge(self, token_ids, begin):
            raise RequestRefused("max_logprobs is 0")

    assert check(WithoutLogprobs()).seen == "the engine refused the request: max_logprobs is 0"


def test_check_has_a_time_limit():
    class Hanging(Engine):
        async def answer(self, prompt, *, num_tokens, temperature):
            await asyncio.sleep(60)
            raise AssertionError

    with pytest.raises(EngineError, match=r"did not answer its self-check within 0\.05 s"):
        check(Hanging(), limit_s=0.05)


def test_fake_engine_passes_unless_wrong():
    assert check(FakeEngine().checkable).outcome == "passed"
    assert check(FakeEngine(FakeTraits(is_wrong=True)).checkable).outcome == "failed"
    assert check(FakeEngine(max_model_len=16).checkable).num_tokens == 7


def test_outcomes_are_counted():
    outcomes = [SelfCheck(outcome=outcome).to_json() for outcome in ("passed", "passed", "skipped")]
    assert count_outcomes([*outcomes, ""]) == {"passed": 2, "failed": 0, "skipped": 1, "unchecked": 1}
