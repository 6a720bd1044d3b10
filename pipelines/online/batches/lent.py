"""The endpoint's engines as the engine of a batch's run, in the run's process.

A row asks for an idle slot, through Serve, until an engine has one; one row asks at a time. An engine gives a row back
when people need its slot, and the row asks again. Each engine bills what rows take (`replica/lending.py`).
"""

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from peagle.engine.interface import FAILED, Generation, RequestFailed, RequestRefused
from peagle.errors import EngineError
from peagle.runs.meter import BilledMeter
from pipelines.online.serve.exceptions import from_exception
from pipelines.online.wire import LentAnswer, LentRow

_AGAIN_S = 0.25  # an ask takes some milliseconds of an engine's process and of this one
_UNAVAILABLE = 503


class Call(Protocol):
    """The part of Serve's `DeploymentResponseGenerator` that is used here."""

    def __aiter__(self) -> AsyncIterator[LentAnswer]:
        """The engine's words on the row."""

    def cancel(self) -> None:
        """Take the row out of its engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointLender:
    """The endpoint as a lender (`pipelines.batch.lender.Lender`).

    Attributes:
        deployment, application: Serve's names of the model's engines.
        batch_id: begins the names of its rows.
        key, account, tags, cache_salt: as `LentRow` has them.
        num_slots: of all engines of the model that there may be.
    """

    deployment: str
    application: str
    batch_id: str
    key: str
    account: str
    tags: str
    cache_salt: str | None
    num_slots: int

    def lend(self, meter: BilledMeter) -> "LentEngine":
        """See `Lender`."""
        from ray import serve

        handle = serve.get_deployment_handle(self.deployment, self.application)

        @functools.cache
        def engines() -> Any:
            # Only in the event loop that asks: Serve routes in the same one (`deploy/ray.env`).
            return handle.options(stream=True).lend

        return LentEngine(self, lambda row: engines().remote(row), meter)

    def row(self, name: str, prompt_token_ids: list[int], sampling: Mapping[str, Any]) -> LentRow:
        """A row of the batch, as an engine is asked for it."""
        return LentRow(
            request_id=f"{self.batch_id}-{name}",
            key=self.key,
            account=self.account,
            tags=self.tags,
            cache_salt=self.cache_salt,
            prompt_token_ids=prompt_token_ids,
            sampling=dict(sampling),
        )


class LentEngine:
    """The engines of the endpoint that have an idle slot, as one `RowEngine`.

    Args:
        call: asks an engine to take a row.
        meter: is billed what rows take, given back or not.
    """

    def __init__(self, lender: EndpointLender, call: Callable[[LentRow], Call], meter: BilledMeter) -> None:
        self._lender, self._call, self._meter = lender, call, meter
        self._door = asyncio.Lock()
        self._num_answers = 0

    async def generate(self, request_id: str, prompt_token_ids: list[int], sampling: Mapping[str, Any]) -> Generation:
        """See `Engine.generate`; the engine has died where one dies with the row."""
        for attempt in itertools.count(1):
            row = self._lender.row(f"{request_id}-{attempt}", prompt_token_ids, sampling)
            answer = await self._ask(row)
            self._meter.bill(answer.engine_s)
            if answer.state == "refused":
                raise (RequestFailed if answer.reason == FAILED else RequestRefused)(answer.message)
            if answer.generation is not None:
                return answer.generation
        raise AssertionError("it asks without end")

    def signs_of_life(self) -> int:
        """See `Engine.signs_of_life`.

        All that an engine says of a row is one, also that it has no slot.
        """
        return self._num_answers

    def shutdown(self) -> None:
        """Nothing is to be stopped: the engines are the endpoint's."""

    def kill(self) -> None:
        """Likewise."""

    async def _ask(self, row: LentRow) -> LentAnswer:
        """Have an engine run a row, and say what came of it.

        Raises:
            RequestFailed: the endpoint failed on this row.
            EngineError: the row's engine died.
        """
        async with self._door:
            call, words = await self._taken(row)
        try:
            while (answer := await anext(words)).state == "taken":
                self._num_answers += 1
        except asyncio.CancelledError:
            call.cancel()
            raise
        except Exception as error:
            if isinstance(error, EngineError) or from_exception(error).status == _UNAVAILABLE:
                raise EngineError("the endpoint's engine died") from error
            raise RequestFailed(f"the endpoint failed on it: {error!r}") from error
        self._num_answers += 1
        return answer

    async def _taken(self, row: LentRow) -> tuple[Call, AsyncIterator[LentAnswer]]:
        """Ask until an engine takes the row; an endpoint without any starts one."""
        while True:
            call = self._call(row)
            words = aiter(call)
            try:
                is_taken = (await anext(words)).state == "taken"
            except asyncio.CancelledError:
                call.cancel()
                raise
            except Exception as error:
                if from_exception(error).status != _UNAVAILABLE:
                    raise RequestFailed(f"the endpoint failed on it: {error!r}") from error
                is_taken = False
            self._num_answers += 1
            if is_taken:
                return call, words
            await asyncio.sleep(_AGAIN_S)
