"""The folder of files and batches, on a disk or in an object store.

    files/              files of clients (`files.py`)
    orders/ID.json      a `BatchRequest`; written once, by any ingress
    cancels/ID.json     the time of cancellation; written once, by any ingress
    progress/ID.json    progress; rewritten by the scheduler only
    ends/ID.json        the final progress; written once, so that a stopped scheduler cannot overwrite it
    ordered/HASH.json   a request with an `Idempotency-Key`; written once, kept for a day
    runs/ID/            the run directory
    clock.json          a recent time (`files.py`)
    .lease/             the scheduling process (`peagle/runs/lease.py`)

Immutable records are read once.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from peagle.errors import ConfigError
from peagle.files import json_bytes
from peagle.storage import (
    Place,
    make_folder,
    remove,
    remove_temporaries,
    require_links,
    require_usable,
    write_json,
    write_once,
)
from pipelines.online.batches.files import ID, FileStore, forget_answers, forget_errors, forget_prompts, read_json
from pipelines.online.batches.records import (
    BATCH_PREFIX,
    FILE_PREFIX,
    FINAL,
    OUTPUT,
    Batch,
    BatchProgress,
    BatchRequest,
    StoredFile,
)

_FOLDERS = ("files", "orders", "cancels", "progress", "ends", "ordered", "runs")
_KEEP_S = 24 * 3600.0


class BatchStore(FileStore):
    """Files and batches of all keys.

    Args:
        options: for `FileStore`.

    Attributes:
        is_scheduling: whether only this process writes progress, so that its cached progress is current.
    """

    def __init__(self, root: str | Place, **options: Any) -> None:
        super().__init__(root, **options)
        self._is_resumed = False
        self._ordered_until: dict[str, float] = {}
        self._orders: dict[str, BatchRequest] = {}
        self._progress: dict[str, BatchProgress] = {}
        self._cancelled: dict[str, float] = {}
        self.is_scheduling = False

    def prepare(self) -> None:
        """Create the folders.

        Raises:
            ConfigError: not writable, or the file system allows two writers to create the same file.
        """
        require_usable(self.root / ".lease")
        try:
            for name in _FOLDERS:
                make_folder(self.root / name)
            require_links(self.root)
            if not self._is_resumed and (note := read_json(self.root / "clock.json")) is not None:
                self.clock.resume(note)
            self._is_resumed = True
        except OSError as error:
            raise ConfigError(f"batches {self.root}: cannot be written: {error}") from error

    # --- files

    def add_outputs(
        self, batch: Batch, output: tuple[str, int] | None, errors_bytes: int, created_at: float
    ) -> tuple[str | None, str | None]:
        """Record the output files of a batch and return their ids.

        Args:
            output: path in the run directory and size in bytes of the output.
            errors_bytes: size of the error file.
        """
        made = (
            ("output", f"runs/{batch.id}/{output[0]}" if output else "", output[1] if output else 0),
            ("errors", f"files/{output_id(batch, 'errors')}.jsonl", errors_bytes),
        )
        life_s = batch.request.output_expires_s
        expires_at = None if life_s is None else self.clock.after(life_s)
        ids = []
        for kind, at, num_bytes in made:
            if num_bytes:
                self.add_file(_output_file(batch, kind, at, num_bytes, created_at, expires_at))
            ids.append(output_id(batch, kind) if num_bytes else None)
        return ids[0], ids[1]

    def remove_file(self, file: StoredFile) -> None:
        """Delete a file, after deleting the copies that runs keep of its contents."""
        if file.batch_id is None:
            for batch in self.batches(file.owner):
                if batch.request.input_file_id == file.id:
                    forget_prompts(self.run_path(batch.id))
        elif file.id.endswith("-errors"):
            forget_errors(self.run_path(file.batch_id))
        else:
            forget_answers(self.run_path(file.batch_id))
        self.drop(file)

    def sweep(self) -> None:
        """Delete expired files and leftovers, and save the clock. A file stays while a batch reads it."""
        for file in self.overdue():
            if not self.uses(file):
                self.remove_file(file)
        for path in list((self.root / "ordered").glob("*.json")):
            until = self._ordered_until.get(path.name) or float(
                (self.load_idempotent(path.stem) or {"until": 0})["until"]
            )
            self._ordered_until[path.name] = until
            if until <= self.clock():
                path.unlink(missing_ok=True)
                del self._ordered_until[path.name]
        remove_temporaries(self.root / "files", older_than_s=_KEEP_S)
        self.drop_orphans(_KEEP_S)
        write_json(self.root / "clock.json", self.clock.state())

    # --- batches

    def batch(self, batch_id: str, owner: str) -> Batch | None:
        """Return a batch of this key, or None."""
        request = self._order(batch_id)
        return self._batch(request) if request is not None and request.key.name == owner else None

    def batches(self, owner: str) -> list[Batch]:
        """Return the batches of a key, newest first."""
        return [self._batch(request) for request in self._all_orders() if request.key.name == owner]

    def unfinished(self) -> list[Batch]:
        """Return the unfinished batches of all keys, oldest first."""
        orders = reversed(self._all_orders())
        return [batch for request in orders if not (batch := self._batch(request)).is_over]

    def add_batch(self, request: BatchRequest) -> Batch:
        """Store a new batch."""
        write_json(self.root / "orders" / f"{request.id}.json", request.to_dict())
        self._orders[request.id] = request
        return Batch(request=request, progress=BatchProgress())

    def save_idempotent(self, name: str, request: BatchRequest, body: Mapping[str, Any]) -> None:
        """Store a request under its idempotency hash for a day. The first of several wins.

        Args:
            body: of the HTTP request.
        """
        kept = {"asked": body, "order": request.to_dict(), "until": self.clock.after(_KEEP_S)}
        write_once(self.root / "ordered" / f"{name}.json", json.dumps(kept).encode())

    def load_idempotent(self, name: str) -> dict[str, Any] | None:
        """Return what `save_idempotent` stored."""
        return read_json(self.root / "ordered" / f"{name}.json")

    def forget_oldest(self, batches: Sequence[Batch]) -> bool:
        """Delete the record of the oldest batch that ended a day ago and whose files are deleted.

        The run directory stays.

        Args:
            batches: of a key, newest first.

        Returns:
            whether there was one.
        """
        for batch in reversed(batches):
            ids = (batch.progress.output_file_id, batch.progress.error_file_id)
            is_old = self.clock() - batch.request.created_at > 2 * _KEEP_S  # its idempotency key has expired
            if is_old and batch.is_over and not any(name and self.file(name, batch.request.key.name) for name in ids):
                for name in ("cancels", "progress", "ends", "orders"):
                    remove(self.root / name / f"{batch.id}.json")
                self._orders.pop(batch.id, None)
                return True
        return False

    def cancel(self, batch: Batch) -> Batch:
        """Ask for its end; asking twice changes nothing."""
        at = {"cancelling_at": self.now()}
        write_once(self.root / "cancels" / f"{batch.id}.json", json.dumps(at).encode())
        return replace(batch, cancelling_at=self._cancelling_at(batch.id))

    def begin_to_schedule(self) -> None:
        """Become the only process that writes progress. Reloads progress that others wrote."""
        self._progress = {name: one for name, one in list(self._progress.items()) if one.status in FINAL}
        self.is_scheduling = True

    def save(self, batch_id: str, progress: BatchProgress) -> None:
        """Save progress. Only the scheduler does; the first final progress wins."""
        if progress.status in FINAL:
            write_once(self.root / "ends" / f"{batch_id}.json", json_bytes(progress.to_dict()))
        else:
            write_json(self.root / "progress" / f"{batch_id}.json", progress.to_dict())
        self._progress[batch_id] = self._end(batch_id) or progress

    def input_path(self, request: BatchRequest) -> Place:
        """Return the path of the input, which stays until the batch has ended."""
        return self.root / "files" / f"{request.input_file_id}.jsonl"

    def run_path(self, batch_id: str) -> Place:
        """Return the run directory."""
        return self.root / "runs" / batch_id

    def uses(self, file: StoredFile) -> bool:
        """Return whether an unfinished batch reads this file."""
        return any(batch.request.input_file_id == file.id and not batch.is_over for batch in self.batches(file.owner))

    def _all_orders(self) -> list[BatchRequest]:
        """Return the requests of all batches, newest first."""
        names = sorted((path.stem for path in (self.root / "orders").glob("*.json")), reverse=True)
        return [request for name in names if (request := self._order(name)) is not None]

    def _order(self, batch_id: str) -> BatchRequest | None:
        if batch_id not in self._orders:
            if not ID.fullmatch(batch_id) or (values := read_json(self.root / "orders" / f"{batch_id}.json")) is None:
                return None
            self._orders[batch_id] = BatchRequest.from_dict(values)
        return self._orders[batch_id]

    def _batch(self, request: BatchRequest) -> Batch:
        progress = self._progress.get(request.id)
        if progress is None or not (self.is_scheduling or progress.status in FINAL):
            stored = self._end(request.id) or self._load_progress(request.id)
            if self.is_scheduling:  # progress saved since then is newer
                progress = self._progress.setdefault(request.id, stored)
            else:
                progress = self._progress[request.id] = stored
        may_be_cancelled = progress.status not in FINAL or progress.status == "cancelled"
        cancelling_at = self._cancelling_at(request.id) if may_be_cancelled else None
        return Batch(request=request, progress=progress, cancelling_at=cancelling_at)

    def _end(self, batch_id: str) -> BatchProgress | None:
        values = read_json(self.root / "ends" / f"{batch_id}.json")
        return None if values is None else BatchProgress.from_dict(values)

    def _load_progress(self, batch_id: str) -> BatchProgress:
        values = read_json(self.root / "progress" / f"{batch_id}.json")
        return BatchProgress() if values is None else BatchProgress.from_dict(values)

    def _cancelling_at(self, batch_id: str) -> float | None:
        if batch_id not in self._cancelled:
            values = read_json(self.root / "cancels" / f"{batch_id}.json")
            if values is None:
                return None
            self._cancelled[batch_id] = float(values["cancelling_at"])
        return self._cancelled[batch_id]


def output_id(batch: Batch, kind: str) -> str:
    """Return the file id of a batch's "output" or "errors". Deterministic, so that a retry writes the same file."""
    return f"{FILE_PREFIX}{batch.id.removeprefix(BATCH_PREFIX)}-{kind}"


def _output_file(
    batch: Batch, kind: str, at: str, num_bytes: int, created_at: float, expires_at: float | None
) -> StoredFile:
    request = batch.request
    return StoredFile(
        id=output_id(batch, kind),
        owner=request.key.name,
        filename=f"{request.id}_{kind}.jsonl",
        purpose=OUTPUT,
        num_bytes=num_bytes,
        created_at=created_at,
        at=at,
        expires_at=expires_at,
        batch_id=request.id,
    )


_MAX_THREADS = 32
_Answer = TypeVar("_Answer")
_threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="files")


async def in_thread(function: Callable[..., _Answer], *arguments: Any) -> _Answer:
    """Run a blocking function in the thread pool for files."""
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(function, *arguments))
