"""Close connections of clients that send headers too slowly or read answers too slowly. uvicorn 0.54 does neither.

uvicorn's only timer runs between requests, and with httptools it does not limit the size of headers. Ray's proxies let
uvicorn choose its protocol class, so the class is replaced where uvicorn looks it up.

A client that reads less than `MIN_READ_BYTES` within `READER_LIMIT_S` loses its connection. If the unread answers of
one API key or address exceed `UNREAD_LIMIT_BYTES`, its slow connections are closed, the slowest first.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.types import Message, Send

from peagle.malloc import trim_malloc
from pipelines.online.errors import ApiError
from pipelines.online.wire import error_response

READER_LIMIT_S = 60.0
MIN_READ_BYTES = 64 * 1024
UNREAD_LIMIT_BYTES = 32 << 20  # for all answers to one API key, and for all answers to one address
SLOW_S = 5.0  # a client is slow if its buffer filled up this long ago
_CHECK_S = 1.0
_TRIM_BYTES = 16 << 20  # if unread answers took more than this, freed memory is returned to the system afterwards


class LimitedConnection(asyncio.Protocol):
    """Limits the answers that wait for slow clients. A mixin for uvicorn's protocols.

    Attributes:
        queued_bytes: bytes of the answer that wait for space in the connection's buffer.
    """

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    client: tuple[str, int] | None
    owners: tuple[str, ...] = ()  # the client's address, and the API key of its request
    queued_bytes = 0
    paused_at: float | None = None  # loop time at which the buffer filled up; None if the client keeps up
    _check_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.client is not None:
            _CONNECTIONS[self.client] = self
            self.owners = (self.client[0],)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.paused_at = self.loop.time()
        _UNREAD_MONITOR.watch(self)
        self._schedule_check()

    def resume_writing(self) -> None:
        self._cancel_check()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_check()
        if self.client is not None:
            _CONNECTIONS.pop(self.client, None)
        super().connection_lost(exc)

    @property
    def unread_bytes(self) -> int:
        """Bytes of answers that this process keeps for the client."""
        return self.queued_bytes + self.transport.get_write_buffer_size()

    def abort(self) -> None:
        """Close the connection immediately. Otherwise the kernel would continue to send its buffer."""
        socket_ = self.transport.get_extra_info("socket")
        socket_.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _schedule_check(self) -> None:
        if self._check_timer is not None:
            self._check_timer.cancel()
        self._check_timer = self.loop.call_later(READER_LIMIT_S, self._check, self.transport.get_write_buffer_size())

    def _check(self, previous_bytes: int) -> None:
        """Close the connection if the client read too little of the `previous_bytes` bytes in the buffer.

        Nothing was added to the buffer in the meantime, since uvicorn waits while the buffer is full.
        """
        if previous_bytes - self.transport.get_write_buffer_size() < MIN_READ_BYTES:
            self.abort()
        else:
            self._schedule_check()

    def _cancel_check(self) -> None:
        self.paused_at = None
        if self._check_timer is not None:
            self._check_timer.cancel()
            self._check_timer = None


_CONNECTIONS: dict[tuple[str, int], LimitedConnection] = {}


def connection_of(scope: Mapping[str, Any]) -> LimitedConnection | None:
    """Return the connection of a request. None on servers without `install_limits`."""
    client = scope.get("client")
    return _CONNECTIONS.get(tuple(client)) if client else None


class _UnreadMonitor:
    """Checks connections with unread answers once a second, while there are any."""

    def __init__(self) -> None:
        self._watched: set[LimitedConnection] = set()
        self._peak_bytes = 0

    def watch(self, connection: LimitedConnection) -> None:
        if not self._watched:
            connection.loop.call_later(_CHECK_S, self._check, connection.loop)
        self._watched.add(connection)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watched = {connection for connection in self._watched if connection.paused_at is not None}
        self._peak_bytes = max(self._peak_bytes, sum(connection.unread_bytes for connection in self._watched))
        slow = [
            connection
            for connection in self._watched
            if connection.paused_at is not None and connection.paused_at <= loop.time() - SLOW_S
        ]
        slow.sort(key=lambda connection: connection.paused_at or 0.0)
        for owner in {owner for connection in slow for owner in connection.owners}:
            unread_bytes = sum(connection.unread_bytes for connection in self._watched if owner in connection.owners)
            for connection in slow:
                if unread_bytes > UNREAD_LIMIT_BYTES and owner in connection.owners:
                    unread_bytes -= connection.unread_bytes
                    connection.abort()
        if self._watched:
            loop.call_later(_CHECK_S, self._check, loop)
        elif self._peak_bytes > _TRIM_BYTES:
            self._peak_bytes = 0
            loop.call_later(_CHECK_S, trim_malloc)


_UNREAD_MONITOR = _UnreadMonitor()


class PatientSend:
    """A `send` that never makes the application wait for a slow client.

    Otherwise Serve's proxy would buffer the rest of a stream without a limit. Here, the unsent rest counts as unread
    for the client's address and for the API key (`key` is its digest; empty without an API key).
    """

    def __init__(self, send: Send, connection: LimitedConnection, key: str) -> None:
        self._send, self._connection = send, connection
        self._queue: deque[Message] = deque()
        self._writer: asyncio.Task[None] | None = None
        address = connection.owners[:1]
        connection.owners = (*address, key) if key else address

    async def __call__(self, message: Message) -> None:
        if self._writer is None and self._connection.paused_at is None:
            await self._send(message)
            return
        self._queue.append(message)
        self._connection.queued_bytes += len(message.get("body", b""))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write())

    async def drain(self) -> None:
        if self._writer is not None:
            await self._writer

    async def _write(self) -> None:
        try:
            while self._queue:
                message = self._queue.popleft()
                await self._send(message)
                self._connection.queued_bytes -= len(message.get("body", b""))
        finally:
            self._connection.queued_bytes -= sum(len(message.get("body", b"")) for message in self._queue)
            self._queue.clear()
            self._writer = None


HEADERS_LIMIT_S = 10.0  # like the default limit for bodies, `body_timeout_s`
MAX_HEADER_BYTES = 64 * 1024  # the same as h11's limit


def install_limits() -> None:
    """Add these limits to servers that this process starts from now on with uvicorn's default protocol."""
    from uvicorn.protocols.http import auto

    if not issubclass(auto.AutoHTTPProtocol, HeaderTimeout):
        auto.AutoHTTPProtocol = with_limits(auto.AutoHTTPProtocol)


def with_limits(protocol: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
    """Return a subclass of uvicorn's HTTP protocol with limits for slow headers and slow readers."""
    is_httptools = hasattr(protocol, "on_body")  # the h11 protocol limits the size of headers itself
    bases = (HeaderSizeLimit if is_httptools else HeaderTimeout, LimitedConnection, protocol)
    return type(f"Limited{protocol.__name__}", bases, {})


class HeaderTimeout(asyncio.Protocol):
    """Adds a timer for headers to a protocol of uvicorn.

    The timer starts with the connection, and with the first byte after an answer. It stops when uvicorn has a request
    to answer. So the timer also covers the rest of a body whose request was answered early. Between requests, uvicorn's
    own timer runs.
    """

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    cycle: Any  # uvicorn's request and response; None before the first one
    _timer: asyncio.TimerHandle | None = None
    _has_received_bytes = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_handed_over = self.transport.get_protocol() is not self  # to the WebSocket protocol
        if is_handed_over or self.transport.is_closing() or self._is_answering():
            self._stop_timer()
        else:
            self._start_timer()
            self._has_received_bytes = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        if self._timer is None:
            self._has_received_bytes = False
            self._timer = self.loop.call_later(HEADERS_LIMIT_S, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        if self._has_received_bytes:  # a client that sent nothing expects no answer
            message = "the request's headers did not arrive in time"
            self.transport.write(_error_answer(ApiError(408, message, code="request_timeout")))
        self.transport.close()


class HeaderSizeLimit(HeaderTimeout):
    """Adds a size limit for headers to uvicorn's protocol on httptools.

    Counts all bytes after the last headers or the last piece of a body, because uvicorn limits neither trailers nor
    chunk extensions.
    """

    _num_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Process received bytes. Data with the end of headers or a piece of a body does not count."""
        self._num_bytes += len(data)
        super().data_received(data)
        if self._num_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            if not self._is_answering():
                message = f"the request's headers are larger than {MAX_HEADER_BYTES // 1024} KiB"
                self.transport.write(_error_answer(ApiError(431, message, code="headers_too_large")))
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._num_bytes = 0
        super().on_headers_complete()  # type: ignore[misc]  # uvicorn's

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        super().on_body(body)  # type: ignore[misc]  # uvicorn's


def _error_answer(error: ApiError) -> bytes:
    headers, body = error_response(error)
    status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"
    lines = [status, *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body
