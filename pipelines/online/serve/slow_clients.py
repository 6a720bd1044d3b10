"""Close connections of slow clients, for which uvicorn waits for ever.

They do not end a request's headers, or do not take their answer.

uvicorn 0.54 has a timer between requests only (`timeout_keep_alive`), which the next request's first byte stops: a
client that sends nothing after connecting, or half a header, keeps its connection, and many such clients all that the
process may have. Nor does it limit their size with httptools, which copies a header anew for each piece of it: a single
client keeps the process busy, or fills its memory. Ray's proxies have uvicorn choose its protocol class and take no
other, so it is replaced where uvicorn looks for it. It knows uvicorn's protocols (httptools' and h11's), no Ray.

What a client has not taken waits in the server, and behind it, in Ray's proxy and its shared memory, all that has been
made of the answer. So a client that takes less than `LEAST_BYTES` within `READER_LIMIT_S` while more is there for it
loses the connection.
"""

import asyncio
import socket
import struct
from http import HTTPStatus
from typing import Any

from pipelines.online.errors import ApiError
from pipelines.online.wire import error_response

READER_LIMIT_S = 60.0
LEAST_BYTES = 64 * 1024


class SlowReaders(asyncio.Protocol):
    """A timer before a protocol of uvicorn, which runs while its buffer is full."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    _reading: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """The buffer is full: the client should take some."""
        super().pause_writing()
        self._look_again()

    def resume_writing(self) -> None:
        """It has."""
        self._stop_looking()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody to wait for."""
        self._stop_looking()
        super().connection_lost(exc)

    def _look_again(self) -> None:
        self._stop_looking()
        self._reading = self.loop.call_later(READER_LIMIT_S, self._look, self.transport.get_write_buffer_size())

    def _look(self, before: int) -> None:
        """Whether enough was taken.

        Nothing was added meanwhile: uvicorn waits while the buffer is full.
        """
        if before - self.transport.get_write_buffer_size() < LEAST_BYTES:
            # Else the kernel would go on with what it has of the answer.
            socket_ = self.transport.get_extra_info("socket")
            socket_.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        else:
            self._look_again()

    def _stop_looking(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None


HEADERS_LIMIT_S = 10.0  # as `body_timeout_s`
LIMIT_BYTES = 64 * 1024  # as h11's own


def limit() -> None:
    """Limit headers for servers of this process that start from now on.

    To `HEADERS_LIMIT_S` seconds and `LIMIT_BYTES`.

    It changes the class that uvicorn takes where it is not told which.
    """
    from uvicorn.protocols.http import auto

    if not issubclass(auto.AutoHTTPProtocol, SlowHeaders):
        auto.AutoHTTPProtocol = limited(auto.AutoHTTPProtocol)


def limited(protocol: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
    """One of uvicorn's HTTP protocols with the limits.

    Those for clients that do not read, too.
    """
    has_parser = hasattr(protocol, "on_body")
    bases = (LongHeaders if has_parser else SlowHeaders, SlowReaders, protocol)
    return type(f"Limited{protocol.__name__}", bases, {})


class SlowHeaders(asyncio.Protocol):
    """A timer before a protocol of uvicorn, which runs while headers are awaited.

    It runs from the connection, and from the first byte after an answer, until uvicorn has a request to answer. What is
    still to come of a body that was answered before its end counts as well. In between uvicorn's own timer runs.
    """

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    cycle: Any  # uvicorn's request and response; None before the first one
    _timer: asyncio.TimerHandle | None = None
    _has_begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait."""
        super().connection_made(transport)
        self._start()

    def data_received(self, data: bytes) -> None:
        """Take a piece, which may be the last of the headers."""
        super().data_received(data)
        is_handed_over = self.transport.get_protocol() is not self  # a WebSocket
        if is_handed_over or self.transport.is_closing() or self._is_answering():
            self._stop()
        else:
            self._start()
            self._has_begun = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody to wait for."""
        self._stop()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start(self) -> None:
        if self._timer is None:
            self._has_begun = False
            self._timer = self.loop.call_later(HEADERS_LIMIT_S, self._give_up)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self._has_begun:  # who has sent nothing expects no answer
            message = "the request's headers did not arrive in time"
            self.transport.write(_answer(ApiError(408, message, code="request_timeout")))
        self.transport.close()


class LongHeaders(SlowHeaders):
    """The same before uvicorn's protocol on httptools, with a count of bytes.

    It counts since the last headers or the last of a body: also trailers, and what is said of chunks, come without end.
    """

    _num_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Take a piece; it is not counted where headers end in it, or a body is in it."""
        self._num_bytes += len(data)
        super().data_received(data)
        if self._num_bytes > LIMIT_BYTES and not self.transport.is_closing():
            if not self._is_answering():
                message = f"the request's headers are larger than {LIMIT_BYTES // 1024} KiB"
                self.transport.write(_answer(ApiError(431, message, code="headers_too_large")))
            self.transport.close()

    def on_headers_complete(self) -> None:
        """The parser has read the last header."""
        self._num_bytes = 0
        super().on_headers_complete()  # type: ignore[misc]  # uvicorn's

    def on_body(self, body: bytes) -> None:
        """The parser has read some of a body."""
        self._num_bytes = 0
        super().on_body(body)  # type: ignore[misc]  # uvicorn's


def _answer(error: ApiError) -> bytes:
    headers, body = error_response(error)
    status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"
    lines = [status, *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body
