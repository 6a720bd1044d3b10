import asyncio
import inspect
from types import SimpleNamespace

import pytest
from ray.serve.exceptions import BackPressureError

from pipelines.online.serve.calls import NOTE, Answered, Cancelling, listen
from pipelines.online.wire import StreamEnd, WholeAnswer


def test_stream_end_reports_its_usage():
    """They are not events: the ingress must not parse them."""
    noted, reported = [], {"usage": {"completion_tokens": 2}}

    class Stream(Response):
        async def __anext__(self):
            await super().__anext__()
            return ["not an event"] if self.num_parts == 1 else self._last

    async def receive_parts(text):
        stream = Stream(StopAsyncIteration())
        stream._last = StreamEnd(text=text, reported=reported)
        return [part async for part in listen(lambda: stream, noted.append)]

    assert asyncio.run(receive_parts("nor this")) == [["not an event"], ["nor this"]]
    assert asyncio.run(receive_parts("")) == [["not an event"]]  # not sent to the client
    assert noted == [reported] * 2


class Response:
    """Two parts of an answer, then a long pause, the end or an error, like Serve's generators."""

    def __init__(self, end):
        self._end = end
        self.num_parts = self.num_cancelled = 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self.num_parts == 2:
            if self._end:
                raise self._end
            await asyncio.sleep(60)
        self.num_parts += 1
        return self.num_parts

    def cancel(self):
        self.num_cancelled += 1


class Once(Response):
    """Repeats one part."""

    def __init__(self, part, end):
        super().__init__(end)
        self._part = part

    async def __anext__(self):
        await super().__anext__()
        return self._part


def called(response, note=lambda reported: None):
    """Return the parts that the ingress receives."""
    NOTE.set(note)
    return call([response])


def call(responses):
    """Return the answer of the first call that is not refused."""
    calls = iter(responses)
    chat = SimpleNamespace(remote=lambda *_: next(calls))
    handle = SimpleNamespace(options=lambda stream: SimpleNamespace(chat=chat))
    return Cancelling(handle).options(stream=True).chat.remote("body", "headers")


def test_cancelled_caller_cancels_the_call():
    async def give_up():
        seen, response = [], Response(end=None)

        async def receive_parts():
            async for part in called(response):
                seen.append(part)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receive_parts(), 0.05)
        return seen, response.num_cancelled

    assert asyncio.run(give_up()) == ([1, 2], 1)


def test_closed_generator_cancels_the_call():
    async def stop():
        response = Response(end=None)
        parts = called(response)
        await anext(parts)
        await parts.aclose()
        return response.num_cancelled

    assert asyncio.run(stop()) == 1


class Refused(Response):
    """Serve's queue was full."""

    async def __anext__(self):
        raise BackPressureError(num_queued_requests=2, max_queued_requests=2)


def test_refused_call_is_retried(monkeypatch):
    waited = []

    async def sleep(seconds):
        waited.append(seconds)

    async def receive_parts(num_refused):
        NOTE.set(lambda reported: None)
        answered = Response(StopAsyncIteration())
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "sleep", sleep)
            parts = [part async for part in call([*(Refused(None) for _ in range(num_refused)), answered])]
        return parts, answered.num_cancelled

    assert asyncio.run(receive_parts(4)) == ([1, 2], 0)
    assert len(waited) == 4
    assert waited == sorted(set(waited))
    with pytest.raises(BackPressureError):
        asyncio.run(receive_parts(5))


@pytest.mark.parametrize("end", [StopAsyncIteration(), RuntimeError("x")])
def test_ended_call_is_not_cancelled(end):
    async def receive_parts():
        response = Response(end=end)
        try:
            parts = [part async for part in called(response)]
        except RuntimeError:
            parts = None
        return parts, response.num_cancelled

    assert asyncio.run(receive_parts()) == ([1, 2] if isinstance(end, StopAsyncIteration) else None, 0)


@pytest.mark.parametrize("end", [StopAsyncIteration(), RuntimeError("the replica is gone")])
def test_whole_answer_bypasses_rays_handler(end):
    whole, noted = WholeAnswer(body=b"{}", reported={"usage": None}), []

    async def receive_parts():
        response = Once(whole, end)
        with pytest.raises(Answered) as raised:
            await anext(called(response, noted.append))
        return raised.value.body, response.num_parts, response.num_cancelled

    assert asyncio.run(receive_parts()) == (b"{}", 2, 0)
    assert noted == [whole.reported]


def test_rays_handler_serialises_whole_answers_again():
    """Once this fails, whole answers can use Ray's handler."""
    from ray.serve.llm.ingress import OpenAiIngress

    rays = inspect.getmodule(OpenAiIngress.chat)  # it is inherited
    assert "JSONResponse(content=result.model_dump())" in inspect.getsource(rays)
