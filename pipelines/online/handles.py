"""A model's deployment as the ingress asks it: nobody works on an answer that nobody waits for any more.

Ray 2.60 ends a call with its caller where a whole request is cancelled, as when a client hangs up. A caller that gives
up by itself only stops listening, and the replica goes on to the last token. Here the call is cancelled in both cases.
An answer that is not streamed is raised as it came, past Ray's handler, which would build, dump and serialise it again.
It knows what Serve's handles can do; it imports no Ray.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

from pipelines.online.answers import WholeAnswer


class Answered(Exception):  # noqa: N818 - it is an outcome, not a fault
    """The whole answer is there."""

    def __init__(self, answer: WholeAnswer) -> None:
        super().__init__()
        self.answer = answer


class ServeResponse(Protocol):
    """Of Serve's `DeploymentResponseGenerator`, what is used here."""

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
        return listen(self._handle.remote(*arguments))


async def listen(response: ServeResponse) -> AsyncGenerator[Any, None]:
    """The parts of an answer. Cancelled or closed before the last of them, the call is too.

    Raises:
        Answered: the answer is not streamed.
    """
    try:
        async for part in response:
            if isinstance(part, WholeAnswer):
                with contextlib.suppress(Exception):  # the answer is there, whatever becomes of its replica now
                    async for _ in response:
                        pass  # its end: the request's record is on the disk
                raise Answered(part)
            yield part
    except (asyncio.CancelledError, GeneratorExit):
        response.cancel()
        raise
