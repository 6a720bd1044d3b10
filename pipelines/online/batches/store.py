"""The folder of files and batches, on a disk or in an object store. Immutable records are cached.

files/ID.json       a file's record
files/ID.jsonl      its contents, unless a run directory has them
orders/ID.json      a `BatchRequest`; written once, by any ingress
cancels/ID.json     the time of cancellation; written once, by any ingress
progress/ID.json    progress; rewritten by the scheduler only
ends/ID.json        the final progress; written once, so that a stopped scheduler cannot overwrite it
ordered/HASH.json   a request with an `Idempotency-Key`; written once, kept for a day
runs/ID/            the run directory; data/, failed/, suspects/ and export/ contain prompts and answers
clock.json          the state of the `SteadyClock`
.lease/             the lease of the scheduler (`peagle/runs/lease.py`)
"""

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from peagle.errors import ConfigError
from peagle.files import json_bytes
from peagle.storage import (
    READ_AHEAD_BYTES,
    StoragePath,
    atomic_file,
    is_remote,
    make_folder,
    open_to_read,
    presigned_url,
    remove,
    remove_temporaries,
    require_links,
    require_usable,
    storage_path,
    write_json,
    write_once,
)
from pipelines.online.batches.records import (
    BATCH_PREFIX,
    FILE_PREFIX,
    FINAL,
    OUTPUT,
    Batch,
    BatchProgress,
    BatchRequest,
    StoredFile,
    created_at_of,
)

TRUST_AFTER_S = 24 * 3600.0  # after a jump of the wall clock
_KEEP_S = 24 * 3600.0  # lifetime of idempotency records, and of the files of crashed uploads
_PRESIGNED_URL_LIFETIME_S = 300
_FOLDERS = ("files", "orders", "cancels", "progress", "ends", "ordered", "runs")
_EXPORT = "openai-batch"
_OTHER_EXPORTS = ("parquet", "jsonl")  # written by a manual `peagle export`
_ERRORS = "errors.jsonl"
_ID = re.compile(rf"({FILE_PREFIX}|{BATCH_PREFIX})[0-9a-f]{{28}}(-output|-errors)?")
_TOLERANCE_S = 2.0  # more than NTP's gradual corrections and a leap second
_threads = ThreadPoolExecutor(32, thread_name_prefix="files")
_Result = TypeVar("_Result")
_Record = TypeVar("_Record")


def boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


class SteadyClock:
    """Unix time that ignores jumps of the wall clock. Thread-safe.

    The clock advances with the machine's monotonic clock. If the wall clock jumps (NTP, an administrator, a resumed
    virtual machine), the new time is trusted only after it has been steady for a day. So a wrong clock that is
    corrected within a day does not make files expire early. Files that expire during a suspension are deleted a day
    late.

    A new process continues from the saved time. Unless the machine has rebooted, the saved `monotonic` is still valid.
    """

    def __init__(
        self,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        boot: str | None = None,
    ) -> None:
        self._wall, self._monotonic, self._boot = wall, monotonic, boot
        self._lock = threading.Lock()
        self._offset = wall() - monotonic()
        self._doubted: tuple[float, float] | None = None  # the offset after a jump, and the time of the jump

    def __call__(self) -> float:
        with self._lock:
            now = self._monotonic()
            offset = self._wall() - now
            if _is_near(offset, self._offset):
                self._offset, self._doubted = offset, None
            elif self._doubted is None or not _is_near(offset, self._doubted[0]):
                self._doubted = offset, now
            elif now - self._doubted[1] >= TRUST_AFTER_S:
                self._offset, self._doubted = offset, None
            return now + self._offset

    def after(self, seconds: float) -> float:
        """Return the end of a lifetime that starts now, by this clock or the wall clock, whichever is later."""
        return max(self(), self._wall()) + seconds

    def state(self) -> dict[str, Any]:
        now = self()
        with self._lock:
            return {"now": now, "monotonic": now - self._offset, "boot": self._boot, "doubted": self._doubted}

    def resume(self, saved: Mapping[str, Any]) -> None:
        with self._lock:
            self._doubted = None
            if self._boot is not None and saved["boot"] == self._boot:
                self._offset = saved["now"] - saved["monotonic"]
                self._doubted = saved["doubted"] and (saved["doubted"][0], saved["doubted"][1])
            else:
                self._offset = saved["now"] - self._monotonic()


def _is_near(offset: float, other_offset: float) -> bool:
    return abs(offset - other_offset) <= _TOLERANCE_S


class BatchStore:
    """Files and batches of all keys.

    Attributes:
        now: the wall clock, for the times that are displayed.
        clock: decides when files and batches expire.
        is_scheduling: whether only this process writes progress, so that cached progress is current.
    """

    def __init__(
        self,
        root: str | StoragePath,
        *,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root = storage_path(root)
        self.now = now
        self.clock = SteadyClock(wall=now, monotonic=monotonic, boot=boot_id())
        self.is_scheduling = False
        self._is_clock_resumed = False
        self._files: dict[str, StoredFile] = {}
        self._idempotent_until: dict[str, float] = {}
        self._requests: dict[str, BatchRequest] = {}
        self._progress: dict[str, BatchProgress] = {}
        self._cancellation_times: dict[str, float] = {}

    def prepare(self) -> None:
        """Create the folders. Raises ConfigError if they are not writable or do not support exclusive creation."""
        require_usable(self.root / ".lease")
        try:
            for name in _FOLDERS:
                make_folder(self.root / name)
            require_links(self.root)
            if not self._is_clock_resumed and (saved := read_json(self.root / "clock.json")) is not None:
                self.clock.resume(saved)
            self._is_clock_resumed = True
        except OSError as error:
            raise ConfigError(f"batches {self.root}: cannot be written: {error}") from error

    # --- files

    @property
    def is_remote(self) -> bool:
        return is_remote(self.root)

    @property
    def read_ahead_bytes(self) -> int:
        return READ_AHEAD_BYTES if self.is_remote else 0

    def file(self, file_id: str, owner: str) -> StoredFile | None:
        file = self._file(file_id)
        return file if file is not None and file.owner == owner and self._is_unexpired(file) else None

    def files(self, owner: str) -> list[StoredFile]:
        """Return the files of a key, newest first."""
        own_files = [file for file in self._all_files() if file.owner == owner and self._is_unexpired(file)]
        return sorted(own_files, key=lambda file: (file.created_at, file.id), reverse=True)

    def add_file(self, file: StoredFile) -> None:
        """Write a file's record. Its contents must already exist."""
        write_json(self.root / "files" / f"{file.id}.json", asdict(file))
        self._files[file.id] = file

    def contents_path(self, file: StoredFile) -> StoragePath:
        return _path_below(self.root, file.at)

    def open(self, file: StoredFile) -> BinaryIO:
        """Open the file's contents. Raises FileNotFoundError if the file was deleted."""
        return open_to_read(self.contents_path(file))

    def presigned_url(self, file: StoredFile, disposition: str) -> str | None:
        """Return a download URL of the object store, or None if the file is on a disk."""
        return presigned_url(self.contents_path(file), _PRESIGNED_URL_LIFETIME_S, disposition)

    @contextmanager
    def writer(self, file_id: str) -> Iterator[tuple[str, BinaryIO]]:
        """Yield the relative path of a new file (`StoredFile.at`), and a file object for its contents."""
        at = f"files/{file_id}.jsonl"
        with atomic_file(_path_below(self.root, at)) as target:
            yield at, target

    def _delete(self, file: StoredFile) -> None:
        """Delete the contents and then the record, so that an interrupted deletion can be repeated."""
        remove(self.contents_path(file))
        remove(self.root / "files" / f"{file.id}.json")
        self._files.pop(file.id, None)

    def _delete_orphaned_uploads(self, folder: StoragePath) -> None:
        """Delete uploads that a crash left without a record more than a day ago."""
        records = {path.stem for path in folder.glob("*.json")}
        for path in folder.glob(f"{FILE_PREFIX}*.jsonl"):
            is_upload = _ID.fullmatch(path.stem) is not None and "-" not in path.stem.removeprefix(FILE_PREFIX)
            if is_upload and path.stem not in records and self.clock() - created_at_of(path.stem) > _KEEP_S:
                remove(path)

    def _is_unexpired(self, file: StoredFile) -> bool:
        return file.expires_at is None or file.expires_at > self.clock()

    def _all_files(self) -> Iterator[StoredFile]:
        for path in (self.root / "files").glob("*.json"):
            if (file := self._file(path.stem)) is not None:
                yield file

    def _file(self, file_id: str) -> StoredFile | None:
        return self._read_once(self._files, "files", file_id, lambda values: StoredFile(**values))

    def _read_once(
        self, cache: dict[str, _Record], folder: str, name: str, parse: Callable[[dict[str, Any]], _Record]
    ) -> _Record | None:
        """Return an immutable record, or None if it does not exist or the name is not an id."""
        if name not in cache:
            values = read_json(self.root / folder / f"{name}.json") if _ID.fullmatch(name) else None
            if values is None:
                return None
            cache[name] = parse(values)
        return cache[name]

    def add_outputs(
        self, batch: Batch, output: tuple[str, int] | None, errors_bytes: int, created_at: float
    ) -> tuple[str | None, str | None]:
        """Record the output files of a batch and return their ids.

        `output` is the path of the output file in the run directory, and its size in bytes.
        """
        lifetime_s = batch.request.output_expires_s
        expires_at = None if lifetime_s is None else self.clock.after(lifetime_s)

        def add(kind: str, at: str, num_bytes: int) -> str:
            file = StoredFile(
                id=output_id(batch, kind),
                owner=batch.request.key.name,
                filename=f"{batch.id}_{kind}.jsonl",
                purpose=OUTPUT,
                num_bytes=num_bytes,
                created_at=created_at,
                at=at,
                expires_at=expires_at,
                batch_id=batch.id,
            )
            self.add_file(file)
            return file.id

        output_file_id = add("output", f"runs/{batch.id}/{output[0]}", output[1]) if output else None
        errors_file_id = (
            add("errors", f"files/{output_id(batch, 'errors')}.jsonl", errors_bytes) if errors_bytes else None
        )
        return output_file_id, errors_file_id

    def remove_file(self, file: StoredFile) -> None:
        """Delete all copies of a file's contents in run directories, then the file."""
        if file.batch_id is None:
            for batch in self.batches(file.owner):
                if batch.request.input_file_id == file.id:
                    _delete_prompts(self.run_path(batch.id))
        elif file.id.endswith("-errors"):
            run = self.run_path(file.batch_id)
            _delete_files(run / "failed")
            for name in (_EXPORT, *_OTHER_EXPORTS):
                remove(run / "export" / name / _ERRORS)
        else:
            run = self.run_path(file.batch_id)
            _delete_files(run / "data")
            for name in (_EXPORT, *_OTHER_EXPORTS):
                _delete_files(run / "export" / name, keep=_ERRORS)
        self._delete(file)

    def sweep(self) -> None:
        """Delete expired files, old idempotency records and unfinished uploads. Save the clock.

        An expired file stays while a batch reads it.
        """
        for file in list(self._all_files()):
            if not (self._is_unexpired(file) or self.is_in_use(file)):
                self.remove_file(file)
        for path in list((self.root / "ordered").glob("*.json")):
            if path.name not in self._idempotent_until:
                stored = self.load_idempotent(path.stem) or {"until": 0}
                self._idempotent_until[path.name] = float(stored["until"])
            if self._idempotent_until[path.name] <= self.clock():
                path.unlink(missing_ok=True)
                del self._idempotent_until[path.name]
        remove_temporaries(self.root / "files", older_than_s=_KEEP_S)
        self._delete_orphaned_uploads(self.root / "files")
        write_json(self.root / "clock.json", self.clock.state())

    # --- batches

    def batch(self, batch_id: str, owner: str) -> Batch | None:
        request = self._request(batch_id)
        return self._batch(request) if request is not None and request.key.name == owner else None

    def batches(self, owner: str) -> list[Batch]:
        """Return the batches of a key, newest first."""
        return [self._batch(request) for request in self._all_requests() if request.key.name == owner]

    def unfinished(self) -> list[Batch]:
        """Return the unfinished batches of all keys, oldest first."""
        requests = reversed(self._all_requests())
        return [batch for request in requests if not (batch := self._batch(request)).is_over]

    def add_batch(self, request: BatchRequest) -> Batch:
        write_json(self.root / "orders" / f"{request.id}.json", request.to_dict())
        self._requests[request.id] = request
        return Batch(request=request, progress=BatchProgress())

    def save_idempotent(self, name: str, request: BatchRequest, body: Mapping[str, Any]) -> None:
        """Store a request and the HTTP body under its idempotency hash for a day. The first writer wins."""
        stored = {"asked": body, "order": request.to_dict(), "until": self.clock.after(_KEEP_S)}
        write_once(self.root / "ordered" / f"{name}.json", json.dumps(stored).encode())

    def load_idempotent(self, name: str) -> dict[str, Any] | None:
        return read_json(self.root / "ordered" / f"{name}.json")

    def delete_oldest_record(self, batches: Sequence[Batch]) -> bool:
        """Delete the records of a key's oldest batch that has ended, is two days old and has no files.

        Returns whether there was such a batch.
        """
        for batch in reversed(batches):
            file_ids = (batch.progress.output_file_id, batch.progress.error_file_id)
            is_old = self.clock() - batch.request.created_at > 2 * _KEEP_S  # the request's idempotency key has expired
            owner = batch.request.key.name
            if is_old and batch.is_over and not any(file_id and self.file(file_id, owner) for file_id in file_ids):
                for name in ("cancels", "progress", "ends", "orders"):
                    remove(self.root / name / f"{batch.id}.json")
                self._requests.pop(batch.id, None)
                return True
        return False

    def cancel(self, batch: Batch) -> Batch:
        """Record the time of cancellation. Idempotent."""
        cancellation = {"cancelling_at": self.now()}
        write_once(self.root / "cancels" / f"{batch.id}.json", json.dumps(cancellation).encode())
        return replace(batch, cancelling_at=self._cancelling_at(batch.id))

    def begin_to_schedule(self) -> None:
        """Become the only process that writes progress. Cached progress that others may have changed is dropped."""
        self._progress = {name: progress for name, progress in list(self._progress.items()) if progress.status in FINAL}
        self.is_scheduling = True

    def save(self, batch_id: str, progress: BatchProgress) -> None:
        """Save progress. Only the scheduler may call this; the first final progress wins."""
        if progress.status in FINAL:
            write_once(self.root / "ends" / f"{batch_id}.json", json_bytes(progress.to_dict()))
        else:
            write_json(self.root / "progress" / f"{batch_id}.json", progress.to_dict())
        self._progress[batch_id] = self._load_progress("ends", batch_id) or progress

    def input_path(self, request: BatchRequest) -> StoragePath:
        """Return the path of the input, which stays until the batch has ended."""
        return self.root / "files" / f"{request.input_file_id}.jsonl"

    def run_path(self, batch_id: str) -> StoragePath:
        return self.root / "runs" / batch_id

    def is_in_use(self, file: StoredFile) -> bool:
        """Return whether the file is the input of an unfinished batch."""
        return any(batch.request.input_file_id == file.id and not batch.is_over for batch in self.batches(file.owner))

    def _all_requests(self) -> list[BatchRequest]:
        names = sorted((path.stem for path in (self.root / "orders").glob("*.json")), reverse=True)
        return [request for name in names if (request := self._request(name)) is not None]

    def _request(self, batch_id: str) -> BatchRequest | None:
        return self._read_once(self._requests, "orders", batch_id, BatchRequest.from_dict)

    def _batch(self, request: BatchRequest) -> Batch:
        progress = self._progress.get(request.id)
        if progress is None or not (self.is_scheduling or progress.status in FINAL):
            final = self._load_progress("ends", request.id)
            stored = final or self._load_progress("progress", request.id) or BatchProgress()
            if self.is_scheduling:  # `save` may have cached newer progress in the meantime
                progress = self._progress.setdefault(request.id, stored)
            else:
                progress = self._progress[request.id] = stored
        may_be_cancelled = progress.status not in FINAL or progress.status == "cancelled"
        cancelling_at = self._cancelling_at(request.id) if may_be_cancelled else None
        return Batch(request=request, progress=progress, cancelling_at=cancelling_at)

    def _load_progress(self, folder: str, batch_id: str) -> BatchProgress | None:
        values = read_json(self.root / folder / f"{batch_id}.json")
        return None if values is None else BatchProgress.from_dict(values)

    def _cancelling_at(self, batch_id: str) -> float | None:
        return self._read_once(
            self._cancellation_times, "cancels", batch_id, lambda values: float(values["cancelling_at"])
        )


def output_id(batch: Batch, kind: str) -> str:
    """Return the file id of a batch's "output" or "errors". Deterministic, so that a retry writes the same file."""
    return f"{FILE_PREFIX}{batch.id.removeprefix(BATCH_PREFIX)}-{kind}"


async def in_thread(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Run a blocking function in the thread pool for files."""
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(function, *arguments))


def read_json(path: StoragePath) -> dict[str, Any] | None:
    """Return the JSON in a file, or None if the file does not exist."""
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return values


def _path_below(root: StoragePath, at: str) -> StoragePath:
    for name in at.split("/"):
        root = root / name
    return root


def _delete_prompts(run: StoragePath) -> None:
    """Delete a run's copies of its input. The API's output and error files stay."""
    for name in ("data", "failed", "suspects"):
        _delete_files(run / name)
    for name in _OTHER_EXPORTS:
        _delete_files(run / "export" / name)


def _delete_files(folder: StoragePath, keep: str | None = None) -> None:
    for path in list(folder.glob("*")):
        if path.name != keep:
            remove(path)
