"""Bodies of requests: their shape before parsing, slow ones, large ones.

A mebibyte of brackets is slower to read than one of text.

Reading and checking hold Python's lock for as long as they take, and every stream of the endpoint waits. So a body has
a number of values that takes some hundredths of a second. Pure: bytes in, an error out.

Slow bodies are read in threads. Python runs one thread at a time, and hands over every five milliseconds, so that
streams go on meanwhile; what is read must be made of short steps for that.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from peagle.errors import shown
from pipelines.online.errors import ApiError
from pipelines.online.serve.flow import Told
from pipelines.online.wire import header

# A string, or what is left of one that does not end: then the search does not begin anew at each quote inside.
_STRING = rb'"(?:[^"\\]++|\\.)*+"?+'
_STRINGS = re.compile(_STRING, re.DOTALL)
_PIECE = re.compile(rb'(?:[^"]*+' + _STRING + rb"){1,10000}+", re.DOTALL)  # some milliseconds' worth


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The most that a body may hold.

    Attributes:
        num_containers: objects and lists.
        num_members: of all objects together.
        num_values: of all lists and objects together.
    """

    num_containers: int
    num_members: int
    num_values: int

    def check(self, body: bytes) -> None:
        """Refuse a body that holds more.

        Raises:
            ApiError: 400, with what there is too much of.
        """
        if not self._excess(_counts(body)):
            return
        counts = [0, 0, 0]
        for piece in _outside_strings(body):
            counts = [sum(both) for both in zip(counts, _counts(piece), strict=True)]
            if excess := self._excess(counts):
                raise ApiError(400, f"the body has more than {excess}", code="too_many_values")

    def _excess(self, counts: Sequence[int]) -> str | None:
        num_containers, num_members, num_values = counts
        if num_containers > self.num_containers:
            return f"{self.num_containers:,} lists and objects"
        if num_members > self.num_members:
            return f"{self.num_members:,} members of objects"
        if num_values > self.num_values:
            return f"{self.num_values:,} values"
        return None


def _counts(text: bytes) -> tuple[int, int, int]:
    """Containers, members and values but one of each container, outside of strings."""
    return text.count(b"[") + text.count(b"{"), text.count(b":"), text.count(b",")


def _outside_strings(body: bytes) -> Iterator[bytes]:
    at = 0
    while match := _PIECE.match(body, at):
        yield _STRINGS.sub(b"", match[0])
        at = match.end()
    yield body[at:]


# 1 MiB of token ids has some 175,000, a conversation with tools five objects and lists a step.
REQUEST = Shape(num_containers=10_000, num_members=30_000, num_values=250_000)
ORDER = Shape(num_containers=10, num_members=50, num_values=50)
"""The most values of a batch's order: six fields, one of them with 16 members."""


AT_ONCE = 2
_SHORT_BYTES = 16 * 1024  # a hundredth of a second at most, and half a millisecond for what people send
_P = ParamSpec("_P")
_T = TypeVar("_T")


class HeavyWork:
    """The threads, and whose turn it is."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="bodies")
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}

    async def run(
        self, key: str, num_bytes: int, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """The function's result, or what it raises.

        Args:
            key: whose body it is; while one is read, the key's others wait and those of other keys do not.
            num_bytes: of the body; a short one is read at once.
        """
        if num_bytes <= _SHORT_BYTES:
            return function(*args, **kwargs)
        lock, num_waiting = self._turns.get(key, (asyncio.Lock(), 0))
        self._turns[key] = lock, num_waiting + 1
        try:
            async with lock:
                return await self._in_thread(lambda: function(*args, **kwargs))
        finally:
            lock, num_waiting = self._turns.pop(key)
            if num_waiting > 1:
                self._turns[key] = lock, num_waiting - 1

    async def _in_thread(self, call: Callable[[], _T]) -> _T:
        future = asyncio.get_running_loop().run_in_executor(self._threads, call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # A thread cannot be stopped: the key's turn ends when it has, though the client has left.
            await asyncio.wait([future])
            raise


def parse(body: bytes) -> Any:
    """The value of a body.

    Raises:
        ApiError: 400, it is not JSON.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON", code="invalid_json") from None


@dataclass(slots=True, kw_only=True)
class JsonBody:
    """A body that the gate has parsed; nobody behind it does so again.

    Attributes:
        values: until they are put through: they take many times as much memory as the body.
        num_bytes: of the body.
        key: whose it is, by name.
    """

    values: Any
    num_bytes: int
    key: str
    heavy: HeavyWork

    async def put_through(self, function: Callable[[Any], _T]) -> _T:
        """The result of a function of the values, which may take long.

        Then they are let go.
        """
        values, self.values = self.values, None
        return await self.heavy.run(self.key, self.num_bytes, function, values)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body may have {limit} bytes at most", code="body_too_large")


def require_length(scope: Scope, limit: int) -> None:
    """Refuse a body that says of itself that it is too large.

    Raises:
        ApiError: 413.
    """
    length = header(scope, "content-length") or "0"
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)


def require_plain(scope: Scope) -> None:
    """Refuse a body that is compressed or otherwise encoded.

    Raises:
        ApiError: 415.
    """
    encoding = ", ".join(Headers(scope=scope).getlist("content-encoding"))
    if {part.strip().lower() for part in encoding.split(",")} - {"", "identity"}:
        message = f"Content-Encoding {shown(encoding)} is not supported: send the body without it"
        raise ApiError(415, message, code="unsupported_encoding", param="Content-Encoding")


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
            raise _too_large(self._max_bytes)
        return message


async def read_body(receive: Receive, send: Send, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body of a request.

    Args:
        send: as `Upload` takes it.

    Raises:
        ApiError: 400, 408 or 413.
    """
    upload, body = Upload(receive, send, max_bytes, timeout_s, timeout_s), bytearray()
    while not upload.is_whole:
        message = await upload()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client left before its request was whole", code="incomplete_body")
        body += message.get("body", b"")
    return bytes(body)
