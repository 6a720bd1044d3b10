"""Request bodies: limits of their structure, timeouts, and parsing in threads.

Parsing holds Python's interpreter lock, and a MiB of brackets takes far longer than a MiB of text. So the number of
values is limited first, and long bodies are parsed in threads, which Python switches every 5 ms.
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
from pipelines.online.serve.flow import UploadAckReceiver
from pipelines.online.wire import header

# The closing quote is optional. Otherwise, after an unterminated string, the search would restart at each later quote
# and take quadratic time.
_STRING_PATTERN = rb'"(?:[^"\\]++|\\.)*+"?+'
_STRING = re.compile(_STRING_PATTERN, re.DOTALL)
_PIECE = re.compile(rb'(?:[^"]*+' + _STRING_PATTERN + rb"){1,10000}+", re.DOTALL)  # a match takes a few milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """The maximum number of containers (objects and lists), of members of objects, and of values in a body."""

    num_containers: int
    num_members: int
    num_values: int

    def check(self, body: bytes) -> None:
        if not self._exceeded_limit(_counts(body)):  # these counts are upper bounds
            return
        counts = [0, 0, 0]
        for piece in _outside_strings(body):
            counts = [total + added for total, added in zip(counts, _counts(piece), strict=True)]
            if limit := self._exceeded_limit(counts):
                raise ApiError(400, f"the body has more than {limit}", code="too_many_values")

    def _exceeded_limit(self, counts: Sequence[int]) -> str | None:
        num_containers, num_members, num_values = counts
        if num_containers > self.num_containers:
            return f"{self.num_containers:,} lists and objects"
        if num_members > self.num_members:
            return f"{self.num_members:,} members of objects"
        if num_values > self.num_values:
            return f"{self.num_values:,} values"
        return None


def _counts(text: bytes) -> tuple[int, int, int]:
    """Return the number of containers, members and values (commas) in `text`; upper bounds if it contains strings."""
    return text.count(b"[") + text.count(b"{"), text.count(b":"), text.count(b",")


def _outside_strings(body: bytes) -> Iterator[bytes]:
    position = 0
    while match := _PIECE.match(body, position):
        yield _STRING.sub(b"", match[0])
        position = match.end()
    yield body[position:]


# 1 MiB of token ids is about 175,000 values; a conversation with tools has five objects and lists per turn.
REQUEST_LIMITS = BodyLimits(num_containers=10_000, num_members=30_000, num_values=250_000)
CREATE_BATCH_LIMITS = BodyLimits(num_containers=10, num_members=50, num_values=50)
"""Limits for the body that creates a batch: six fields, one of them with 16 members."""


NUM_THREADS = 2
_SHORT_BYTES = 16 * 1024  # parsing this takes at most 10 ms, typically 0.5 ms
_P = ParamSpec("_P")
_T = TypeVar("_T")


class ParsePool:
    """A thread pool for parsing, with one body per key at a time."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="bodies")
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    async def run(
        self, key: str, num_bytes: int, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Return the result of the function. Short bodies are processed immediately in the calling thread."""
        if num_bytes <= _SHORT_BYTES:
            return function(*args, **kwargs)
        lock, num_waiting = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = lock, num_waiting + 1
        try:
            async with lock:
                return await self._in_thread(lambda: function(*args, **kwargs))
        finally:
            lock, num_waiting = self._locks.pop(key)
            if num_waiting > 1:
                self._locks[key] = lock, num_waiting - 1

    async def _in_thread(self, call: Callable[[], _T]) -> _T:
        future = asyncio.get_running_loop().run_in_executor(self._threads, call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # A thread cannot be cancelled, so the key's next body waits for it even if the client disconnected.
            await asyncio.wait([future])
            raise


def parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON", code="invalid_json") from None


@dataclass(slots=True, kw_only=True)
class JsonBody:
    """A parsed body. `values` is None after validation: parsed JSON takes many times the memory of the body."""

    values: Any
    num_bytes: int
    key: str
    parse_pool: ParsePool

    async def validate_in_thread(self, function: Callable[[Any], _T]) -> _T:
        """Return the result of a possibly slow function of the values, and release the values."""
        values, self.values = self.values, None
        return await self.parse_pool.run(self.key, self.num_bytes, function, values)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body may have at most {limit} bytes", code="body_too_large")


def require_length(scope: Scope, limit: int) -> None:
    """Refuse a body with a Content-Length above the limit (413)."""
    length = header(scope, "content-length") or "0"
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)


def require_uncompressed(scope: Scope) -> None:
    """Refuse a body with a Content-Encoding (415)."""
    encoding = ", ".join(Headers(scope=scope).getlist("content-encoding"))
    if {part.strip().lower() for part in encoding.split(",")} - {"", "identity"}:
        message = f"Content-Encoding {shown(encoding)} is not supported: send the body uncompressed"
        raise ApiError(415, message, code="unsupported_encoding", param="Content-Encoding")


class Upload:
    """ASGI's `receive` for a request with a large body. `is_whole` is set when the whole body was read.

    Reports to the proxy, through `send`, how much was read, so that the proxy sends more (`serve/flow.py`). Each piece
    and the whole body have a timeout.
    """

    def __init__(self, receive: Receive, send: Send, max_bytes: int, piece_timeout_s: float, timeout_s: float) -> None:
        self._receive = UploadAckReceiver(receive, send)
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._piece_timeout_s = piece_timeout_s
        self._deadline = time.monotonic() + timeout_s
        self.is_whole = False

    async def __call__(self) -> Message:
        """Return the next piece; after the end of the body, the client's next message. Raises 408 or 413."""
        if self.is_whole:
            return await self._receive()
        left_s = self._deadline - time.monotonic()
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
    """Return the whole body of a request. Raises 400, 408 or 413."""
    upload, body = Upload(receive, send, max_bytes, timeout_s, timeout_s), bytearray()
    while not upload.is_whole:
        message = await upload()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client disconnected before the end of its request", code="incomplete_body")
        body += message.get("body", b"")
    return bytes(body)
