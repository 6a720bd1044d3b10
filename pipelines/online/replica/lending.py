"""The idle slots of an engine: lent to rows of batches, and taken back.

A row is accepted while all that is under way, with it, is below what scaling aims at, so rows alone start no engine.
When so many people's requests come that hardly a slot is left, the youngest rows are given back, to be tried again.
It knows the account; it knows neither Ray nor vLLM.
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
from pipelines.online.wire import AnswerTally, BorrowedReply, BorrowedRequest

T = TypeVar("T")
_SIGN_S = 60.0


@dataclass(slots=True, eq=False)
class _Lent:
    work: "asyncio.Task[Generation]"
    num_slots: int
    is_recalled: bool = False


class IdleSlots:
    """Who has the slots of one engine.

    Args:
        slots: requests that the engine decodes at once.
        target: requests under way on it that scaling aims at.

    Example: of 8 slots with a target of 5.6, rows get 5 while nobody asks. Four people's requests make nine of them,
    and two rows are given back: one slot always stays free for whoever comes next.
    """

    def __init__(self, slots: int, target: float) -> None:
        self._slots = slots
        self._most_with_rows = max(1, min(math.ceil(target) - 1, slots - 1))
        self._num_asked = 0
        self._rows: list[_Lent] = []

    def has_room(self, num_slots: int) -> bool:
        """Whether a row of so many choices may begin.

        One of very many may only in an engine that idles.
        """
        taken = self._num_asked + self._num_lent
        return not taken or taken + num_slots <= self._most_with_rows

    async def beside(self, answer: AsyncGenerator[T, None], num_slots: int) -> AsyncGenerator[T, None]:
        """The answer to a person's request; rows make room for it until its end."""
        self._num_asked += num_slots
        self._recall()
        try:
            async with contextlib.aclosing(answer):
                async for part in answer:
                    yield part
        finally:
            self._num_asked -= num_slots

    @contextlib.contextmanager
    def lent(self, work: "asyncio.Task[Generation]", num_slots: int) -> Iterator[None]:
        """Let a row have slots until its end; `work` is cancelled when people need them."""
        row = _Lent(work, num_slots)
        self._rows.append(row)
        try:
            yield
        finally:
            self._rows.remove(row)
            work.cancel()

    @property
    def _num_lent(self) -> int:
        return sum(row.num_slots for row in self._kept)

    @property
    def _kept(self) -> list[_Lent]:
        return [row for row in self._rows if not row.is_recalled]

    def _recall(self) -> None:
        for row in reversed(self._kept):
            if self._num_asked + self._num_lent < self._slots:
                return
            row.is_recalled = True
            row.work.cancel()


async def lend(
    slots: IdleSlots,
    account: EngineAccount,
    row: BorrowedRequest,
    generate: Callable[[BorrowedRequest], Coroutine[Any, Any, Generation]],
    *,
    most_slots: int,
) -> AsyncGenerator[BorrowedReply, None]:
    """Run a row in an idle slot: whether there is one, then what came of it.

    While the row runs it is told each minute. Each attempt is a record of the ledger, also one that was given back: its
    seconds are paid.

    Args:
        most_slots: of the engine, which a row of more choices fills.

    Raises:
        EngineError: the engine has died; nobody pays for the row then.
    """
    num_slots = min(int(row.sampling.get("n") or 1), most_slots)
    if not slots.has_room(num_slots):
        yield BorrowedReply(state="full")
        return
    request = account.begin(
        row.request_id, row.key, account=row.account, tags=row.tags, num_choices=num_slots, is_row=True
    )
    request.sequences.listen()
    outcome: Outcome = "cut"
    answer, is_dead = BorrowedReply(state="returned"), False
    work = asyncio.create_task(generate(row))
    with slots.lent(work, num_slots):
        try:
            yield BorrowedReply(state="taken")
            while not (await asyncio.wait([work], timeout=_SIGN_S))[0]:
                yield BorrowedReply(state="taken")
            if not work.cancelled():
                generation = work.result()
                _count(generation, request.tally)
                outcome, answer = "ok", BorrowedReply(state="done", generation=generation)
        except RequestRefused as error:
            outcome, answer = "failed", BorrowedReply(state="refused", reason=error.reason, message=str(error))
        except EngineError:
            is_dead = True
            raise
        finally:
            if not is_dead:
                request.write(outcome)
    await request.reach_disk()
    yield replace(answer, engine_s=request.finish(outcome).usage.busy_s)


def _count(generation: Generation, tally: AnswerTally) -> None:
    tally.num_prompt_tokens = generation.num_prompt_tokens
    tally.num_cached_tokens = generation.num_cached_tokens or 0
    tally.num_output_tokens = generation.num_output_tokens
    tally.speculation = generation.speculation or tally.speculation
