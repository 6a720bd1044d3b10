"""`/v1/files` and `/v1/batches` as in OpenAI's API. A key only sees its own files and batches."""

import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, BinaryIO, Literal, Protocol, TypeVar

from fastapi import Query, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from peagle.errors import RunInUse, shown
from peagle.runs.lease import HeldLease, hold_lease
from pipelines.online.batches.creation import (
    MAX_FIELD_BYTES,
    BatchCreator,
    NewBatch,
    Quota,
    declared_bytes,
    read_form,
    require_form,
)
from pipelines.online.batches.downloads import Download, TransferLimit, attachment, no_such_file
from pipelines.online.batches.records import FILE_PREFIX, INPUT, Batch, StoredFile, new_id
from pipelines.online.batches.scheduler import Scheduler
from pipelines.online.batches.settings import BatchSettings
from pipelines.online.batches.store import BatchStore, in_thread
from pipelines.online.batches.work import Runner
from pipelines.online.errors import ApiError
from pipelines.online.gateway.keys import KeyRecord
from pipelines.online.gateway.routes import Route, Rule, delete, get, key_of, post
from pipelines.online.serve.flow import UPLOAD_WINDOW_BYTES
from pipelines.online.wire import BATCHES_URL, FILES_URL


class _ApiItem(Protocol):
    @property
    def id(self) -> str: ...

    def to_api_object(self) -> dict[str, Any]: ...


Item = TypeVar("Item", bound=_ApiItem)


def list_object(items: Sequence[Item], *, after: str | None, limit: int) -> dict[str, Any]:
    """Return one page of items as OpenAI's list object."""
    ids = [item.id for item in items]
    if after is not None and after not in ids:
        raise ApiError(400, f"after: {shown(after)} is not in this list", code="invalid_value", param="after")
    begin = 0 if after is None else ids.index(after) + 1
    page = [item.to_api_object() for item in items[begin : begin + limit]]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + limit < len(items),
    }


_PIECE_BYTES = 1 << 20
_LEASE_S = 30.0
_POLL_S = 1.0  # interval of the scheduler's steps
_REMOTE_POLL_S = 5.0  # each poll sends a few requests to S3
_RETRY_S = 5.0  # after an error, or while another ingress has the lease
_log = logging.getLogger("ray.serve")
_UPLOAD_SCHEMA = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": [INPUT]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
                    },
                }
            }
        },
    }
}
ROUTES: dict[str, Route] = {
    "create_file": post(FILES_URL, Rule.UPLOAD, openapi_extra=_UPLOAD_SCHEMA),
    "list_files": get(FILES_URL),
    "retrieve_file": get(FILES_URL + "/{file_id}"),
    "file_content": get(FILES_URL + "/{file_id}/content"),
    "delete_file": delete(FILES_URL + "/{file_id}"),
    "create_batch": post(BATCHES_URL, Rule.CREATE_BATCH),
    "list_batches": get(BATCHES_URL),
    "retrieve_batch": get(BATCHES_URL + "/{batch_id}"),
    "cancel_batch": post(BATCHES_URL + "/{batch_id}/cancel"),
}


class Batches:
    """The store of batches, and a thread that schedules them while this ingress has the lease of the store's folder."""

    def __init__(
        self,
        settings: BatchSettings,
        runner: Runner,
        *,
        spent_usd: Callable[[str], float | None],
        current_key: Callable[[KeyRecord], KeyRecord | None] | None = None,
    ) -> None:
        self.settings = settings
        self.store = BatchStore(settings.folder)
        self.quota = Quota(self.store, settings.quota)
        self.creator = BatchCreator(self.store, self.quota, settings.quota)
        self.transfers = TransferLimit(
            max_bytes=settings.max_transfers_bytes, max_bytes_per_key=settings.max_transfers_bytes_of_key
        )
        self._scheduler = Scheduler(self.store, runner, settings, spent_usd=spent_usd, current_key=current_key)
        self._poll_s = _REMOTE_POLL_S if self.store.is_remote else _POLL_S
        self._wake, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._schedule, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Schedule immediately, since something changed."""
        self._wake.set()

    def close(self) -> None:
        """Stop scheduling. The next scheduler takes over batches that are running."""
        self._ended.set()
        self._wake.set()
        self._thread.join()

    def _schedule(self) -> None:
        while not self._ended.is_set():
            try:
                self.store.prepare()
                with hold_lease(
                    self.store.root, expiry_s=_LEASE_S, command=["the endpoint's batches"], announce=_log.info
                ) as lease:
                    self._schedule_with(lease)
            except RunInUse as error:
                _log.info("batches: %s", error.message)
            except Exception:  # the thread must survive a temporary failure of the store
                _log.exception("batches: scheduling failed; it will be retried")
            self._ended.wait(_RETRY_S)

    def _schedule_with(self, lease: HeldLease) -> None:
        self.store.begin_to_schedule()
        try:
            while not (self._ended.is_set() or lease.lost.is_set()):
                self._wake.clear()
                self._scheduler.tick()
                self._wake.wait(self._poll_s)
        finally:
            self.store.is_scheduling = False
            self._scheduler.abandon()


class BatchRoutes:
    """Handlers of the routes. `batches` is None if batches are disabled."""

    batches: Batches | None = None

    async def create_file(self, request: Request) -> JSONResponse:
        """Upload the input of a batch."""
        batches, key = self._require_enabled(), key_of(request)
        require_form(request.headers.get("content-type", ""))
        num_bytes = declared_bytes(request.headers, batches.settings.max_upload_bytes)
        with batches.transfers.hold(key.name, UPLOAD_WINDOW_BYTES):
            async with (
                batches.quota.hold(key, num_bytes) as write,
                request.form(max_files=1, max_fields=8, max_part_size=MAX_FIELD_BYTES) as fields,
            ):
                upload, filename, expires_s = read_form(fields)
                stored: StoredFile = await write(_save, batches.store, upload.file, key.name, filename, expires_s)
        return JSONResponse(stored.to_api_object())

    async def list_files(
        self,
        request: Request,
        purpose: str | None = Query(None),
        limit: int = Query(10_000, ge=1, le=10_000),
        order: Literal["asc", "desc"] = Query("desc"),
        after: str | None = Query(None),
    ) -> JSONResponse:
        """Return the key's files."""
        files = await in_thread(self._require_enabled().store.files, key_of(request).name)
        files = [file for file in files if purpose in (None, file.purpose)]
        return JSONResponse(list_object(files if order == "desc" else files[::-1], after=after, limit=limit))

    async def retrieve_file(self, request: Request, file_id: str) -> JSONResponse:
        """Return the key's file."""
        return JSONResponse((await self._file(request, file_id)).to_api_object())

    async def file_content(self, request: Request, file_id: str) -> Response:
        """Return the contents of a file, or redirect to the object store."""
        stored, batches = await self._file(request, file_id), self._require_enabled()
        if batches.settings.presigns and (url := batches.store.presigned_url(stored, attachment(stored.filename))):
            return RedirectResponse(url, headers={"cache-control": "no-store"})
        return Download(
            stored,
            partial(batches.store.open, stored),
            request.headers,
            batches.transfers,
            read_ahead_bytes=batches.store.read_ahead_bytes,
        )

    async def delete_file(self, request: Request, file_id: str) -> JSONResponse:
        """Delete the key's file."""
        stored = await self._file(request, file_id)
        store = self._require_enabled().store
        if await in_thread(store.is_in_use, stored):
            message = f"{file_id} is the input of a batch that has not ended; cancel the batch first"
            raise ApiError(400, message, code="file_in_use")
        await in_thread(store.remove_file, stored)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def create_batch(self, request: Request, body: NewBatch) -> JSONResponse:
        """Create a batch."""
        batches, idempotency_key = self._require_enabled(), request.headers.get("idempotency-key")
        batch = await batches.creator.create(body, key_of(request), idempotency_key)
        batches.wake()
        return JSONResponse(batch.to_api_object())

    async def list_batches(
        self, request: Request, limit: int = Query(20, ge=1, le=100), after: str | None = Query(None)
    ) -> JSONResponse:
        """Return the key's batches, newest first."""
        batches = await in_thread(self._require_enabled().store.batches, key_of(request).name)
        return JSONResponse(list_object(batches, after=after, limit=limit))

    async def retrieve_batch(self, request: Request, batch_id: str) -> JSONResponse:
        """Return the key's batch."""
        return JSONResponse((await self._batch(request, batch_id)).to_api_object())

    async def cancel_batch(self, request: Request, batch_id: str) -> JSONResponse:
        """Cancel the key's batch."""
        batches, batch = self._require_enabled(), await self._batch(request, batch_id)
        if batch.is_over:
            message = f"{batch_id} cannot be cancelled: it is {batch.progress.status}"
            raise ApiError(400, message, code="batch_ended")
        batch = await in_thread(batches.store.cancel, batch)
        batches.wake()
        return JSONResponse(batch.to_api_object())

    def _require_enabled(self) -> Batches:
        if self.batches is None:
            message = "files and batches are disabled: the endpoint was started without --batches"
            raise ApiError(404, message, code="batches_off")
        return self.batches

    async def _file(self, request: Request, file_id: str) -> StoredFile:
        stored = await in_thread(self._require_enabled().store.file, file_id, key_of(request).name)
        if stored is None:
            raise no_such_file(file_id)
        return stored

    async def _batch(self, request: Request, batch_id: str) -> Batch:
        batch = await in_thread(self._require_enabled().store.batch, batch_id, key_of(request).name)
        if batch is None:
            raise ApiError(404, f"there is no batch {shown(batch_id)}", code="batch_not_found")
        return batch


def _save(store: BatchStore, upload: BinaryIO, owner: str, filename: str, expires_s: int | None) -> StoredFile:
    file_id, now = new_id(FILE_PREFIX), store.now()
    with store.writer(file_id) as (path, stored_file):
        shutil.copyfileobj(upload, stored_file, _PIECE_BYTES)
        num_bytes = upload.tell()
    stored = StoredFile(
        id=file_id,
        owner=owner,
        filename=filename,
        purpose=INPUT,
        num_bytes=num_bytes,
        created_at=now,
        at=path,
        expires_at=None if expires_s is None else store.clock.after(expires_s),
    )
    store.add_file(stored)
    return stored
