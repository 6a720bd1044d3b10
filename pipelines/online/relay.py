"""An engine's answer on its way out: its usage is read, what nobody asked for left out, what it cost put in.

It knows vLLM's answers and the account; it knows neither Ray nor HTTP.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from peagle.economics.usage import Outcome
from peagle.errors import EngineError
from pipelines.online.account import RequestAccount, summary
from pipelines.online.answers import OURS, WholeAnswer, events, is_usage_alone, to_text
from pipelines.online.coalesce import Pace, coalesce
from pipelines.online.errors import is_engine_death

_CUT: Outcome = "cut"
_LEAST_OF_A_FAULT = 500


async def raising_faults(
    answers: AsyncGenerator[Any, None], check_health: Callable[[], Awaitable[None]]
) -> AsyncGenerator[Any, None]:
    """An answer as it comes, but what vLLM's side fails of in a stream is raised.

    vLLM 0.29 puts whatever it raises there into an event of the stream, in its own words, and ends it as if all were
    well: also the death of the engine.

    Args:
        check_health: raises where the engine is dead.

    Raises:
        EngineError: vLLM failed on this stream; the engine goes on.
    """
    async with contextlib.aclosing(answers):
        async for answer in answers:
            if _is_text(answer) and any(map(_tells_of_a_fault, answer)):
                await check_health()
                raise EngineError("vLLM ended a stream with an error, which is in the engine's log")
            yield answer


async def answering_refusals(
    answers: AsyncGenerator[Any, None],
    refusal: Callable[[Exception], Any],
    told_refusal: Callable[[Mapping[str, Any]], Any],
) -> AsyncGenerator[Any, None]:
    """An answer as it comes; an error before the first of it becomes the answer, where it is a refusal of the request.

    Ray 2.60 answers two of vLLM's kinds of refusals so, and lets the others through as if the replica had failed. In a
    stream vLLM tells a refusal in the first event, under a status of success.

    Args:
        refusal: the answer that an error stands for; None where it is none of the request's.
        told_refusal: likewise, of what an event tells.
    """
    has_begun = False
    try:
        async with contextlib.aclosing(answers):
            async for answer in answers:
                if not has_begun and _is_text(answer) and (told := _told_error(answer)):
                    yield told_refusal(told)
                    return
                has_begun = True
                yield answer
    except Exception as error:
        if has_begun or (refused := refusal(error)) is None:
            raise
        yield refused


async def relay(
    answers: AsyncGenerator[Any, None], begin: Callable[[], RequestAccount], *, wants_each_usage: bool
) -> AsyncGenerator[Any, None]:
    """Pass an answer on, and write the request's record at its end, unless that is the engine's.

    An engine that dies leaves no records: nobody pays for what it was doing, and another may have the request then.

    Args:
        answers: one object (a whole answer or an error), or lists of texts that hold events.
        begin: opens the request's account. Only once somebody listens: what is never listened to never ends.
        wants_each_usage: the client asked for usage in every event.
    """
    request = begin()
    request.sequences.listen()
    outcome: Outcome | None = _CUT
    try:
        async with contextlib.aclosing(answers):
            async for answer in answers:
                if _is_text(answer):
                    yield [_pass_on(text, request, wants_each_usage) for text in answer]
                else:
                    yield _with_summary(answer, request)
        outcome = "ok"
    except Exception as error:
        outcome = None if is_engine_death(error) else "failed"
        raise
    finally:
        if outcome:
            request.write(outcome)
            await request.reach_disk()  # the answer has not ended before its record is safe


async def in_pieces(answers: AsyncGenerator[Any, None], pace: Pace) -> AsyncGenerator[Any, None]:
    """The same answer, the texts of a stream joined at the engine's pace; the first is never kept back."""
    async with contextlib.aclosing(coalesce(answers, pace)) as pieces:
        async for piece in pieces:
            for is_text, several in itertools.groupby(piece, key=_is_text):
                if is_text:
                    yield ["".join(itertools.chain.from_iterable(several))]
                else:
                    for answer in several:
                        yield answer


def _is_text(answer: Any) -> bool:
    return isinstance(answer, list) and all(isinstance(text, str) for text in answer)


def _told_error(texts: list[str]) -> Mapping[str, Any] | None:
    """The error of the first event, where it is one and has a status."""
    if not texts or '"error"' not in texts[0]:
        return None
    event = next(events(texts[0]), None)
    error = event.get("error") if isinstance(event, dict) and "choices" not in event else None
    return error if isinstance(error, dict) and isinstance(error.get("code"), int) else None


def _tells_of_a_fault(text: str) -> bool:
    if '"error"' not in text:  # as of almost all of them: reading one takes time
        return False
    errors = (event["error"] for event in events(text) if isinstance(event, dict) and "error" in event)
    codes = (error.get("code") for error in errors if isinstance(error, dict))
    return any(isinstance(code, int) and code >= _LEAST_OF_A_FAULT for code in codes)


def _pass_on(text: str, request: RequestAccount, wants_each_usage: bool) -> str:
    passed = []
    for event in events(text):
        if isinstance(event, dict):
            request.tally.read_event(event)
            if event.get("choices"):
                request.first_token()
            if "error" in event:
                request.finish("failed")
            elif is_usage_alone(event):
                event[OURS] = summary(request.finish("ok"))
            elif not wants_each_usage:
                event.pop("usage", None)
        passed.append(to_text(event))
    return "".join(passed)


def _with_summary(answer: Any, request: RequestAccount) -> Any:
    """A whole answer as JSON with the summary, and the summary apart; an error as it is.

    Raises:
        CancelledError: nobody waits any more. vLLM 0.29 takes this for an error of the request and answers it, though
            its seconds are to be paid.
    """
    if getattr(answer, "usage", None) is None:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise asyncio.CancelledError
        request.finish("failed")
        return answer
    said = answer.model_dump(include={"usage", "metrics"})
    request.tally.read(said)
    said[OURS] = summary(request.finish("ok"))
    setattr(answer, OURS, said[OURS])
    return WholeAnswer(body=answer.model_dump_json().encode(), said=said)
