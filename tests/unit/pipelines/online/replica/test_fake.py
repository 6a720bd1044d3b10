import asyncio
import json
import os
import signal
from types import SimpleNamespace

import pytest
from ray.serve.llm.openai_api_models import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    ErrorResponse,
)
from vllm.v1.engine.exceptions import EngineDeadError

from pipelines.online.config import ServedModelOptions
from pipelines.online.replica.fake import FakeServeEngine
from pipelines.online.wire import AnswerTally, events

CONFIG = SimpleNamespace(model_id="m", engine_kwargs={"max_model_len": 200})
CHAT = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 8}
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def answer(kind="chat", engine=None, **body):
    """Return all parts of the fake engine's answer: one object, or the events of a stream."""

    async def main():
        serve_engine = engine or FakeServeEngine(ServedModelOptions(engine="fake", num_speculative_tokens=3), CONFIG)
        if engine is None:
            await serve_engine.start()
        request = ChatCompletionRequest(**body) if kind == "chat" else CompletionRequest(**body)
        return [part async for part in getattr(serve_engine, kind)(request)]

    return asyncio.run(main())


def test_stream_equals_the_whole_answer():
    (response,) = answer(**CHAT)
    assert isinstance(response, ChatCompletionResponse)
    texts = answer(**CHAT, **STREAM)
    assert texts[-1] == "data: [DONE]\n\n"
    parts = [event for text in texts[:-1] for event in events(text)]
    assert "".join(c["delta"]["content"] for p in parts for c in p["choices"]) == response.choices[0].message.content
    assert parts[-2]["choices"][0]["finish_reason"] == response.choices[0].finish_reason
    tallies = AnswerTally(), AnswerTally()
    tallies[0].read(json.loads(response.model_dump_json()))
    for part in parts:
        tallies[1].read_event(part)
    assert tallies[0] == tallies[1]
    assert tallies[0].num_output_tokens == len(response.choices[0].message.content.split())
    assert tallies[0].speculation.num_draft_tokens == 3 * tallies[0].speculation.num_drafts


def test_logprobs_have_openais_format():
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    (response,) = answer(**body)
    choice = response.choices[0]
    content = [token.model_dump(exclude={"top_logprobs"}) for token in choice.logprobs.content]
    assert "".join(token["token"] for token in content) == choice.message.content
    assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * response.usage.completion_tokens
    parts = [part for text in answer(**body, **STREAM)[:-1] for part in events(text) if part["choices"]]
    streamed_tokens = [token for part in parts for token in part["choices"][0]["logprobs"]["content"]]
    assert [token["token"] for token in streamed_tokens] == [token["token"] for token in content]

    body = {"prompt": "x", "temperature": 0, "max_tokens": 4, "ignore_eos": True, "logprobs": 1}
    (response,) = answer("completions", **body)
    result = response.choices[0].logprobs
    assert "".join(result.tokens) == response.choices[0].text
    for offset, token in zip(result.text_offset, result.tokens, strict=True):
        assert response.choices[0].text[offset:].startswith(token)
    parts = [part for text in answer("completions", **body, **STREAM)[:-1] for part in events(text) if part["choices"]]
    assert [offset for part in parts for offset in part["choices"][0]["logprobs"]["text_offset"]] == result.text_offset
    (without_logprobs,) = answer(**CHAT)
    assert without_logprobs.choices[0].logprobs is None


def test_usage_in_an_event_counts_only_its_choice():
    """As in vLLM."""
    parts = [part for text in answer(**CHAT | {"temperature": 1.0}, **STREAM, n=3)[:-1] for part in events(text)]
    num_tokens = {part["choices"][0]["index"]: part["usage"]["completion_tokens"] for part in parts if part["choices"]}
    assert parts[-1]["usage"]["completion_tokens"] == sum(num_tokens.values())
    assert len(num_tokens) == 3
    tally = AnswerTally()
    for part in parts[:-1]:
        tally.read_event(part)
    assert tally.num_output_tokens == sum(num_tokens.values())


def test_completion_has_at_most_16_tokens_by_default():
    (response,) = answer("completions", prompt="x", ignore_eos=True, temperature=0)
    assert response.usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_tokens": 9}, "min_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "the limit is 200"),
    ],
)
def test_invalid_request_is_refused(changes, message):
    for stream_options in ({}, STREAM):
        (refusal,) = answer(**{**CHAT, **changes, **stream_options})
        assert isinstance(refusal, ErrorResponse)
        assert refusal.error.code == 400
        assert message in refusal.error.message


async def test_crash_in_a_stream_is_an_error_event():
    engine = FakeServeEngine(ServedModelOptions(engine="fake", fake={"token_s": 0.01, "has_core": True}), CONFIG)
    await engine.start()
    stream = engine.chat(ChatCompletionRequest(**CHAT, **STREAM, ignore_eos=True))
    first = await anext(stream)
    os.kill(engine._engine._core.pid, signal.SIGKILL)
    os.waitid(os.P_PID, engine._engine._core.pid, os.WEXITED | os.WNOWAIT)
    remaining = [text async for text in stream]
    with pytest.raises(EngineDeadError):
        await anext(engine.chat(ChatCompletionRequest(**CHAT, **STREAM)))
    await engine.shutdown()
    *_, failure, end = remaining
    assert next(events(first))["choices"]
    assert next(events(failure))["error"]["code"] == 500
    assert end == "data: [DONE]\n\n"


async def test_dead_engine_raises_vllms_error():
    engine = FakeServeEngine(ServedModelOptions(engine="fake", fake={"has_core": True}), CONFIG)
    await engine.start()
    await engine.check_health()
    os.kill(engine._engine._core.pid, signal.SIGKILL)
    os.waitid(os.P_PID, engine._engine._core.pid, os.WEXITED | os.WNOWAIT)
    for call in (engine.check_health(), anext(engine.chat(ChatCompletionRequest(**CHAT)))):
        with pytest.raises(EngineDeadError):
            await call
    await engine.shutdown()
