"""Take an order for a batch or a file, within the limits of its key.

An order is taken once for each `Idempotency-Key`; the client's fields are checked first. Outputs of batches count
towards a key's quota, and uploads while they arrive.

Whoever sends an order again, because the answer was lost, gets the batch of the first time. The order is written under
the name of the key before the batch begins, and of several at once the first counts. A crash in between loses nothing:
the next one finds the order there. It knows the store; what a batch may be is `ordering.py`.

An upload takes its bytes before they come, so several at once cannot overshoot together. What batches will make is not
known before it is there: it may go beyond, and then nothing new is taken.
"""

import asyncio
import contextlib
import hashlib
import re
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from python_multipart.multipart import parse_options_header

from peagle.errors import shown
from pipelines.online.batches.records import BATCH_PREFIX, INPUT, WINDOW_S, Batch, Order, new_id
from pipelines.online.batches.settings import MIB, KeyShares
from pipelines.online.batches.store import BatchStore, in_thread
from pipelines.online.errors import ApiError
from pipelines.online.gateway.keys import KeyRecord


class Quota:
    """The contents of keys and those on their way. Threads may share it."""

    def __init__(self, store: BatchStore, shares: KeyShares) -> None:
        self._store, self._shares = store, shares
        self._lock = threading.Lock()
        self._arriving_bytes: Counter[str] = Counter()
        self._arriving_files: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def hold(self, key: KeyRecord, num_bytes: int) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
        """Hold room for a file until its record exists or it came to nothing.

        The `with` gets a function that makes the record in a thread: it goes on, and holds the room, where the client
        leaves.

        Raises:
            ApiError: 413, there is no room.
        """
        self._arrive(key, num_bytes, 1)
        doing: list[asyncio.Task[Any]] = []

        async def held(function: Callable[..., Any], *arguments: Any) -> Any:
            doing.append(asyncio.create_task(in_thread(function, *arguments)))
            return await asyncio.shield(doing[-1])

        try:
            await in_thread(self._require, key)
            yield held
        finally:
            if doing and not doing[-1].done():
                doing[-1].add_done_callback(lambda _: self._arrive(key, -num_bytes, -1))
            else:
                self._arrive(key, -num_bytes, -1)

    def require_room(self, key: KeyRecord) -> None:
        """Make sure that a batch's outputs can be kept, as far as anybody knows.

        Raises:
            ApiError: 413, the key keeps as much as it may already.
        """
        self._require(key, num_bytes=1, num_files=1)

    def _arrive(self, key: KeyRecord, num_bytes: int, num_files: int) -> None:
        with self._lock:
            self._arriving_bytes[key.name] += num_bytes
            self._arriving_files[key.name] += num_files

    def _require(self, key: KeyRecord, *, num_bytes: int = 0, num_files: int = 0) -> None:
        """Require that a key's files, arrivals and as much more fit its share."""
        share, files = self._shares.of(key), self._store.files(key.name)
        num_files += len(files) + self._arriving_files[key.name]
        num_bytes += sum(file.num_bytes for file in files) + self._arriving_bytes[key.name]
        if num_files > share.max_stored_files:
            raise _full(f"{share.max_stored_files} files")
        if num_bytes > share.max_stored_mib * MIB:
            raise _full(f"{share.max_stored_mib} MiB, and this would be {-(-num_bytes // MIB)}")


def _full(most: str) -> ApiError:
    message = f"this key may store {most}, including running uploads; delete files that are not needed"
    return ApiError(413, message, code="storage_quota_exceeded")


MAX_FIELD_BYTES = 1024  # of a form, but for the file
_MAX_NAME_CHARS = 255
_DEFAULT_NAME = "upload.jsonl"
_CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii")


class ExpiresAfter(BaseModel):
    """When a file is to be deleted: between an hour and thirty days."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2592000)


class NewBatch(BaseModel):
    """The body of POST /v1/batches."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input_file_id: Annotated[str, Field(max_length=64)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None

    def order(self, key: KeyRecord, now: float, expires_at: float) -> Order:
        """The batch of this key."""
        expires = self.output_expires_after
        return Order(
            id=new_id(BATCH_PREFIX),
            key=key.without_hash(),
            endpoint=self.endpoint,
            input_file_id=self.input_file_id,
            completion_window=self.completion_window,
            created_at=now,
            expires_at=expires_at,
            metadata=self.metadata,
            output_expires_s=None if expires is None else expires.seconds,
        )


def read_form(form: Mapping[str, Any]) -> tuple[Any, str, int | None]:
    """The fields of POST /v1/files: the upload, its name, and the seconds of its life.

    Raises:
        ApiError: 400 or 422, with the field that is at fault.
    """
    upload, purpose = form.get("file"), form.get("purpose")
    if upload is None or isinstance(upload, str):
        raise _no_file()
    if purpose != INPUT:
        message = f"purpose: this endpoint keeps files for batches only: {INPUT!r}, not {shown(purpose)}"
        raise ApiError(400, message, code="invalid_purpose", param="purpose")
    if upload.size == 0:
        raise ApiError(400, "file: it is empty", code="empty_file", param="file")
    return upload, _name_of(upload.filename or _DEFAULT_NAME), _expiry(form)


def _expiry(form: Mapping[str, Any]) -> int | None:
    given = {name: form[key] for name in ExpiresAfter.model_fields if (key := f"expires_after[{name}]") in form}
    if not given:
        return None
    try:
        return ExpiresAfter.model_validate(given).seconds
    except ValidationError as error:
        first = error.errors()[0]
        param = f"expires_after[{first['loc'][0]}]"
        raise ApiError(400, f"{param}: {first['msg']}", code="invalid_value", param=param) from None


def require_form(content_type: str) -> None:
    """Refuse bodies that are not forms with files, or not in UTF-8.

    A body without files would be held whole; a form may name any encoding that Python has, and some take minutes to
    read.

    Raises:
        ApiError: 400 or 415.
    """
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise _no_file()
    charset = options.get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in _CHARSETS:
        raise ApiError(415, f"content-type: send the form in UTF-8, not {shown(charset)}", code="unsupported_charset")


def _no_file() -> ApiError:
    return ApiError(400, "file: send the file as multipart/form-data", code="missing_file", param="file")


def upload_bytes(headers: Mapping[str, str], most: int) -> int:
    """Bytes of a body to come, as stated, or `most` where it is silent."""
    length = headers.get("content-length", "")
    return min(int(length), most) if length.isdecimal() and "transfer-encoding" not in headers else most


def _name_of(filename: str) -> str:
    """The last part of a path, without what is no text."""
    name = re.split(r"[/\\]", filename)[-1]
    kept = "".join(char if char.isprintable() else "_" for char in name)
    return kept[-_MAX_NAME_CHARS:].strip() or _DEFAULT_NAME


_MAX_KEY_CHARS = 255
_RETRY_S = 60.0


class Orders:
    """Takes them. Threads may share it."""

    def __init__(self, store: BatchStore, quota: Quota, shares: KeyShares) -> None:
        self._store, self._quota, self._shares = store, quota, shares
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by the name of a key
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def take_in_turn(self, body: NewBatch, key: KeyRecord, idempotency_key: str | None) -> Batch:
        """`take` in a thread, of which a key has one at a time.

        Raises:
            ApiError: as `take`.
        """
        async with self._turns[key.name]:
            return await in_thread(self.take, body, key, idempotency_key)

    def take(self, body: NewBatch, key: KeyRecord, idempotency_key: str | None) -> Batch:
        """A new batch, or the one that this was the order for before.

        Raises:
            ApiError: 400, there is no such input; 413 or 429, the key has as much as it may; 422, the order was another
                one.
        """
        if idempotency_key is None:
            with self._locks[key.name]:
                return self._store.add_batch(self._new(body, key))
        if not (idempotency_key.isprintable() and 0 < len(idempotency_key) <= _MAX_KEY_CHARS):
            message = f"Idempotency-Key: it has to have 1 to {_MAX_KEY_CHARS} printable characters"
            raise ApiError(400, message, code="invalid_value")
        return self._take_once(body, key, hashlib.sha256(f"{key.name} {idempotency_key}".encode()).hexdigest())

    def _take_once(self, body: NewBatch, key: KeyRecord, name: str) -> Batch:
        asked = body.model_dump(mode="json")
        with self._locks[key.name]:
            first = self._store.ordered_as(name)
            if first is None:
                self._store.order_as(name, self._new(body, key), asked)
                first = self._store.ordered_as(name)
            assert first is not None, "it was written"
            return self._begin(first, asked)

    def _begin(self, first: dict[str, Any], asked: dict[str, Any]) -> Batch:
        if first["asked"] != asked:
            message = "Idempotency-Key: it came with another order before; send a new one with a new order"
            raise ApiError(422, message, code="idempotency_key_reused")
        order = Order.from_dict(first["order"])
        return self._store.batch(order.id, order.key.name) or self._store.add_batch(order)

    def _new(self, body: NewBatch, key: KeyRecord) -> Order:
        stored = self._store.file(body.input_file_id, key.name)
        if stored is None or stored.purpose != INPUT:
            message = f"input_file_id: there is no file {shown(body.input_file_id)} with the purpose {INPUT!r}"
            raise ApiError(400, message, code="invalid_input_file", param="input_file_id")
        self._quota.require_room(key)
        self._require_turn(key)
        return body.order(key, self._store.now(), self._store.clock.after(WINDOW_S))

    def _require_turn(self, key: KeyRecord) -> None:
        share, batches = self._shares.of(key), self._store.batches(key.name)
        if sum(not batch.is_over for batch in batches) >= share.max_unfinished_batches:
            message = f"this key may have {share.max_unfinished_batches} batches that have not ended"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=_RETRY_S)
        if len(batches) >= share.max_stored_files and not self._store.forget_oldest(batches):
            message = f"this key keeps {len(batches)} batches, of {share.max_stored_files}: delete files of the oldest"
            raise ApiError(413, message, code="storage_quota_exceeded")
