"""Lend idle slots of an engine to rows of batches.

Rows stay below autoscaling's target, so they never cause it to start engines. If interactive requests need the slots,
the newest rows are returned and run again later.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from peagle.economics.usage import Outcome
from peagle.engine.interface import Generation, RequestRefused
from peagle.errors import EngineError
from pipelines.online.replica.account import EngineAccount
from pipelines.online.wire import BorrowedReply, BorrowedRequest

T = TypeVar("T")
_REPLY_INTERVAL_S = 60.0  # interval of the replies that say that a row is still running


@dataclass(slots=True, eq=False)
class _LentRow:
    work: "asyncio.Task[Generation]"
    num_slots: int
    is_recalled: bool = False


class IdleSlots:
    """Tracks how many slots of an engine are in use by rows, so that rows stay below autoscaling's target.

    Example: with 8 slots and a target of 5.6, rows get 5 slots while there are no interactive requests. When four
    interactive requests arrive, two rows are returned, so that one slot stays free for the next interactive request.
    """

    def __init__(self, slots: int, target: float) -> None:
        self._slots = slots
        self._max_used_with_rows = max(1, min(math.ceil(target) - 1, slots - 1))
        self._num_interactive = 0
        self._rows: list[_LentRow] = []

    def has_room(self, num_slots: int) -> bool:
        """Return whether a row may start. A row with very many choices may only start in an idle engine."""
        num_used = self._num_interactive + self._num_lent
        return not num_used or num_used + num_slots <= self._max_used_with_rows

    async def track_interactive(self, answer: AsyncGenerator[T, None], num_slots: int) -> AsyncGenerator[T, None]:
        """Count an interactive request until its answer ends, and return rows if the request needs their slots."""
        self._num_interactive += num_slots
        self._recall()
        try:
            async with contextlib.aclosing(answer):
                async for part in answer:
                    yield part
        finally:
            self._num_interactive -= num_slots

    @contextlib.contextmanager
    def lending(self, work: "asyncio.Task[Generation]", num_slots: int) -> Iterator[None]:
        """Count a row's slots until the block ends. Then, or if interactive requests need the slots, cancel `work`."""
        row = _LentRow(work, num_slots)
        self._rows.append(row)
        try:
            yield
        finally:
            self._rows.remove(row)
            work.cancel()

    @property
    def _num_lent(self) -> int:
        return sum(row.num_slots for row in self._active_rows)

    @property
    def _active_rows(self) -> list[_LentRow]:
        return [row for row in self._rows if not row.is_recalled]

    def _recall(self) -> None:
        for row in reversed(self._active_rows):
            if self._num_interactive + self._num_lent < self._slots:
                return
            row.is_recalled = True
            row.work.cancel()


async def lend(
    slots: IdleSlots,
    account: EngineAccount,
    row: BorrowedRequest,
    generate: Callable[[BorrowedRequest], Coroutine[Any, Any, Generation]],
    *,
    max_slots: int,
) -> AsyncGenerator[BorrowedReply, None]:
    """Run a row in an idle slot. A row with more choices than `max_slots`, the engine's slots, uses all of them.

    Yields first whether the engine has a slot, then once a minute that the row is still running, finally the result.
    Every attempt is recorded and billed, even if the row was returned, but not if the engine crashed (EngineError).
    """
    num_slots = min(int(row.sampling.get("n") or 1), max_slots)
    if not slots.has_room(num_slots):
        yield BorrowedReply(state="full")
        return
    request = account.begin(replace(row.context, num_choices=num_slots), is_row=True)
    request.sequences.listen()
    outcome: Outcome = "cut"
    final_reply, is_engine_dead = BorrowedReply(state="returned"), False
    work = asyncio.create_task(generate(row))
    with slots.lending(work, num_slots):
        try:
            yield BorrowedReply(state="taken")
            while not (await asyncio.wait([work], timeout=_REPLY_INTERVAL_S))[0]:
                yield BorrowedReply(state="taken")
            if not work.cancelled():
                generation, tally = work.result(), request.tally
                tally.num_prompt_tokens = generation.num_prompt_tokens
                tally.num_cached_tokens = generation.num_cached_tokens or 0
                tally.num_output_tokens = generation.num_output_tokens
                tally.speculation = generation.speculation or tally.speculation
                outcome, final_reply = "ok", BorrowedReply(state="done", generation=generation)
        except RequestRefused as error:
            outcome = "failed"
            final_reply = BorrowedReply(state="refused", reason=error.reason, message=str(error))
        except EngineError:
            is_engine_dead = True
            raise
        finally:
            if not is_engine_dead:
                request.write(outcome)
    await request.wait_until_on_disk()
    yield replace(final_reply, engine_s=request.finish(outcome).usage.busy_s)
