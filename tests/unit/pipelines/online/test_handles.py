import asyncio
from types import SimpleNamespace

import pytest

from pipelines.online.answers import WholeAnswer
from pipelines.online.handles import Answered, Cancelling


class Response:
    """Parts of an answer, and then what Serve's generators do: nothing more for long, the end, or an error."""

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


def called(response):
    """The parts as the ingress gets them."""
    handle = SimpleNamespace(options=lambda stream: SimpleNamespace(chat=SimpleNamespace(remote=lambda *_: response)))
    return Cancelling(handle).options(stream=True).chat.remote("body", "headers")


def test_a_caller_that_gives_up_cancels_the_call():
    async def give_up():
        seen, response = [], Response(end=None)

        async def hear():
            async for part in called(response):
                seen.append(part)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(hear(), 0.05)
        return seen, response.num_cancelled

    assert asyncio.run(give_up()) == ([1, 2], 1)


def test_a_caller_that_stops_listening_cancels_the_call():
    async def stop():
        response = Response(end=None)
        parts = called(response)
        await anext(parts)
        await parts.aclose()
        return response.num_cancelled

    assert asyncio.run(stop()) == 1


@pytest.mark.parametrize("end", [StopAsyncIteration(), RuntimeError("x")])
def test_a_call_that_has_ended_is_left_alone(end):
    async def hear():
        response = Response(end=end)
        try:
            parts = [part async for part in called(response)]
        except RuntimeError:
            parts = None
        return parts, response.num_cancelled

    assert asyncio.run(hear()) == ([1, 2] if isinstance(end, StopAsyncIteration) else None, 0)


@pytest.mark.parametrize("end", [StopAsyncIteration(), RuntimeError("the replica is gone")])
def test_a_whole_answer_is_raised_past_rays_handler_once_its_record_is_written(end):
    whole = WholeAnswer(body=b"{}", said={})

    class Once(Response):
        async def __anext__(self):
            await super().__anext__()
            return whole

    async def hear():
        response = Once(end=end)
        with pytest.raises(Answered) as raised:
            await anext(called(response))
        return raised.value.answer, response.num_parts, response.num_cancelled

    assert asyncio.run(hear()) == (whole, 2, 0)
