"""Files of all keys in the batch folder: records, contents, expiry, and copies of their contents in runs.

    files/ID.json       a file's record; immutable, cached
    files/ID.jsonl      its contents, unless a run directory has them

Files and batches expire by a steady clock, which advances with the machine's monotonic clock. If the wall clock jumps
(NTP, an administrator, a resumed virtual machine), the new time is trusted only after it has been steady for a day. So
a wrong clock that is corrected within a day expires nothing early; what expires during a suspension is deleted a day
late. After a restart of the process the clock continues from the saved time.

A run directory contains copies of prompts and answers:

    data/            requests with their answers
    failed/          failed requests
    suspects/        notes about requests
    export/FORMAT/   answers and errors; `openai-batch` has the files that clients download

Configuration, plan, account and logs of a run contain no prompts and are kept.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from peagle.storage import (
    READ_AHEAD_BYTES,
    Place,
    atomic_file,
    is_remote,
    open_to_read,
    place,
    presigned_url,
    remove,
    write_json,
)
from pipelines.online.batches.records import BATCH_PREFIX, FILE_PREFIX, StoredFile, created_at_of

BELIEVED_AFTER_S = 24 * 3600.0
_TOLERANCE_S = 2.0  # more than NTP's gradual corrections and a leap second
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str | None:
    """Return an id of the machine's current boot, or None if the system has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None


class SteadyClock:
    """Unix time that ignores jumps of the wall clock. Thread-safe.

    Args:
        wall: the system's Unix time.
        monotonic: comparable between processes of the same boot.
        boot: id of the boot; None if unknown.
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
        self._doubted: tuple[float, float] | None = None  # a different offset, and since when it has been stable

    def __call__(self) -> float:
        """Return the current Unix time."""
        with self._lock:
            now = self._monotonic()
            offset = self._wall() - now
            if _is_near(offset, self._offset):
                self._offset, self._doubted = offset, None
            elif self._doubted is None or not _is_near(offset, self._doubted[0]):
                self._doubted = offset, now
            elif now - self._doubted[1] >= BELIEVED_AFTER_S:
                self._offset, self._doubted = offset, None
            return now + self._offset

    def after(self, seconds: float) -> float:
        """Return the expiry time of something with this lifetime; rather late than early if clocks disagree."""
        return max(self(), self._wall()) + seconds

    def state(self) -> dict[str, Any]:
        """Return the state for `resume`."""
        now = self()
        with self._lock:
            return {"now": now, "monotonic": now - self._offset, "boot": self._boot, "doubted": self._doubted}

    def resume(self, note: Mapping[str, Any]) -> None:
        """Continue from the state of an earlier process."""
        with self._lock:
            self._doubted = None
            if self._boot is not None and note["boot"] == self._boot:
                self._offset = note["now"] - note["monotonic"]
                self._doubted = note["doubted"] and (note["doubted"][0], note["doubted"][1])
            else:
                self._offset = note["now"] - self._monotonic()


def _is_near(offset: float, other: float) -> bool:
    return abs(offset - other) <= _TOLERANCE_S


ID = re.compile(rf"({FILE_PREFIX}|{BATCH_PREFIX})[0-9a-f]{{28}}(-output|-errors)?")
_PRESIGNED_S = 300


class FileStore:
    """Files of all keys.

    Args:
        now: Unix time, only for display.
        monotonic: see `SteadyClock`.

    Attributes:
        clock: decides when files expire.
    """

    def __init__(
        self,
        root: str | Place,
        *,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root = place(root)
        self.now = now
        self.clock = SteadyClock(wall=now, monotonic=monotonic, boot=boot_id())
        self._files: dict[str, StoredFile] = {}

    @property
    def is_remote(self) -> bool:
        """Whether every access is a network request."""
        return is_remote(self.root)

    @property
    def read_ahead_bytes(self) -> int:
        """Memory used to read an open file."""
        return READ_AHEAD_BYTES if self.is_remote else 0

    def file(self, file_id: str, owner: str) -> StoredFile | None:
        """Return a file of this key, or None."""
        found = self._file(file_id)
        return found if found is not None and found.owner == owner and self._is_there(found) else None

    def files(self, owner: str) -> list[StoredFile]:
        """Return the files of a key, newest first."""
        mine = [file for file in self._all_files() if file.owner == owner and self._is_there(file)]
        return sorted(mine, key=lambda file: (file.created_at, file.id), reverse=True)

    def add_file(self, file: StoredFile) -> None:
        """Write the record of a file whose contents exist."""
        write_json(self.root / "files" / f"{file.id}.json", asdict(file))
        self._files[file.id] = file

    def contents_path(self, file: StoredFile) -> Place:
        """Return the path of the file's contents."""
        return _descend(self.root, file.at)

    def open(self, file: StoredFile) -> BinaryIO:
        """Open the file's contents.

        Raises:
            FileNotFoundError: deleted.
        """
        return open_to_read(self.contents_path(file))

    def presigned_url(self, file: StoredFile, disposition: str) -> str | None:
        """Return a download URL of the object store, or None if the file is on a disk."""
        return presigned_url(self.contents_path(file), _PRESIGNED_S, disposition)

    @contextmanager
    def writer(self, file_id: str) -> Iterator[tuple[str, BinaryIO]]:
        """Yield the `at` of a new file's record, and a file object for its contents."""
        at = f"files/{file_id}.jsonl"
        with atomic_file(_descend(self.root, at)) as target:
            yield at, target

    def drop(self, file: StoredFile) -> None:
        """Delete the contents and then the record, so that an interrupted deletion can be repeated."""
        remove(self.contents_path(file))
        remove(self.root / "files" / f"{file.id}.json")
        self._files.pop(file.id, None)

    def drop_orphans(self, older_than_s: float) -> None:
        """Delete uploads without a record, left by a crash."""
        folder = self.root / "files"
        records = {path.stem for path in folder.glob("*.json")}
        for path in folder.glob(f"{FILE_PREFIX}*.jsonl"):
            is_upload = ID.fullmatch(path.stem) is not None and "-" not in path.stem.removeprefix(FILE_PREFIX)
            if is_upload and path.stem not in records and self.clock() - created_at_of(path.stem) > older_than_s:
                remove(path)

    def overdue(self) -> list[StoredFile]:
        """Return expired files."""
        return [file for file in self._all_files() if not self._is_there(file)]

    def _is_there(self, file: StoredFile) -> bool:
        return file.expires_at is None or file.expires_at > self.clock()

    def _all_files(self) -> Iterator[StoredFile]:
        for path in (self.root / "files").glob("*.json"):
            if (file := self._file(path.stem)) is not None:
                yield file

    def _file(self, file_id: str) -> StoredFile | None:
        if file_id not in self._files:
            if not ID.fullmatch(file_id) or (values := read_json(self.root / "files" / f"{file_id}.json")) is None:
                return None
            self._files[file_id] = StoredFile(**values)
        return self._files[file_id]


def read_json(path: Place) -> dict[str, Any] | None:
    """Return the JSON in a file, or None if it does not exist."""
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return values


def _descend(root: Place, at: str) -> Place:
    for name in at.split("/"):
        root = root / name
    return root


_API = "openai-batch"
_OTHERS = ("parquet", "jsonl")  # written by a manual `peagle export`
_ERRORS = "errors.jsonl"


def forget_prompts(run: Place) -> None:
    """Delete a run's copies of its input. The API's output and error files stay."""
    _empty(run / "data")
    _empty(run / "failed")
    _empty(run / "suspects")
    for name in _OTHERS:
        _empty(run / "export" / name)


def forget_answers(run: Place) -> None:
    """Delete a run's output and copies of it."""
    _empty(run / "data")
    for name in (_API, *_OTHERS):
        _empty(run / "export" / name, but=_ERRORS)


def forget_errors(run: Place) -> None:
    """Delete a run's errors and copies of them."""
    _empty(run / "failed")
    for name in (_API, *_OTHERS):
        remove(run / "export" / name / _ERRORS)


def _empty(folder: Place, but: str | None = None) -> None:
    for path in list(folder.glob("*")):
        if path.name != but:
            remove(path)
