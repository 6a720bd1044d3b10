"""Calls of the ingress to a model's replicas.

Ray 2.60 only cancels a call if the whole request is cancelled. These calls are also cancelled if the caller stops
listening. Non-streaming answers are raised as an exception to bypass Ray's handler, which would parse and serialize
them again.

While Ray hands a request to an idle replica, the request counts as queued, and others might be refused
(`wrap_request_assignment` in Ray's router). So a burst might be refused although the queue is not full.
Refused calls are retried for a moment.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

from ray.serve.exceptions import BackPressureError

from pipelines.online.wire import StreamEnd, WholeAnswer

# Assignment takes about 10 ms on a busy host. The waits are randomized to spread a burst.
_WAITS_S = (0.05, 0.1, 0.2, 0.4)


class Answered(Exception):  # noqa: N818 - an outcome, not an error
    """A non-streaming answer as JSON."""

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self.body = body


UsageRecorder = Callable[[Mapping[str, Any]], None]
USAGE_RECORDER: ContextVar[UsageRecorder] = ContextVar("usage_recorder")
"""Receives the usage in the answer to the current request."""


class ServeResponse(Protocol):
    """The part of Serve's `DeploymentResponseGenerator` that is used here."""

    def __aiter__(self) -> AsyncIterator[Any]: ...

    def cancel(self) -> None:
        """Cancel the call, whether it is running or queued."""


class CancellingHandle:
    """A `DeploymentHandle`, or one of its methods, whose calls are cancelled with their callers."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def options(self, **options: Any) -> "CancellingHandle":
        return CancellingHandle(self._handle.options(**options))

    def __getattr__(self, method: str) -> "CancellingHandle":
        return CancellingHandle(getattr(self._handle, method))

    def remote(self, *arguments: Any) -> AsyncGenerator[Any, None]:
        """Call the deployment. Requires `options(stream=True)`."""
        return stream_parts(lambda: self._handle.remote(*arguments), USAGE_RECORDER.get())


async def stream_parts(call: Callable[[], ServeResponse], record_usage: UsageRecorder) -> AsyncGenerator[Any, None]:
    """Yield the parts of an answer. If closed or cancelled before the end, cancel the call.

    A non-streaming answer raises `Answered`. If the queue was full for 0.75 s, raise BackPressureError.
    """
    waits = iter(_WAITS_S)
    while True:
        response = call()
        try:
            async for part in response:
                if isinstance(part, StreamEnd):
                    record_usage(part.reported)
                    if part.text:
                        yield [part.text]
                elif isinstance(part, WholeAnswer):
                    with contextlib.suppress(Exception):  # the answer is complete even if the replica fails now
                        async for _ in response:
                            pass  # when the stream ends, the request's record is on the disk
                    record_usage(part.reported)
                    raise Answered(part.body)
                else:
                    yield part
            return
        except BackPressureError:  # before the first part
            if (wait := next(waits, None)) is None:
                raise
        except (asyncio.CancelledError, GeneratorExit):
            response.cancel()
            raise
        await asyncio.sleep(wait * random.uniform(0.75, 1.25))
