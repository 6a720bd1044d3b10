"""The folder of files and batches, on a disk or in an object store.

    files/              what clients see as files (`files.py`)
    orders/ID.json      a batch as it was asked for; written once, by whoever was asked
    cancels/ID.json     when it was cancelled; written once, by whoever was asked
    progress/ID.json    how far it is; rewritten, by the scheduler alone
    ends/ID.json        how it ended; written once, so a scheduler that was stopped cannot take an end back
    ordered/HASH.json   an order that came with an `Idempotency-Key`; written once, kept for a day
    runs/ID/            its run directory
    clock.json          what the time was a moment ago (`files.py`)
    .lease/             which process schedules (`peagle/runs/lease.py`)

It knows records and names; it knows neither HTTP nor runs. What cannot change any more is read once.
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
    Order,
    StoredFile,
)

_FOLDERS = ("files", "orders", "cancels", "progress", "ends", "ordered", "runs")
_KEPT_S = 24 * 3600.0


class BatchStore(FileStore):
    """Files and batches of all keys.

    Args:
        changes: as of `FileStore`.

    Attributes:
        is_scheduling: nobody else says how far batches are, so what this process said need not be read again.
    """

    def __init__(self, root: str | Place, **changes: Any) -> None:
        super().__init__(root, **changes)
        self._is_resumed = False
        self._ordered_until: dict[str, float] = {}
        self._orders: dict[str, Order] = {}
        self._progress: dict[str, BatchProgress] = {}
        self._cancelled: dict[str, float] = {}
        self.is_scheduling = False

    def prepare(self) -> None:
        """Make the folder ready.

        Raises:
            ConfigError: it cannot be written, or lets two writers create the same name.
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
        """Keep the records of what a batch has made; their ids.

        Args:
            output: where in its run directory the answers are, and how many bytes.
            errors_bytes: of the error file.
        """
        made = (
            ("output", f"runs/{batch.id}/{output[0]}" if output else "", output[1] if output else 0),
            ("errors", f"files/{output_id(batch, 'errors')}.jsonl", errors_bytes),
        )
        life_s = batch.order.output_expires_s
        expires_at = None if life_s is None else self.clock.after(life_s)
        ids = []
        for kind, at, num_bytes in made:
            if num_bytes:
                self.add_file(_output_file(batch, kind, at, num_bytes, created_at, expires_at))
            ids.append(output_id(batch, kind) if num_bytes else None)
        return ids[0], ids[1]

    def remove_file(self, file: StoredFile) -> None:
        """Delete a file, and before it what runs keep of it."""
        if file.batch_id is None:
            for batch in self.batches(file.owner):
                if batch.order.input_file_id == file.id:
                    forget_prompts(self.run_place(batch.id))
        elif file.id.endswith("-errors"):
            forget_errors(self.run_place(file.batch_id))
        else:
            forget_answers(self.run_place(file.batch_id))
        self.drop(file)

    def sweep(self) -> None:
        """Delete expired files and leftovers; note the time.

        A file that a batch still reads stays.
        """
        for file in self.overdue():
            if not self.uses(file):
                self.remove_file(file)
        for path in list((self.root / "ordered").glob("*.json")):
            until = self._ordered_until.get(path.name) or float((self.ordered_as(path.stem) or {"until": 0})["until"])
            self._ordered_until[path.name] = until
            if until <= self.clock():
                path.unlink(missing_ok=True)
                del self._ordered_until[path.name]
        remove_temporaries(self.root / "files", older_than_s=_KEPT_S)
        self.drop_orphans(_KEPT_S)
        write_json(self.root / "clock.json", self.clock.note())

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
        return Batch(order=order, progress=BatchProgress())

    def order_as(self, name: str, order: Order, asked: Mapping[str, Any]) -> None:
        """Keep an order under its name for a day; of several the first stays.

        Args:
            asked: the body of the request.
        """
        kept = {"asked": asked, "order": order.to_dict(), "until": self.clock.after(_KEPT_S)}
        write_once(self.root / "ordered" / f"{name}.json", json.dumps(kept).encode())

    def ordered_as(self, name: str) -> dict[str, Any] | None:
        """The order under a name, as `order_as` kept it."""
        return read_json(self.root / "ordered" / f"{name}.json")

    def forget_oldest(self, batches: Sequence[Batch]) -> bool:
        """Forget the order of the oldest of these that ended a day ago.

        Its files must be deleted. Its run stays, for whoever runs the endpoint. False where there is none.

        Args:
            batches: of a key, the newest first.
        """
        for batch in reversed(batches):
            ids = (batch.progress.output_file_id, batch.progress.error_file_id)
            is_old = self.clock() - batch.order.created_at > 2 * _KEPT_S  # nobody orders it again by its name
            if is_old and batch.is_over and not any(name and self.file(name, batch.order.key.name) for name in ids):
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
        """Have this process alone say how far batches are, from now on.

        What others have said meanwhile is read once more.
        """
        self._progress = {name: one for name, one in list(self._progress.items()) if one.status in FINAL}
        self.is_scheduling = True

    def save(self, batch_id: str, progress: BatchProgress) -> None:
        """Keep how far a batch is.

        Only the scheduler says so; of several ends the first one counts.
        """
        if progress.status in FINAL:
            write_once(self.root / "ends" / f"{batch_id}.json", json_bytes(progress.to_dict()))
        else:
            write_json(self.root / "progress" / f"{batch_id}.json", progress.to_dict())
        self._progress[batch_id] = self._end(batch_id) or progress

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
            if not ID.fullmatch(batch_id) or (values := read_json(self.root / "orders" / f"{batch_id}.json")) is None:
                return None
            self._orders[batch_id] = Order.from_dict(values)
        return self._orders[batch_id]

    def _batch(self, order: Order) -> Batch:
        progress = self._progress.get(order.id)
        if progress is None or not (self.is_scheduling or progress.status in FINAL):
            said = self._end(order.id) or self._said(order.id)
            if self.is_scheduling:  # what the scheduler has said since is newer
                progress = self._progress.setdefault(order.id, said)
            else:
                progress = self._progress[order.id] = said
        may_be_cancelled = progress.status not in FINAL or progress.status == "cancelled"
        cancelling_at = self._cancelling_at(order.id) if may_be_cancelled else None
        return Batch(order=order, progress=progress, cancelling_at=cancelling_at)

    def _end(self, batch_id: str) -> BatchProgress | None:
        values = read_json(self.root / "ends" / f"{batch_id}.json")
        return None if values is None else BatchProgress.from_dict(values)

    def _said(self, batch_id: str) -> BatchProgress:
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
    """Of a batch's "output" or "errors": the same id however often they are made."""
    return f"{FILE_PREFIX}{batch.id.removeprefix(BATCH_PREFIX)}-{kind}"


def _output_file(
    batch: Batch, kind: str, at: str, num_bytes: int, created_at: float, expires_at: float | None
) -> StoredFile:
    order = batch.order
    return StoredFile(
        id=output_id(batch, kind),
        owner=order.key.name,
        filename=f"{order.id}_{kind}.jsonl",
        purpose=OUTPUT,
        num_bytes=num_bytes,
        created_at=created_at,
        at=at,
        expires_at=expires_at,
        batch_id=order.id,
    )


_MOST = 32
_Answer = TypeVar("_Answer")
_threads = ThreadPoolExecutor(_MOST, thread_name_prefix="files")


async def in_thread(function: Callable[..., _Answer], *arguments: Any) -> _Answer:
    """The result of a function that may take a while, from a thread."""
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(function, *arguments))
