import asyncio
import os
import signal

import pytest

from peagle.engine.fake import FakeEngine, FakeTraits
from peagle.errors import EngineError

GREEDY = {"temperature": 0.0, "max_tokens": 8}


def generate(sampling, **engine):
    return asyncio.run(FakeEngine(**engine).generate("r", [1, 2, 3], sampling))


def test_single_response_has_no_completions():
    generation = generate(GREEDY)
    assert generation.completions == ()
    assert generation.num_output_tokens == len(generation.text.split())


def test_several_responses_differ_and_the_first_equals_a_single_response():
    generation = generate({**GREEDY, "n": 3}, num_speculative_tokens=4)
    assert len({completion.text for completion in generation.completions}) == 3
    assert generation.text == generation.completions[0].text == generate(GREEDY).text
    assert generation.num_output_tokens == sum(c.num_output_tokens for c in generation.completions)


def test_every_output_token_has_logprobs():
    generation = generate({**GREEDY, "logprobs": 2})
    (completion,) = generation.completions
    assert "".join(token.token for token in completion.logprobs) == generation.text
    assert len(completion.logprobs) == generation.num_output_tokens
    assert [len(token.top) for token in completion.logprobs] == [2] * generation.num_output_tokens
    assert generate({**GREEDY, "logprobs": 0}).completions[0].logprobs[0].top == ()


def test_time_in_the_queue_counts_toward_latency():
    token_s, sampling = 0.02, {**GREEDY, "ignore_eos": True}

    async def run_requests():
        engine = FakeEngine(FakeTraits(token_s=token_s), max_num_seqs=2)
        return await asyncio.gather(*(engine.generate(str(n), [n], sampling) for n in range(5)))

    # Five requests in two slots: the third request waits for one other, the fifth for two.
    latencies = sorted(answer.latency_s for answer in asyncio.run(run_requests()))
    assert latencies[2] >= 2 * GREEDY["max_tokens"] * token_s
    assert latencies[4] >= 3 * GREEDY["max_tokens"] * token_s


def test_stream_ends_like_a_whole_answer():
    async def run_requests():
        engine = FakeEngine(num_speculative_tokens=2)
        sampling = {**GREEDY, "n": 2, "logprobs": 0}
        parts = [part async for part in engine.stream("r", [1, 2, 3], sampling)]
        return parts, await engine.generate("r", [1, 2, 3], sampling)

    parts, whole = asyncio.run(run_requests())
    assert [g for _, g in parts[:-1]] == [None] * (len(parts) - 1)
    last = parts[-1][1]
    assert (last.text, last.completions, last.speculation) == (whole.text, whole.completions, whole.speculation)
    for index, completion in enumerate(whole.completions):
        partial = [completions[index] for completions, _ in parts]
        assert [c.num_output_tokens for c in partial] == [
            min(n, completion.num_output_tokens) for n in range(1, len(parts) + 1)
        ]
        assert all(completion.text.startswith(c.text) and len(c.logprobs) == c.num_output_tokens for c in partial)


def test_poisoned_prompt_kills_the_engine():
    async def run_requests():
        engine = FakeEngine(FakeTraits(die_on="rat poison", token_s=0.05))
        running = asyncio.create_task(engine.generate("a", list(b"cheese"), GREEDY))
        await asyncio.sleep(0.01)
        outcomes = [
            await asyncio.gather(engine.generate(name, list(prompt), GREEDY), return_exceptions=True)
            for name, prompt in (("b", b"some rat poison"), ("c", b"cheese"))
        ]
        return [*outcomes, await asyncio.gather(running, return_exceptions=True)]

    for (outcome,) in asyncio.run(run_requests()):
        assert isinstance(outcome, EngineError)


def test_engine_dies_with_its_process():
    engine = FakeEngine(FakeTraits(has_core=True))
    try:
        assert asyncio.run(engine.generate("a", [1, 2, 3], GREEDY)).text == generate(GREEDY).text
        os.kill(engine._core.pid, signal.SIGKILL)
        os.waitid(os.P_PID, engine._core.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(EngineError):
            asyncio.run(engine.generate("b", [1, 2, 3], GREEDY))
    finally:
        engine.shutdown()


def test_shutdown_ends_the_process():
    engine = FakeEngine(FakeTraits(has_core=True))
    engine.shutdown()
    with pytest.raises(ProcessLookupError):
        os.kill(engine._core.pid, 0)


def test_hanging_engine_shows_no_sign_of_life():
    async def run_requests():
        engine = FakeEngine(FakeTraits(hang_on="pit"))
        await engine.generate("a", list(b"cheese"), GREEDY)
        before = [engine.signs_of_life(), engine.signs_of_life()]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate("b", list(b"a pit"), GREEDY), 0.05)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate("c", list(b"cheese"), GREEDY), 0.05)
        return before, [engine.signs_of_life(), engine.signs_of_life()]

    before, after = asyncio.run(run_requests())
    assert before[0] < before[1]
    assert after[0] == after[1]


def test_kill_ends_the_process():
    engine = FakeEngine(FakeTraits(has_core=True))
    engine.kill()
    engine.shutdown()
    assert engine._core.returncode == -signal.SIGKILL
