"""Run the rows of a batch in idle slots of the endpoint's engines, which bill them (`replica/lending.py`).

A row is sent through Serve until an engine with an idle slot takes it, and again if the engine returns it. Only one row
at a time looks for a slot.
"""

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from peagle.engine.interface import FAILED, Generation, RequestFailed, RequestRefused
from peagle.errors import EngineError
from peagle.runs.meter import BilledMeter
from pipelines.online.errors import from_exception
from pipelines.online.serve.calls import ServeResponse
from pipelines.online.wire import BorrowedReply, BorrowedRequest, Context

_RETRY_S = 0.25  # an attempt takes a few ms of CPU in both processes
_UNAVAILABLE = 503


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointLender:
    """A `pipelines.batch.lender.Lender` for the endpoint's engines."""

    # deployment, application: Serve's names of the model's engines
    deployment: str
    application: str
    context: Context  # the batch's context; its request id is the prefix of the rows' request ids
    cache_salt: str | None  # salt of the batch's key; None if keys share the prefix cache
    num_slots: int  # slots of the model's engines at maximum scale

    def lend(self, meter: BilledMeter) -> "LentEngine":
        from ray import serve

        handle = serve.get_deployment_handle(self.deployment, self.application)

        @functools.cache
        def lend_method() -> Any:
            # Create the handle in the calling event loop, in which Serve routes (`deploy/ray.env`).
            return handle.options(stream=True).lend

        return LentEngine(self, lambda row: lend_method().remote(row), meter)

    def row(self, name: str, prompt_token_ids: list[int], sampling: Mapping[str, Any]) -> BorrowedRequest:
        return BorrowedRequest(
            context=replace(self.context, request_id=f"{self.context.request_id}-{name}"),
            cache_salt=self.cache_salt,
            prompt_token_ids=prompt_token_ids,
            sampling=dict(sampling),
        )


class LentEngine:
    """A `RowEngine` that runs rows in idle slots of the endpoint's engines.

    `call` sends a row to an engine. `meter` receives the cost of rows, including rows that were returned.
    """

    def __init__(
        self, lender: EndpointLender, call: Callable[[BorrowedRequest], ServeResponse], meter: BilledMeter
    ) -> None:
        self._lender, self._call, self._meter = lender, call, meter
        self._search_lock = asyncio.Lock()  # one row at a time looks for a slot
        self._num_replies = 0

    async def generate(self, request_id: str, prompt_token_ids: list[int], sampling: Mapping[str, Any]) -> Generation:
        """Implement `RowEngine.generate`. If the engine with the row crashes, raise EngineError."""
        for attempt in itertools.count(1):
            row = self._lender.row(f"{request_id}-{attempt}", prompt_token_ids, sampling)
            reply = await self._run(row)
            self._meter.bill(reply.engine_s)
            if reply.state == "refused":
                raise (RequestFailed if reply.reason == FAILED else RequestRefused)(reply.message)
            if reply.generation is not None:
                return reply.generation
        raise AssertionError("unreachable")

    def signs_of_life(self) -> int:
        """Implement `RowEngine.signs_of_life`: every reply of an engine counts, including refusals."""
        return self._num_replies

    def shutdown(self) -> None:
        """Do nothing: the engines belong to the endpoint."""

    def kill(self) -> None:
        """Do nothing: the engines belong to the endpoint."""

    async def _run(self, row: BorrowedRequest) -> BorrowedReply:
        async with self._search_lock:
            call, replies = await self._find_slot(row)
        try:
            while (reply := await anext(replies)).state == "taken":
                self._num_replies += 1
        except asyncio.CancelledError:
            call.cancel()
            raise
        except Exception as error:
            if isinstance(error, EngineError) or from_exception(error).status == _UNAVAILABLE:
                raise EngineError("the endpoint's engine crashed") from error
            raise RequestFailed(f"the endpoint failed on this request: {error!r}") from error
        self._num_replies += 1
        return reply

    async def _find_slot(self, row: BorrowedRequest) -> tuple[ServeResponse, AsyncIterator[BorrowedReply]]:
        """Retry until an engine accepts the row. If no engine is running, the endpoint starts one."""
        while True:
            call = self._call(row)
            replies = aiter(call)
            try:
                is_taken = (await anext(replies)).state == "taken"
            except asyncio.CancelledError:
                call.cancel()
                raise
            except Exception as error:
                if from_exception(error).status != _UNAVAILABLE:
                    raise RequestFailed(f"the endpoint failed on this request: {error!r}") from error
                is_taken = False
            self._num_replies += 1
            if is_taken:
                return call, replies
            await asyncio.sleep(_RETRY_S)
