"""Send a file to a client in parts, within the room for all files.

With the proxy's notes (`flow.py`) a window of each file is under way. Without them the ingress cannot see what a client
takes before the client has all of it, so all that was asked for counts; a larger file is then fetched with `Range`.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO
from urllib.parse import quote

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from peagle.errors import shown
from pipelines.online.batches.records import StoredFile
from pipelines.online.batches.store import in_thread
from pipelines.online.errors import ApiError, overloaded
from pipelines.online.serve.flow import Window

WINDOW_BYTES = 1 << 21
_PIECE_BYTES = 1 << 19
_BODY_TIMEOUT_S = 10.0  # for a body that nobody needs
_RETRY_S = 1.0
_RANGE = re.compile(r"bytes=(?:([0-9]{1,18})-([0-9]{0,18})|-([0-9]{1,18}))")


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes of a file: from `first` on, up to `end`."""

    first: int
    end: int

    @property
    def num_bytes(self) -> int:
        """How many."""
        return self.end - self.first


class Room:
    """How many bytes of files may be under way, up and down, of one key and in all.

    A file of which more than a key's share would be under way is not sent whole.
    """

    def __init__(self, *, most_bytes: int, most_bytes_of_key: int) -> None:
        self._most, self.most_of_key = most_bytes, min(most_bytes, most_bytes_of_key)
        self._held: Counter[str] = Counter()

    @contextlib.contextmanager
    def hold(self, key: str, num_bytes: int) -> Iterator[None]:
        """Take room until the end of the `with`.

        Raises:
            ApiError: 429 or 503, there is none now.
        """
        if self._held[key] + num_bytes > self.most_of_key:
            message = "this key has reached its limit of concurrent uploads and downloads"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=_RETRY_S)
        if self._held.total() + num_bytes > self._most:
            raise overloaded("the endpoint has reached its limit of concurrent uploads and downloads; try again")
        self._held[key] += num_bytes
        try:
            yield
        finally:
            self._held[key] -= num_bytes
            if not self._held[key]:
                del self._held[key]


class Download(Response):
    """The answer: all of a file, or the part of it that `Range` asks for.

    Args:
        open_source: opens the file.
        headers: of the request.
        read_ahead_bytes: that the source holds beside the window.
    """

    def __init__(
        self,
        file: StoredFile,
        open_source: Callable[[], BinaryIO],
        headers: Mapping[str, str],
        room: Room,
        *,
        read_ahead_bytes: int = 0,
    ) -> None:
        self._file, self._open_source = file, open_source
        self._room, self._read_ahead_bytes = room, read_ahead_bytes
        etag = f'"{file.id}-{file.num_bytes}"'  # the bytes of an id never change
        wanted = headers.get("range") if headers.get("if-range") in (None, etag) else None
        self._span = span_of(wanted, file.num_bytes)
        super().__init__(status_code=206 if self._span.num_bytes < file.num_bytes else 200, headers=self._head(etag))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, and wait until the client has it.

        Raises:
            ApiError: it is gone, there is no room for it, or it has to be fetched in parts.
        """
        window = Window(receive)
        await window.open(_BODY_TIMEOUT_S)
        under_way = min(self._span.num_bytes, WINDOW_BYTES) if window.has_notes else self._span.num_bytes
        with self._room.hold(self._file.owner, self._under_room(under_way)), await self._open() as source:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send_pieces(source, window, send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            await window.wait_for_end()

    async def _send_pieces(self, source: BinaryIO, window: Window, send: Send) -> None:
        num_sent = 0
        while num_sent < self._span.num_bytes and not window.has_left:
            piece = await in_thread(source.read, min(_PIECE_BYTES, self._span.num_bytes - num_sent))
            if not piece:
                raise OSError(f"{self._file.id}: it is shorter than its record says")
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            num_sent += len(piece)
            if window.has_notes:
                await window.wait(num_sent, WINDOW_BYTES - _PIECE_BYTES)

    async def _open(self) -> BinaryIO:
        try:
            source = await in_thread(self._open_source)
        except FileNotFoundError:
            raise no_such_file(self._file.id) from None
        source.seek(self._span.first)
        return source

    def _under_room(self, num_bytes: int) -> int:
        """The bytes to hold."""
        most = self._room.most_of_key
        if num_bytes + self._read_ahead_bytes > most:
            raise ApiError(
                400,
                f"the file has {self._file.num_bytes} bytes, and this endpoint sends at most {most} in one response: "
                "fetch it in parts with the header Range "
                "(it has no such limit where Ray's nodes are started with deploy/ray.env)",
                code="range_needed",
            )
        return num_bytes + self._read_ahead_bytes

    def _head(self, etag: str) -> dict[str, str]:
        head = {
            "content-type": "application/octet-stream",
            "content-length": str(self._span.num_bytes),
            "content-disposition": attachment(self._file.filename),
            "x-content-type-options": "nosniff",
            "accept-ranges": "bytes",
            "etag": etag,
        }
        if self._span.num_bytes < self._file.num_bytes:
            head["content-range"] = f"bytes {self._span.first}-{self._span.end - 1}/{self._file.num_bytes}"
        return head


def span_of(header: str | None, num_bytes: int) -> ByteRange:
    """The bytes that a `Range` header asks for.

    All of them where it is invalid, or asks for several parts.

    Raises:
        ApiError: 416, there are no such bytes.

    >>> span_of("bytes=2-3", 10), span_of("bytes=-3", 10), span_of("bytes=8-99", 10)
    (ByteRange(first=2, end=4), ByteRange(first=7, end=10), ByteRange(first=8, end=10))
    """
    found = _RANGE.fullmatch(header.replace(" ", "")) if header else None
    if found is None:
        return ByteRange(0, num_bytes)
    first, last, tail = found.groups()
    if tail is not None:
        span = ByteRange(max(0, num_bytes - int(tail)), num_bytes)
    elif last:
        span = ByteRange(int(first), min(int(last) + 1, num_bytes))
        if int(last) < int(first):
            return ByteRange(0, num_bytes)  # no range at all, says RFC 9110
    else:
        span = ByteRange(int(first), num_bytes)
    if span.num_bytes <= 0:
        raise ApiError(416, f"range: the file has {num_bytes} bytes", code="range_not_satisfiable", param="range")
    return span


def attachment(filename: str) -> str:
    """A `Content-Disposition` with which a browser stores the file, whatever its name.

    >>> attachment('a "b".jsonl')
    "attachment; filename*=UTF-8''a%20%22b%22.jsonl"
    """
    return f"attachment; filename*=UTF-8''{quote(filename, safe='')}"


def no_such_file(file_id: str) -> ApiError:
    """There is none, or none of this key."""
    return ApiError(404, f"there is no file {shown(file_id)}", code="file_not_found")
