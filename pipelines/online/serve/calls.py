"""Calls of the ingress to a model's replicas.

Ray 2.60 ends a call with its caller where a whole request is cancelled, as when a client hangs up. A caller that gives
up by itself only stops listening, and the replica goes on to the last token. Here the call is cancelled in both cases.
An answer that is not streamed is raised as it came, past Ray's handler, which would build, dump and serialise it again.
What an answer says of its own usage comes apart from it, and is noted (`NOTE`) before Ray sees the answer.

Ray counts a request that is only being handed to an idle replica as one that waits, and refuses whoever comes meanwhile
(`wrap_request_assignment` in its router). So a refused call is tried again for a moment: a burst is no full queue.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

from ray.serve.exceptions import BackPressureError

from pipelines.online.wire import StreamEnd, WholeAnswer

# Handing over takes some ten milliseconds on a busy host; each wait is varied, so that a burst does not come again.
_WAITS_S = (0.05, 0.1, 0.2, 0.4)


class Answered(Exception):  # noqa: N818 - it is an outcome, not a fault
    """The whole answer is there, as JSON."""

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self.body = body


Note = Callable[[Mapping[str, Any]], None]
NOTE: ContextVar[Note] = ContextVar("note")
"""Takes the usage that the answer to the request under way reports."""


class ServeResponse(Protocol):
    """The part of Serve's `DeploymentResponseGenerator` that is used here."""

    def __aiter__(self) -> AsyncIterator[Any]:
        """The parts of the answer."""

    def cancel(self) -> None:
        """End the call, whether a replica has it or it still waits for one."""


class Cancelling:
    """A `DeploymentHandle` whose answers are cancelled with whoever waits for them.

    Args:
        handle: Serve's own, or one of its methods.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def options(self, **options: Any) -> "Cancelling":
        """As Serve's."""
        return Cancelling(self._handle.options(**options))

    def __getattr__(self, method: str) -> "Cancelling":
        return Cancelling(getattr(self._handle, method))

    def remote(self, *arguments: Any) -> AsyncGenerator[Any, None]:
        """Call the deployment; `options(stream=True)` must have been said."""
        return listen(lambda: self._handle.remote(*arguments), NOTE.get())


async def listen(call: Callable[[], ServeResponse], note: Note) -> AsyncGenerator[Any, None]:
    """The parts of an answer.

    Cancelled or closed before the last of them, the call is too.

    Args:
        call: begins it; again where the queue was full.
        note: as `NOTE`.

    Raises:
        Answered: the answer is not streamed.
        BackPressureError: the queue was full for three quarters of a second.
    """
    waits = iter(_WAITS_S)
    while True:
        response = call()
        try:
            async for part in response:
                if isinstance(part, StreamEnd):
                    note(part.said)
                    if part.text:
                        yield [part.text]
                elif isinstance(part, WholeAnswer):
                    with contextlib.suppress(Exception):  # the answer is there, whatever becomes of its replica now
                        async for _ in response:
                            pass  # its end: the request's record is on the disk
                    note(part.said)
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
