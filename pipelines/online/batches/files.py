"""The files of all keys in the folder of the batches.

Records, places of bytes, expiry, and the copies in runs.

    files/ID.json       a file's record; ID.jsonl its bytes, unless a run has them

A record never changes, so it is read once. It knows neither batches nor HTTP.

Files and batches expire by a steady clock. Between two looks as much time passes as the machine's monotonic clock
counts. Where the wall clock says otherwise it was set anew, by NTP, by a person or because a virtual machine went on
after a pause, and it may be wrong. It is believed when it has gone on steadily for a day. So nothing expires early by a
clock that is put right within a day, and what should have expired in a pause does so a day late.

A process goes on where the last one was: by the monotonic clock, if the machine was not started anew meanwhile, else
from the last time that was noted, as after a jump.

A run's copies of prompts and answers:

    data/            each request with its answer
    failed/          requests that failed
    suspects/        notes about requests
    export/FORMAT/   answers and errors again; `openai-batch` are the API's own files

What stays of a run are its configuration, its plan, its account and its logs, in which there is no prompt.
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
from pipelines.online.batches.records import BATCH_PREFIX, FILE_PREFIX, StoredFile, made_at

BELIEVED_AFTER_S = 24 * 3600.0
_TOLERANCE_S = 2.0  # NTP corrects less than that without a jump, and a leap second is one
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str | None:
    """Of this start of this machine: the monotonic clock counts from there.

    None where the system has none.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None


class SteadyClock:
    """Unix time as it should be; threads may share it.

    Args:
        wall: Unix time as the system says it.
        monotonic: seconds since some moment, for all processes between two starts of the machine the same.
        boot: which start of which machine this is; None where nobody knows.
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
        self._doubted: tuple[float, float] | None = None  # another offset, and since when it has been the same

    def __call__(self) -> float:
        """The time now."""
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
        """The expiry of something that is kept for so long.

        Late rather than early where clocks disagree.
        """
        return max(self(), self._wall()) + seconds

    def note(self) -> dict[str, Any]:
        """The state that the next process needs to go on."""
        now = self()
        with self._lock:
            return {"now": now, "monotonic": now - self._offset, "boot": self._boot, "doubted": self._doubted}

    def resume(self, note: Mapping[str, Any]) -> None:
        """Go on where another process was."""
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
        now: Unix time, for what is only shown.
        monotonic: see `SteadyClock`.

    Attributes:
        clock: by which files expire.
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
        """Whether a look at it is a request."""
        return is_remote(self.root)

    @property
    def read_ahead_bytes(self) -> int:
        """Bytes that whoever reads a file holds of it."""
        return READ_AHEAD_BYTES if self.is_remote else 0

    def file(self, file_id: str, owner: str) -> StoredFile | None:
        """A file of this key; None where it has none of that id."""
        found = self._file(file_id)
        return found if found is not None and found.owner == owner and self._is_there(found) else None

    def files(self, owner: str) -> list[StoredFile]:
        """The files of a key, the newest first."""
        mine = [file for file in self._all_files() if file.owner == owner and self._is_there(file)]
        return sorted(mine, key=lambda file: (file.created_at, file.id), reverse=True)

    def add_file(self, file: StoredFile) -> None:
        """Keep the record of a file whose bytes are there."""
        write_json(self.root / "files" / f"{file.id}.json", asdict(file))
        self._files[file.id] = file

    def bytes_of(self, file: StoredFile) -> Place:
        """Where its bytes are."""
        return _descend(self.root, file.at)

    def open(self, file: StoredFile) -> BinaryIO:
        """Its bytes.

        Raises:
            FileNotFoundError: they are gone.
        """
        return open_to_read(self.bytes_of(file))

    def presigned_url(self, file: StoredFile, disposition: str) -> str | None:
        """A URL of a store for a client; None where the bytes lie on a disk."""
        return presigned_url(self.bytes_of(file), _PRESIGNED_S, disposition)

    @contextmanager
    def writer(self, file_id: str) -> Iterator[tuple[str, BinaryIO]]:
        """Where the bytes of a new file go: the `at` of its record, and what to write to."""
        at = f"files/{file_id}.jsonl"
        with atomic_file(_descend(self.root, at)) as target:
            yield at, target

    def drop(self, file: StoredFile) -> None:
        """Delete its bytes and its record, the record last.

        Whoever is killed in between does not hide the rest.
        """
        remove(self.bytes_of(file))
        remove(self.root / "files" / f"{file.id}.json")
        self._files.pop(file.id, None)

    def drop_orphans(self, older_than_s: float) -> None:
        """Delete uploads without a record: somebody was killed in between."""
        folder = self.root / "files"
        records = {path.stem for path in folder.glob("*.json")}
        for path in folder.glob(f"{FILE_PREFIX}*.jsonl"):
            is_upload = ID.fullmatch(path.stem) is not None and "-" not in path.stem.removeprefix(FILE_PREFIX)
            if is_upload and path.stem not in records and self.clock() - made_at(path.stem) > older_than_s:
                remove(path)

    def overdue(self) -> list[StoredFile]:
        """Those whose time is over."""
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
    """The JSON of a file; None where there is no file."""
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
_OTHERS = ("parquet", "jsonl")  # of `peagle export`, by hand
_ERRORS = "errors.jsonl"


def forget_prompts(run: Place) -> None:
    """Delete a run's copies of its input.

    The API's files of answers and errors stay.
    """
    _empty(run / "data")
    _empty(run / "failed")
    _empty(run / "suspects")
    for name in _OTHERS:
        _empty(run / "export" / name)


def forget_answers(run: Place) -> None:
    """Delete what the run has of its output file."""
    _empty(run / "data")
    for name in (_API, *_OTHERS):
        _empty(run / "export" / name, but=_ERRORS)


def forget_errors(run: Place) -> None:
    """Delete what the run has of its error file."""
    _empty(run / "failed")
    for name in (_API, *_OTHERS):
        remove(run / "export" / name / _ERRORS)


def _empty(folder: Place, but: str | None = None) -> None:
    for path in list(folder.glob("*")):
        if path.name != but:
            remove(path)
