"""Creation of batches and files within the limits of a key.

A request with the header `Idempotency-Key` is stored under a hash of that header before its batch is created, and the
first request wins. Uploads count toward the quota before their bytes arrive. Outputs of batches may exceed the quota;
then no new files or batches are accepted.
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
from pipelines.online.batches.records import BATCH_PREFIX, INPUT, WINDOW_S, Batch, BatchRequest, new_id
from pipelines.online.batches.settings import MIB, KeyQuota
from pipelines.online.batches.store import BatchStore, in_thread
from pipelines.online.errors import ApiError
from pipelines.online.gateway.keys import KeyRecord


class Quota:
    """Stored and arriving files of all keys. Thread-safe."""

    def __init__(self, store: BatchStore, limits: KeyQuota) -> None:
        self._store, self._limits = store, limits
        self._lock = threading.Lock()
        self._arriving_bytes: Counter[str] = Counter()
        self._arriving_files: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def hold(self, key: KeyRecord, num_bytes: int) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
        """Reserve space for a file until its record is written or the upload has failed. Raises 413 if over quota.

        Yields `write(function, *arguments)`, which runs `function` in a thread to write the record. The reservation
        stays until `function` returns, even if the client disconnects.
        """
        self._count_arriving(key, num_bytes, 1)
        writes: list[asyncio.Task[Any]] = []

        async def write(function: Callable[..., Any], *arguments: Any) -> Any:
            writes.append(asyncio.create_task(in_thread(function, *arguments)))
            return await asyncio.shield(writes[-1])

        try:
            await in_thread(self.require_space, key)
            yield write
        finally:
            if writes and not writes[-1].done():
                writes[-1].add_done_callback(lambda _: self._count_arriving(key, -num_bytes, -1))
            else:
                self._count_arriving(key, -num_bytes, -1)

    def _count_arriving(self, key: KeyRecord, num_bytes: int, num_files: int) -> None:
        with self._lock:
            self._arriving_bytes[key.name] += num_bytes
            self._arriving_files[key.name] += num_files

    def require_space(self, key: KeyRecord, *, num_bytes: int = 0, num_files: int = 0) -> None:
        """Raise 413 unless the key's files, arriving uploads and the given amount fit the quota."""
        limit, files = self._limits.for_key(key), self._store.files(key.name)
        num_files += len(files) + self._arriving_files[key.name]
        num_bytes += sum(file.num_bytes for file in files) + self._arriving_bytes[key.name]
        if num_files > limit.max_stored_files:
            exceeded = f"{limit.max_stored_files} files"
        elif num_bytes > limit.max_stored_mib * MIB:
            exceeded = f"{limit.max_stored_mib} MiB (this would be {-(-num_bytes // MIB)} MiB)"
        else:
            return
        message = f"this key may store {exceeded}, including running uploads; delete files that are not needed"
        raise ApiError(413, message, code="storage_quota_exceeded")


MAX_FIELD_BYTES = 1024  # of form fields other than the file
_DEFAULT_NAME = "upload.jsonl"


class ExpiresAfter(BaseModel):
    """Lifetime of a file: one hour to thirty days."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2592000)


class NewBatch(BaseModel):
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


def read_form(form: Mapping[str, Any]) -> tuple[Any, str, int | None]:
    """Return the upload, its name and its lifetime in seconds from the form of POST /v1/files."""
    upload, purpose = form.get("file"), form.get("purpose")
    if upload is None or isinstance(upload, str):
        raise _missing_file()
    if purpose != INPUT:
        message = f"purpose: this endpoint only stores files for batches ({INPUT!r}), not {shown(purpose)}"
        raise ApiError(400, message, code="invalid_purpose", param="purpose")
    if upload.size == 0:
        raise ApiError(400, "file: the file is empty", code="empty_file", param="file")
    # The last part of a path, without unprintable characters.
    name = re.split(r"[/\\]", upload.filename or _DEFAULT_NAME)[-1]
    name = "".join(char if char.isprintable() else "_" for char in name)
    name = name[-255:].strip() or _DEFAULT_NAME
    form_fields = {field: f"expires_after[{field}]" for field in ExpiresAfter.model_fields}
    expires_after = {field: form[form_field] for field, form_field in form_fields.items() if form_field in form}
    if not expires_after:
        return upload, name, None
    try:
        return upload, name, ExpiresAfter.model_validate(expires_after).seconds
    except ValidationError as error:
        first_error = error.errors()[0]
        param = f"expires_after[{first_error['loc'][0]}]"
        raise ApiError(400, f"{param}: {first_error['msg']}", code="invalid_value", param=param) from None


def require_form(content_type: str) -> None:
    """Refuse bodies other than UTF-8 multipart forms (400 or 415).

    Other bodies would be read into memory as a whole, and some of Python's encodings take minutes to decode.
    """
    media_type, options = parse_options_header(content_type)
    if media_type != b"multipart/form-data":
        raise _missing_file()
    charset = options.get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in ("utf-8", "utf8", "us-ascii", "ascii"):
        raise ApiError(415, f"content-type: send the form in UTF-8, not {shown(charset)}", code="unsupported_charset")


def _missing_file() -> ApiError:
    return ApiError(400, "file: send the file as multipart/form-data", code="missing_file", param="file")


def declared_bytes(headers: Mapping[str, str], max_bytes: int) -> int:
    """Return the Content-Length, or `max_bytes` if it is unknown or larger."""
    length = headers.get("content-length", "")
    return min(int(length), max_bytes) if length.isdecimal() and "transfer-encoding" not in headers else max_bytes


_MAX_IDEMPOTENCY_KEY_CHARS = 255
_RETRY_AFTER_S = 60.0


class BatchCreator:
    """Create batches. Thread-safe."""

    def __init__(self, store: BatchStore, quota: Quota, limits: KeyQuota) -> None:
        self._store, self._quota, self._limits = store, quota, limits
        # By key name. Requests wait for the asyncio lock, because that occupies no thread.
        self._thread_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._asyncio_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def create(self, body: NewBatch, key: KeyRecord, idempotency_key: str | None) -> Batch:
        """Create a batch in a thread. Batches of the same key are created one after the other."""
        async with self._asyncio_locks[key.name]:
            return await in_thread(self.create_blocking, body, key, idempotency_key)

    def create_blocking(self, body: NewBatch, key: KeyRecord, idempotency_key: str | None) -> Batch:
        """Create a batch, or return the batch of the first request with this idempotency key.

        Raises:
            ApiError: 400, invalid input file; 413 or 429, a limit is reached; 422, the idempotency key was used for a
                different request.
        """
        if idempotency_key is None:
            with self._thread_locks[key.name]:
                return self._store.add_batch(self._request(body, key))
        if not (idempotency_key.isprintable() and 0 < len(idempotency_key) <= _MAX_IDEMPOTENCY_KEY_CHARS):
            message = f"Idempotency-Key: must have 1 to {_MAX_IDEMPOTENCY_KEY_CHARS} printable characters"
            raise ApiError(400, message, code="invalid_value")
        name = hashlib.sha256(f"{key.name} {idempotency_key}".encode()).hexdigest()
        http_body = body.model_dump(mode="json")
        with self._thread_locks[key.name]:
            stored = self._store.load_idempotent(name)
            if stored is None:
                self._store.save_idempotent(name, self._request(body, key), http_body)
                stored = self._store.load_idempotent(name)
            assert stored is not None, "a request with this key was just stored"
            if stored["asked"] != http_body:
                message = "Idempotency-Key: already used for a different request; use a new key for each request"
                raise ApiError(422, message, code="idempotency_key_reused")
            request = BatchRequest.from_dict(stored["order"])
            return self._store.batch(request.id, request.key.name) or self._store.add_batch(request)

    def _request(self, body: NewBatch, key: KeyRecord) -> BatchRequest:
        input_file = self._store.file(body.input_file_id, key.name)
        if input_file is None or input_file.purpose != INPUT:
            message = f"input_file_id: there is no file {shown(body.input_file_id)} with the purpose {INPUT!r}"
            raise ApiError(400, message, code="invalid_input_file", param="input_file_id")
        self._quota.require_space(key, num_bytes=1, num_files=1)
        limit, batches = self._limits.for_key(key), self._store.batches(key.name)
        if sum(not batch.is_over for batch in batches) >= limit.max_unfinished_batches:
            message = f"this key may have {limit.max_unfinished_batches} unfinished batches"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=_RETRY_AFTER_S)
        if len(batches) >= limit.max_stored_files and not self._store.delete_oldest_record(batches):
            message = (
                f"this key has {len(batches)} batches, but may have {limit.max_stored_files}: delete the files of the "
                "oldest batches"
            )
            raise ApiError(413, message, code="storage_quota_exceeded")
        expires = body.output_expires_after
        return BatchRequest(
            id=new_id(BATCH_PREFIX),
            key=key.without_hash(),
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=self._store.now(),
            expires_at=self._store.clock.after(WINDOW_S),
            metadata=body.metadata,
            output_expires_s=None if expires is None else expires.seconds,
        )
