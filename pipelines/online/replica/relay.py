"""Process an engine's answer: read its usage, add the cost, and join the pieces of streams.

Each piece of a stream costs about 2 ms of CPU time in the replica, the ingress and the proxy together, regardless of
its size (Ray 2.60, AMD EPYC, 2026-11-22: 25.6 % of a core at 114 pieces/s). So the more streams there are, the less
often each of them sends.
"""

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

from peagle.economics.usage import Outcome
from peagle.engine.vllm_internals import generation_error, refusal_of
from peagle.errors import EngineError
from pipelines.online.errors import is_engine_death
from pipelines.online.replica.account import RequestAccount, summary, usage_of
from pipelines.online.serve.ray_names import event_to_error_response, to_error_response
from pipelines.online.wire import PEAGLE_KEY, ShownUsage, StreamEnd, WholeAnswer, events, to_text

T = TypeVar("T")


class Pace:
    """The rate at which each of several streams sends pieces.

    Two pieces of a stream are at least `interval_s` apart, and more if all streams together would exceed
    `pieces_per_s`. An interval of 0 disables both limits.
    """

    def __init__(self, interval_s: float, pieces_per_s: float = math.inf) -> None:
        self._interval_s = interval_s
        self._pieces_per_s = pieces_per_s
        self._num_streams = 0

    @property
    def interval_s(self) -> float:
        return max(self._interval_s, self._num_streams / self._pieces_per_s) if self._interval_s else 0.0

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream while the context is open."""
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1


async def coalesce(source: AsyncGenerator[T, None], pace: Pace) -> AsyncGenerator[list[T], None]:
    """Yield lists of items: the first item immediately, later ones at intervals.

    An item that follows a longer pause is not delayed. An exception of the source is raised after the items before it.
    Closing this generator closes the source.
    """
    arrived: list[T] = []
    has_changed = asyncio.Event()  # an item arrived, or the source ended

    async def read() -> None:
        try:
            async with contextlib.aclosing(source):
                async for item in source:
                    arrived.append(item)
                    has_changed.set()
        finally:
            has_changed.set()

    reader = asyncio.create_task(read())
    clock = asyncio.get_running_loop().time
    next_at = clock()
    try:
        await has_changed.wait()
        with pace.stream():  # answers without output do not count yet
            while True:
                await has_changed.wait()
                if (wait_s := next_at - clock()) > 0:  # wait, but not longer than the source runs
                    await asyncio.wait([reader], timeout=wait_s)
                has_changed.clear()
                if arrived:
                    items, arrived[:] = arrived.copy(), []
                    next_at = clock() + pace.interval_s
                    yield items
                if reader.done() and not arrived:
                    reader.result()
                    return
    finally:
        reader.cancel()
        await asyncio.wait([reader])
        if not reader.cancelled():
            reader.exception()  # otherwise asyncio logs it as never retrieved


async def convert_errors(
    answers: AsyncGenerator[Any, None],
    check_health: Callable[[], Awaitable[None]],
    *,
    constraint: str | None = None,
    to_error_response: Callable[[Exception], Any] = to_error_response,
    event_to_error_response: Callable[[Mapping[str, Any]], Any] = event_to_error_response,
) -> AsyncGenerator[Any, None]:
    """Pass on the parts of an answer.

    Failures that arrive as stream events are raised, and early refusals become error responses.

    vLLM 0.29 reports every failure, even an engine crash, as an event and ends the stream normally. It also reports a
    failure if a constraint allows no more tokens, which is the caller's mistake. Ray 2.60 converts only two of vLLM's
    refusals; the others look like a failure of the replica. In a stream, vLLM sends a refusal as the first event with
    a status of success.

    `constraint` is the field of the request that constrains its response, if any.
    """
    has_begun = False
    try:
        async with contextlib.aclosing(answers):
            async for answer in answers:
                if _is_list_of_texts(answer):
                    if any(map(_has_server_error, answer)):
                        await check_health()
                        raise _failure_error(constraint)
                    if not has_begun and (error_event := _first_event_error(answer)):
                        yield event_to_error_response(error_event)
                        return
                has_begun = True
                yield answer
    except Exception as error:
        if isinstance(error, generation_error()):
            await check_health()
            error = _failure_error(constraint)
        response = None if has_begun else to_error_response(error)
        if response is None:
            raise error from None
        yield response


def _failure_error(constraint: str | None) -> Exception:
    if constraint is None:
        return EngineError("vLLM ended a request with an error, which is in the engine's log")
    return refusal_of(constraint, f"{constraint}: the constraint allows no further token, so the response cannot end")


async def relay(
    answers: AsyncGenerator[Any, None], begin: Callable[[], RequestAccount], *, shown_usage: ShownUsage
) -> AsyncGenerator[Any, None]:
    """Pass an answer on, and write the request's record when it ends.

    A request is billed for the engine time and tokens that it used, even if it failed, was refused or was cancelled. If
    its engine crashes, the request is not billed, and another engine may run it.

    `answers` yields one object (a non-streaming answer or an error), or lists of texts with events.
    """
    request = begin()
    request.sequences.listen()
    outcome: Outcome | None = "cut"  # unless changed below: the client disconnected
    try:
        async with contextlib.aclosing(answers):
            async for answer in answers:
                if _is_list_of_texts(answer):
                    yield _forward_events(answer, request, shown_usage)
                elif getattr(answer, "usage", None) is not None:
                    yield _with_summary(answer, request)
                else:
                    # vLLM 0.29 answers a cancelled request, whose client has disconnected, with an error.
                    if (task := asyncio.current_task()) is not None and task.cancelling():
                        raise asyncio.CancelledError
                    yield _end_without_answer(request)
                    yield answer
        outcome = "ok"
    except Exception as error:
        outcome = None if is_engine_death(error) else "failed"
        if outcome:
            yield _end_without_answer(request)
        raise
    finally:
        if outcome:
            request.write(outcome)
            await request.wait_until_on_disk()  # end the answer only when its record is on disk


def _end_without_answer(request: RequestAccount) -> StreamEnd:
    """Finish a failed request and return what it used."""
    return StreamEnd(text="", reported=usage_of(request.finish("failed")))


async def in_pieces(answers: AsyncGenerator[Any, None], pace: Pace) -> AsyncGenerator[Any, None]:
    """Join the texts that arrive within one interval of `pace`. The first text is sent immediately."""
    async with contextlib.aclosing(coalesce(answers, pace)) as pieces:
        async for piece in pieces:
            for is_streamed, group in itertools.groupby(piece, key=_is_streamed):
                if not is_streamed:
                    for answer in group:
                        yield answer
                    continue
                parts = list(group)
                text = "".join(part.text if isinstance(part, StreamEnd) else "".join(part) for part in parts)
                reported = next((part.reported for part in parts if isinstance(part, StreamEnd)), None)
                yield [text] if reported is None else StreamEnd(text=text, reported=reported)


def _is_streamed(answer: Any) -> bool:
    return isinstance(answer, StreamEnd) or _is_list_of_texts(answer)


def _is_list_of_texts(answer: Any) -> bool:
    return isinstance(answer, list) and all(isinstance(text, str) for text in answer)


def _first_event_error(texts: list[str]) -> Mapping[str, Any] | None:
    """Return the error in the first event, if it has a status."""
    if not texts or '"error"' not in texts[0]:
        return None
    event = next(events(texts[0]), None)
    error = event.get("error") if isinstance(event, dict) and "choices" not in event else None
    return error if isinstance(error, dict) and isinstance(error.get("code"), int) else None


def _has_server_error(text: str) -> bool:
    if '"error"' not in text:  # almost always; parsing takes time
        return False
    errors = (event["error"] for event in events(text) if isinstance(event, dict) and "error" in event)
    codes = (error.get("code") for error in errors if isinstance(error, dict))
    return any(isinstance(code, int) and code >= 500 for code in codes)


def _forward_events(texts: list[str], request: RequestAccount, shown_usage: ShownUsage) -> list[str] | StreamEnd:
    forwarded, reported = [], None
    for event in itertools.chain.from_iterable(map(events, texts)):
        if isinstance(event, dict):
            request.tally.read_event(event)
            if event.get("choices"):
                request.record_first_token()
            if "error" in event:
                request.finish("failed")
            elif event.get("usage") and not event.get("choices"):  # the last event of a stream
                event[PEAGLE_KEY] = summary(request.finish("ok"))
                reported = {name: event[name] for name in ("usage", "metrics", PEAGLE_KEY) if name in event}
                if shown_usage == "never":
                    continue
            elif shown_usage != "each":
                event.pop("usage", None)
        forwarded.append(to_text(event))
    return forwarded if reported is None else StreamEnd(text="".join(forwarded), reported=reported)


def _with_summary(answer: Any, request: RequestAccount) -> WholeAnswer:
    """Return a non-streaming answer as JSON with the summary, and the summary separately."""
    reported = answer.model_dump(include={"usage", "metrics"})
    request.tally.read(reported)
    reported[PEAGLE_KEY] = summary(request.finish("ok"))
    setattr(answer, PEAGLE_KEY, reported[PEAGLE_KEY])
    if drafts := getattr(answer.metrics, "speculative_decoding", None):
        drafts.per_step_drafted = None
    return WholeAnswer(body=answer.model_dump_json().encode(), reported=reported)
