"""File downloads with limited memory.

If the proxy acknowledges data (`serve/flow.py`), only a window of each download is in memory. Otherwise the whole
response is in memory, so large files must be fetched in parts with `Range`.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import BinaryIO
from urllib.parse import quote

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from peagle.errors import shown
from pipelines.online.batches.records import StoredFile
from pipelines.online.batches.store import in_thread
from pipelines.online.errors import ApiError, overloaded
from pipelines.online.serve.flow import DownloadWindow

WINDOW_BYTES = 1 << 21
_PIECE_BYTES = 1 << 19
_BODY_TIMEOUT_S = 10.0  # to receive the request's body, which is ignored
_RETRY_AFTER_S = 1.0
_RANGE = re.compile(r"bytes=(?:([0-9]{1,18})-([0-9]{0,18})|-([0-9]{1,18}))")


class TransferLimit:
    """A limit for the bytes of concurrent uploads and downloads, per key and in total."""

    def __init__(self, *, max_bytes: int, max_bytes_per_key: int) -> None:
        self._max_bytes, self.max_per_key = max_bytes, min(max_bytes, max_bytes_per_key)
        self._held_bytes: Counter[str] = Counter()

    @contextlib.contextmanager
    def hold(self, key: str, num_bytes: int) -> Iterator[None]:
        """Reserve bytes, or raise 429 or 503."""
        if self._held_bytes[key] + num_bytes > self.max_per_key:
            message = "this key has reached its limit of concurrent uploads and downloads"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=_RETRY_AFTER_S)
        if self._held_bytes.total() + num_bytes > self._max_bytes:
            raise overloaded("the endpoint has reached its limit of concurrent uploads and downloads; try again")
        self._held_bytes[key] += num_bytes
        try:
            yield
        finally:
            self._held_bytes[key] -= num_bytes
            if not self._held_bytes[key]:
                del self._held_bytes[key]


class Download(Response):
    """A response with a file, or the part that the request's header `Range` requests.

    The open file has a buffer of `read_ahead_bytes` in addition to the window.
    """

    def __init__(
        self,
        file: StoredFile,
        open_source: Callable[[], BinaryIO],
        headers: Mapping[str, str],
        transfers: TransferLimit,
        *,
        read_ahead_bytes: int = 0,
    ) -> None:
        self._file, self._open_source = file, open_source
        self._transfers, self._read_ahead_bytes = transfers, read_ahead_bytes
        etag = f'"{file.id}-{file.num_bytes}"'  # contents are immutable
        range_header = headers.get("range") if headers.get("if-range") in (None, etag) else None
        self._span = span_of(range_header, file.num_bytes)
        is_part = len(self._span) < file.num_bytes
        response_headers = {
            "content-type": "application/octet-stream",
            "content-length": str(len(self._span)),
            "content-disposition": attachment(file.filename),
            "x-content-type-options": "nosniff",
            "accept-ranges": "bytes",
            "etag": etag,
        }
        if is_part:
            response_headers["content-range"] = f"bytes {self._span.start}-{self._span.stop - 1}/{file.num_bytes}"
        super().__init__(status_code=206 if is_part else 200, headers=response_headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        window = DownloadWindow(receive)
        await window.open(_BODY_TIMEOUT_S)
        num_bytes = self._read_ahead_bytes + (
            min(len(self._span), WINDOW_BYTES) if window.has_acks else len(self._span)
        )
        limit = self._transfers.max_per_key
        if num_bytes > limit:
            raise ApiError(
                400,
                f"the file has {self._file.num_bytes} bytes, but this endpoint sends at most {limit} per response: "
                "fetch it in parts with the header Range "
                "(no limit if Ray's nodes are started with deploy/ray.env)",
                code="range_needed",
            )
        with self._transfers.hold(self._file.owner, num_bytes), await self._open() as source:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send_pieces(source, window, send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            await window.wait_for_end()

    async def _send_pieces(self, source: BinaryIO, window: DownloadWindow, send: Send) -> None:
        num_sent = 0
        while num_sent < len(self._span) and not window.has_left:
            piece = await in_thread(source.read, min(_PIECE_BYTES, len(self._span) - num_sent))
            if not piece:
                raise OSError(f"{self._file.id}: shorter than its record")
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            num_sent += len(piece)
            if window.has_acks:
                await window.wait(num_sent, WINDOW_BYTES - _PIECE_BYTES)

    async def _open(self) -> BinaryIO:
        try:
            source = await in_thread(self._open_source)
        except FileNotFoundError:
            raise no_such_file(self._file.id) from None
        source.seek(self._span.start)
        return source


def span_of(header: str | None, num_bytes: int) -> range:
    """Return the bytes that a `Range` header requests; the whole file if it is invalid or has several ranges.

    >>> span_of("bytes=2-3", 10), span_of("bytes=-3", 10), span_of("bytes=8-99", 10)
    (range(2, 4), range(7, 10), range(8, 10))
    """
    match = _RANGE.fullmatch(header.replace(" ", "")) if header else None
    first, last, suffix_length = match.groups() if match else ("0", "", None)
    if last and int(last) < int(first):
        return range(num_bytes)  # invalid according to RFC 9110
    if suffix_length is not None:
        span = range(max(0, num_bytes - int(suffix_length)), num_bytes)
    else:
        span = range(int(first), min(int(last) + 1, num_bytes) if last else num_bytes)
    if not span and match:
        raise ApiError(416, f"range: the file has {num_bytes} bytes", code="range_not_satisfiable", param="range")
    return span


def attachment(filename: str) -> str:
    """Return a `Content-Disposition` that makes browsers save the file, for any filename.

    >>> attachment('a "b".jsonl')
    "attachment; filename*=UTF-8''a%20%22b%22.jsonl"
    """
    return f"attachment; filename*=UTF-8''{quote(filename, safe='')}"


def no_such_file(file_id: str) -> ApiError:
    """Return the error for an unknown file or a file of another key."""
    return ApiError(404, f"there is no file {shown(file_id)}", code="file_not_found")
