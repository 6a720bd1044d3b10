import asyncio
import inspect
from types import SimpleNamespace

import pytest
from ray.serve.exceptions import BackPressureError

from pipelines.online.serve.calls import USAGE_RECORDER, Answered, CancellingHandle, stream_parts
from pipelines.online.wire import StreamEnd, WholeAnswer


class FakeResponse:
    """A response generator like Ray Serve's. After its parts, it raises `end`, or blocks if `end` is None."""

    def __init__(self, *parts, end=None):
        self._parts, self._end = list(parts), end
        self.num_parts = self.num_cancelled = 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self._parts:
            if self._end:
                raise self._end
            await asyncio.sleep(60)
        self.num_parts += 1
        return self._parts.pop(0)

    def cancel(self):
        self.num_cancelled += 1


@pytest.mark.parametrize(("text", "other_parts"), [("not an event", [["not an event"]]), ("", [])])
async def test_stream_end_reports_its_usage(text, other_parts):
    """The ingress does not parse the parts, and sends no empty part to the client."""
    reports, end = [], StreamEnd(text=text, reported={"usage": {"completion_tokens": 2}})
    stream = FakeResponse(["not an event"], end, end=StopAsyncIteration())
    assert [part async for part in stream_parts(lambda: stream, reports.append)] == [["not an event"], *other_parts]
    assert reports == [end.reported]


def received_parts(response, record_usage=lambda reported: None):
    """Return the parts that the ingress receives."""
    USAGE_RECORDER.set(record_usage)
    return start_call([response])


def start_call(responses):
    """Return the parts of the first response that is not a refusal."""
    calls = iter(responses)
    chat = SimpleNamespace(remote=lambda *_: next(calls))
    handle = SimpleNamespace(options=lambda stream: SimpleNamespace(chat=chat))
    return CancellingHandle(handle).options(stream=True).chat.remote("body", "headers")


async def test_cancelled_caller_cancels_the_call():
    received, response = [], FakeResponse(1, 2)

    async def receive_parts():
        async for part in received_parts(response):
            received.append(part)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(receive_parts(), 0.05)
    assert (received, response.num_cancelled) == ([1, 2], 1)


async def test_closed_generator_cancels_the_call():
    response = FakeResponse(1, 2)
    parts = received_parts(response)
    await anext(parts)
    await parts.aclose()
    assert response.num_cancelled == 1


def test_refused_call_is_retried(monkeypatch):
    sleeps_s = []

    async def sleep(seconds):
        sleeps_s.append(seconds)

    async def receive_parts(num_refused):
        USAGE_RECORDER.set(lambda reported: None)
        answered = FakeResponse(1, 2, end=StopAsyncIteration())
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "sleep", sleep)
            refused = [FakeResponse(end=BackPressureError(2, 2)) for _ in range(num_refused)]
            parts = [part async for part in start_call([*refused, answered])]
        return parts, answered.num_cancelled

    assert asyncio.run(receive_parts(4)) == ([1, 2], 0)
    assert len(sleeps_s) == 4
    assert sleeps_s == sorted(set(sleeps_s))
    with pytest.raises(BackPressureError):
        asyncio.run(receive_parts(5))


@pytest.mark.parametrize("end", [StopAsyncIteration(), RuntimeError("x")])
async def test_ended_call_is_not_cancelled(end):
    response = FakeResponse(1, 2, end=end)
    try:
        parts = [part async for part in received_parts(response)]
    except RuntimeError:
        parts = None
    assert (parts, response.num_cancelled) == ([1, 2] if isinstance(end, StopAsyncIteration) else None, 0)


@pytest.mark.parametrize("end", [StopAsyncIteration(), RuntimeError("the replica is gone")])
async def test_whole_answer_bypasses_rays_handler(end):
    whole_answer, reports = WholeAnswer(body=b"{}", reported={"usage": None}), []
    response = FakeResponse(whole_answer, whole_answer, end=end)
    with pytest.raises(Answered) as error:
        await anext(received_parts(response, reports.append))
    assert (error.value.body, response.num_parts, response.num_cancelled) == (b"{}", 2, 0)
    assert reports == [whole_answer.reported]


def test_rays_handler_serialises_whole_answers_again():
    """Once this fails, non-streaming answers can use Ray's handler."""
    from ray.serve.llm.ingress import OpenAiIngress

    module = inspect.getmodule(OpenAiIngress.chat)  # the method is inherited
    assert "JSONResponse(content=result.model_dump())" in inspect.getsource(module)
