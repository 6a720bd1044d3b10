import asyncio
import json
from functools import partial
from types import SimpleNamespace

import pytest

from peagle.economics.ledger import RequestReader
from pipelines.online.answers import events
from pipelines.online.relay import relay

USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}
DRAFTS = {"speculative_decoding": {"acceptance_histogram": [1, 1], "num_draft_tokens": 2}}


def event(**fields):
    return f"data: {json.dumps(fields)}\n\n"


def token(text, count):
    return event(choices=[{"delta": {"content": text}}], usage={"prompt_tokens": 5, "completion_tokens": count})


STREAM = [[token("Hé", 1), token("llo", 2)], [event(choices=[], usage=USAGE, metrics=DRAFTS), "data: [DONE]\n\n"]]


async def generate(items, error=None):
    for item in items:
        yield item
    if error:
        raise error


def passed(account, answers, **options):
    async def collect():
        return [item async for item in relay(answers, partial(account.begin, "r1", "alice"), **options)]

    return asyncio.run(collect())


def record(tmp_path):
    (request,) = RequestReader(tmp_path / "ledger").new()
    return request


def test_a_stream_passes_without_the_usage_that_nobody_asked_for(engine_account, clock, tmp_path):
    engine_account.ready()
    out = passed(engine_account, generate(STREAM), wants_each_usage=False)
    first, second = [list(events(text)) for text in out[0]]
    assert first == [{"choices": [{"delta": {"content": "Hé"}}]}]
    assert "usage" not in second[0]
    (last,), end = (list(events(text)) for text in out[1])
    assert (last["usage"], end) == (USAGE, ["data: [DONE]\n\n"])
    assert last["peagle"]["request_id"] == "r1"
    assert last["peagle"]["num_accepted_tokens"] == 1


def test_usage_in_each_event_stays_for_who_asked(engine_account):
    out = passed(engine_account, generate(STREAM), wants_each_usage=True)
    assert next(events(out[0][1]))["usage"]["completion_tokens"] == 2


def test_the_record_has_tokens_drafts_time_and_money(engine_account, clock, tmp_path):
    engine_account.ready()

    async def slow():
        clock.now += 2
        yield STREAM[0]
        clock.now += 3
        yield STREAM[1]

    passed(engine_account, slow(), wants_each_usage=False)
    done = record(tmp_path)
    assert (done.request_id, done.key, done.model, done.drafter, done.outcome) == ("r1", "alice", "m", "head", "ok")
    assert done.ttft_s == pytest.approx(2)
    assert done.usage.busy_s == pytest.approx(5)
    assert done.usd == pytest.approx(5 * 2 * 0.01)
    assert (done.usage.num_prompt_tokens, done.usage.num_cached_tokens, done.usage.num_output_tokens) == (5, 4, 2)
    assert done.usage.speculation.accepted_per_position == (1,)


def test_a_client_that_leaves_pays_for_what_it_got(engine_account, tmp_path):
    closed = []

    async def answers():
        try:
            yield STREAM[0]
            yield STREAM[1]
        finally:
            closed.append(True)

    async def leave():
        stream = relay(answers(), partial(engine_account.begin, "r1", "alice"), wants_each_usage=False)
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(leave())
    assert (record(tmp_path).outcome, record(tmp_path).usage.num_output_tokens, closed) == ("cut", 2, [True])


def test_a_client_that_leaves_pays_for_every_choice(engine_account, tmp_path):
    def chosen(index, count):
        return event(choices=[{"index": index, "delta": {}}], usage={"prompt_tokens": 5, "completion_tokens": count})

    async def leave():
        answers = generate([[chosen(0, 1), chosen(1, 1)], [chosen(0, 2), chosen(1, 3)], STREAM[1]])
        stream = relay(answers, partial(engine_account.begin, "r1", "alice"), wants_each_usage=False)
        await anext(stream)
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    assert (record(tmp_path).outcome, record(tmp_path).usage.num_output_tokens) == ("cut", 5)
    assert record(tmp_path).usage.num_prompt_tokens == 5


@pytest.mark.parametrize(("choices_per_prompt", "num_prompt_tokens"), [(1, 5 + 7 + 9), (2, 5 + 9)])
def test_a_client_that_leaves_pays_for_every_prompt(engine_account, tmp_path, choices_per_prompt, num_prompt_tokens):
    def chosen(index, prompt_tokens, count):
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count}
        return event(choices=[{"index": index, "text": "x"}], usage=usage)

    async def leave():
        second = 7 if choices_per_prompt == 1 else 5
        answers = generate([[chosen(2, 9, 1), chosen(0, 5, 1)], [chosen(1, second, 2), chosen(0, 5, 3)], STREAM[1]])
        begin = partial(engine_account.begin, "r1", "alice", choices_per_prompt)
        stream = relay(answers, begin, wants_each_usage=False)
        await anext(stream)
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    assert (record(tmp_path).outcome, record(tmp_path).usage.num_output_tokens) == ("cut", 6)
    assert record(tmp_path).usage.num_prompt_tokens == num_prompt_tokens


def test_an_engine_that_dies_leaves_a_failed_record(engine_account, tmp_path):
    with pytest.raises(RuntimeError, match="dead"):
        passed(engine_account, generate(STREAM[:1], RuntimeError("dead")), wants_each_usage=False)
    assert (record(tmp_path).outcome, record(tmp_path).usage.num_failed_rows) == ("failed", 1)


def test_an_error_in_a_stream_is_no_success(engine_account, tmp_path):
    out = passed(engine_account, generate([[event(error={"message": "no"})]]), wants_each_usage=False)
    assert next(events(out[0][0])) == {"error": {"message": "no"}}
    assert record(tmp_path).outcome == "failed"


class Whole(SimpleNamespace):
    def model_dump(self, include):
        return {name: getattr(self, name) for name in include}


@pytest.mark.parametrize(
    "answer",
    [
        Whole(usage=USAGE, metrics=DRAFTS),
        SimpleNamespace(error=SimpleNamespace(code=400)),
        [event(error={"message": "no"})],
    ],
)
def test_where_nobody_sees_a_first_token_there_is_no_time_to_it(engine_account, clock, tmp_path, answer):
    async def slow():
        clock.now += 2
        yield answer

    passed(engine_account, slow(), wants_each_usage=False)
    assert record(tmp_path).ttft_s is None


def test_a_whole_answer_gets_the_summary(engine_account, tmp_path):
    (answer,) = passed(engine_account, generate([Whole(usage=USAGE, metrics=DRAFTS)]), wants_each_usage=False)
    assert answer.peagle["acceptance_length"] == 1.5
    assert record(tmp_path).usage.num_output_tokens == 2


def test_a_refusal_of_the_engine_passes_as_it_is(engine_account, tmp_path):
    refusal = SimpleNamespace(error=SimpleNamespace(code=400))
    assert passed(engine_account, generate([refusal]), wants_each_usage=False) == [refusal]
    assert record(tmp_path).outcome == "failed"


def test_an_engine_that_dies_leaves_no_record(engine_account, tmp_path):
    class EngineDeadError(Exception):
        pass

    with pytest.raises(EngineDeadError):
        passed(engine_account, generate(STREAM[:1], EngineDeadError()), wants_each_usage=False)
    assert not RequestReader(tmp_path / "ledger").new()
