"""A body that is too large to be held: passed on piece by piece, with a limit to its size and to its time.

It knows ASGI; what is in the body is for whoever reads it.
"""

import asyncio
import time

from starlette.types import Message, Receive, Send

from pipelines.online.errors import ApiError
from pipelines.online.flow import Told


def too_large(limit: int) -> ApiError:
    """The answer to a body of more bytes."""
    return ApiError(413, f"the body may have {limit} bytes at most", code="body_too_large")


class Upload:
    """The `receive` of a request that may be large.

    Args:
        send: where it says what was read, if somebody waits for that.
        piece_timeout_s: for each piece.
        timeout_s: for all of them.

    Attributes:
        is_whole: its end was read.
    """

    def __init__(self, receive: Receive, send: Send, max_bytes: int, piece_timeout_s: float, timeout_s: float) -> None:
        self._receive = Told(receive, send)
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._piece_timeout_s = piece_timeout_s
        self._give_up_at = time.monotonic() + timeout_s
        self.is_whole = False

    async def __call__(self) -> Message:
        """The next piece; once the body is whole, what the client does.

        Raises:
            ApiError: 408 or 413.
        """
        if self.is_whole:
            return await self._receive()
        left_s = self._give_up_at - time.monotonic()
        try:
            async with asyncio.timeout(min(self._piece_timeout_s, left_s)):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, "the request did not arrive in time", code="request_timeout") from None
        self._num_bytes += len(message.get("body", b""))
        self.is_whole = not message.get("more_body")
        if self._num_bytes > self._max_bytes:
            raise too_large(self._max_bytes)
        return message
