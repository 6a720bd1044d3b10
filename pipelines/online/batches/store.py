"""The folder of files and batches, on a disk or in an object store.

    files/ID.json       a file's record; ID.jsonl its bytes, unless a run has them
    orders/ID.json      a batch as it was asked for; written once, by whoever was asked
    cancels/ID.json     when it was cancelled; written once, by whoever was asked
    progress/ID.json    how far it is; rewritten, by the scheduler alone
    runs/ID/            its run directory
    .lease/             which process schedules (`pipelines/batch/lease.py`)

It knows records and names; it knows neither HTTP nor runs. What cannot change any more is read once.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, BinaryIO

from peagle.errors import ConfigError
from peagle.storage import (
    READ_AHEAD_BYTES,
    Place,
    atomic_file,
    is_remote,
    open_to_read,
    place,
    presigned_url,
    require_usable,
    write_json,
    write_once,
)
from pipelines.online.batches.records import (
    BATCH_PREFIX,
    FILE_PREFIX,
    FINAL,
    OUTPUT,
    Batch,
    Order,
    Progress,
    StoredFile,
)

_ID = re.compile(rf"({FILE_PREFIX}|{BATCH_PREFIX})[0-9a-f]{{28}}(-output|-errors)?")
_PRESIGNED_S = 300
_FOLDERS = ("files", "orders", "cancels", "progress", "runs")


class BatchStore:
    """Files and batches of all keys.

    Attributes:
        is_scheduling: nobody else says how far batches are, so what this process said need not be read again.
    """

    def __init__(self, root: str | Place, *, now: Callable[[], float] = time.time) -> None:
        self.root = place(root)
        self._now = now
        self._files: dict[str, StoredFile] = {}
        self._orders: dict[str, Order] = {}
        self._progress: dict[str, Progress] = {}
        self._cancelled: dict[str, float] = {}
        self.is_scheduling = False

    def prepare(self) -> None:
        """Make the folder ready.

        Raises:
            ConfigError: it cannot be written.
        """
        require_usable(self.root / ".lease")
        try:
            for name in _FOLDERS:
                (self.root / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"batches {self.root}: cannot be written: {error}") from error

    @property
    def is_remote(self) -> bool:
        """Whether a look at it is a request."""
        return is_remote(self.root)

    @property
    def read_ahead_bytes(self) -> int:
        """Bytes that whoever reads a file holds of it."""
        return READ_AHEAD_BYTES if self.is_remote else 0

    # --- files

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
        """Where a client gets its bytes from a store itself; None where they lie on a disk."""
        return presigned_url(self.bytes_of(file), _PRESIGNED_S, disposition)

    def add_outputs(
        self, batch: Batch, output: tuple[str, int] | None, errors_bytes: int, created_at: float
    ) -> tuple[str | None, str | None]:
        """Keep the records of what a batch has made; their ids.

        Args:
            output: where in its run directory the answers are, and how many bytes.
            errors_bytes: of the error file.
        """
        made = (
            ("output", f"runs/{batch.id}/{output[0]}" if output else "", output[1] if output else 0),
            ("errors", f"files/{output_id(batch, 'errors')}.jsonl", errors_bytes),
        )
        ids = []
        for kind, at, num_bytes in made:
            if num_bytes:
                self.add_file(_output_file(batch, kind, at, num_bytes, created_at))
            ids.append(output_id(batch, kind) if num_bytes else None)
        return ids[0], ids[1]

    @contextmanager
    def writer(self, file_id: str) -> Iterator[tuple[str, BinaryIO]]:
        """Where the bytes of a new file go: the `at` of its record, and what to write to."""
        at = f"files/{file_id}.jsonl"
        with atomic_file(_descend(self.root, at)) as target:
            yield at, target

    def remove_file(self, file: StoredFile) -> None:
        """Delete a file; of a batch's output or errors also what its run keeps of them."""
        (self.root / "files" / f"{file.id}.json").unlink(missing_ok=True)
        self._files.pop(file.id, None)
        self.bytes_of(file).unlink(missing_ok=True)
        if file.batch_id is not None:
            run = self.run_place(file.batch_id)
            if file.id.endswith("-errors"):  # made of the export, and a copy of it
                kept = [*(run / "failed").glob("*"), run / "export" / "openai-batch" / "errors.jsonl"]
            else:
                kept = list((run / "data").glob("*"))
            for path in kept:
                path.unlink(missing_ok=True)

    def remove_expired(self) -> None:
        """Delete the files whose time is over, but for what a batch still reads."""
        for file in list(self._all_files()):
            if not self._is_there(file) and not self.uses(file):
                self.remove_file(file)

    def _is_there(self, file: StoredFile) -> bool:
        return file.expires_at is None or file.expires_at > self._now()

    def _all_files(self) -> Iterator[StoredFile]:
        for path in (self.root / "files").glob("*.json"):
            if (file := self._file(path.stem)) is not None:
                yield file

    def _file(self, file_id: str) -> StoredFile | None:
        if file_id not in self._files:
            if not _ID.fullmatch(file_id) or (values := _read(self.root / "files" / f"{file_id}.json")) is None:
                return None
            self._files[file_id] = StoredFile(**values)
        return self._files[file_id]

    # --- batches

    def batch(self, batch_id: str, owner: str) -> Batch | None:
        """A batch of this key; None where it has none of that id."""
        order = self._order(batch_id)
        return self._batch(order) if order is not None and order.key.name == owner else None

    def batches(self, owner: str) -> list[Batch]:
        """The batches of a key, the newest first."""
        return [self._batch(order) for order in self._all_orders() if order.key.name == owner]

    def unfinished(self) -> list[Batch]:
        """The batches of everybody that have not ended, the oldest first."""
        orders = reversed(self._all_orders())
        return [batch for order in orders if not (batch := self._batch(order)).is_over]

    def add_batch(self, order: Order) -> Batch:
        """A new batch."""
        write_json(self.root / "orders" / f"{order.id}.json", order.to_dict())
        self._orders[order.id] = order
        return Batch(order=order, progress=Progress())

    def cancel(self, batch: Batch) -> Batch:
        """Ask for its end; asking twice changes nothing."""
        at = {"cancelling_at": self._now()}
        write_once(self.root / "cancels" / f"{batch.id}.json", json.dumps(at).encode())
        return replace(batch, cancelling_at=self._cancelling_at(batch.id))

    def begin_to_schedule(self) -> None:
        """From now on only this process says how far batches are; what others have said meanwhile is read once more."""
        self._progress = {name: one for name, one in list(self._progress.items()) if one.status in FINAL}
        self.is_scheduling = True

    def save(self, batch_id: str, progress: Progress) -> None:
        """Keep how far a batch is. Only the scheduler says so."""
        write_json(self.root / "progress" / f"{batch_id}.json", progress.to_dict())
        self._progress[batch_id] = progress

    def input_place(self, order: Order) -> Place:
        """The bytes of its input, also when their time is over."""
        return self.root / "files" / f"{order.input_file_id}.jsonl"

    def run_place(self, batch_id: str) -> Place:
        """The run directory of a batch."""
        return self.root / "runs" / batch_id

    def uses(self, file: StoredFile) -> bool:
        """Whether a batch of its owner still reads this file."""
        return any(batch.order.input_file_id == file.id and not batch.is_over for batch in self.batches(file.owner))

    def _all_orders(self) -> list[Order]:
        """Of all batches, the newest first."""
        names = sorted((path.stem for path in (self.root / "orders").glob("*.json")), reverse=True)
        return [order for name in names if (order := self._order(name)) is not None]

    def _order(self, batch_id: str) -> Order | None:
        if batch_id not in self._orders:
            if not _ID.fullmatch(batch_id) or (values := _read(self.root / "orders" / f"{batch_id}.json")) is None:
                return None
            self._orders[batch_id] = Order.from_dict(values)
        return self._orders[batch_id]

    def _batch(self, order: Order) -> Batch:
        progress = self._progress.get(order.id)
        if progress is None or not (self.is_scheduling or progress.status in FINAL):
            values = _read(self.root / "progress" / f"{order.id}.json")
            said = Progress() if values is None else Progress.from_dict(values)
            if self.is_scheduling:  # what the scheduler has said since is newer
                progress = self._progress.setdefault(order.id, said)
            else:
                progress = self._progress[order.id] = said
        may_be_cancelled = progress.status not in FINAL or progress.status == "cancelled"
        cancelling_at = self._cancelling_at(order.id) if may_be_cancelled else None
        return Batch(order=order, progress=progress, cancelling_at=cancelling_at)

    def _cancelling_at(self, batch_id: str) -> float | None:
        if batch_id not in self._cancelled:
            values = _read(self.root / "cancels" / f"{batch_id}.json")
            if values is None:
                return None
            self._cancelled[batch_id] = float(values["cancelling_at"])
        return self._cancelled[batch_id]


def output_id(batch: Batch, kind: str) -> str:
    """Of a batch's "output" or "errors": the same id however often they are made."""
    return f"{FILE_PREFIX}{batch.id.removeprefix(BATCH_PREFIX)}-{kind}"


def _output_file(batch: Batch, kind: str, at: str, num_bytes: int, created_at: float) -> StoredFile:
    order = batch.order
    return StoredFile(
        id=output_id(batch, kind),
        owner=order.key.name,
        filename=f"{order.id}_{kind}.jsonl",
        purpose=OUTPUT,
        num_bytes=num_bytes,
        created_at=created_at,
        at=at,
        expires_at=None if order.output_expires_s is None else created_at + order.output_expires_s,
        batch_id=order.id,
    )


def _read(path: Place) -> dict[str, Any] | None:
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return values


def _descend(root: Place, at: str) -> Place:
    for name in at.split("/"):
        root = root / name
    return root
