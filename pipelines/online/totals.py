"""Totals of a growing ledger: requests by time, engine, key and model; spend of keys; token prices.

Each record is read once, by whichever thread reads next, and passed to the followers. Totals are saved from time to
time with the read positions (`ledger_totals.py`), so that the next process continues from there. Memory grows with time
and keys, not with requests.
"""

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from peagle.economics.ledger import RequestReader
from peagle.economics.usage import RequestUsage
from pipelines.online.budgets import Budgets
from pipelines.online.ledger_totals import (
    MINUTE_S,
    RequestGroup,
    Sums,
    TokenPrice,
    TotalsCheckpoint,
    merge_old,
    read_checkpoint,
    write_checkpoint,
)

CHECKPOINT_NAME = "totals.jsonl"
_MIN_UNSAVED = 20_000  # records; reading them takes a second
_CELLS_PER_LINE = 4  # per new record: writing takes about as long as reading
_RETRY_S = 5.0
_SOON_S = 2.0
_POLL_S = 0.02
_log = logging.getLogger("ray.serve")


class LedgerFollower(Protocol):
    """Receives the records of a ledger."""

    def on_attach(self, totals: "Totals") -> None:
        """Start: everything in `totals` was read before."""

    def on_ledger_record(self, request: RequestUsage) -> None:
        """Receive a new record, after it was added to the totals."""


class Totals:
    """The totals of a ledger. Read them inside `snapshot`, or as a follower.

    Attributes:
        budgets: include every record.
        prices: token prices by model, as far as known.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = RequestReader(folder)
        self.cells: dict[RequestGroup, Sums] = {}
        self.budgets = Budgets()
        self.prices: dict[str, TokenPrice] = {}
        self._is_read = False
        self._newest_minute = 0
        self._num_unsaved = 0
        self._checkpoint = folder / CHECKPOINT_NAME
        self._lock = threading.RLock()
        self._followers: list[LedgerFollower] = []
        self._joining: list[LedgerFollower] = []  # attaching never waits for a long read
        self._is_restored = False
        self._thread: threading.Thread | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the ledger was read to its end once, and all followers are attached."""
        return self._is_read and not self._joining

    def add_follower(self, follower: LedgerFollower) -> None:
        """Attach a follower when the ledger is read next."""
        self._joining.append(follower)

    def catch_up(self) -> None:
        """Read new records.

        Raises:
            OSError: the ledger cannot be read.
        """
        with self._lock:
            if not self._is_restored:
                self._restore()
            self._attach_followers()
            for request in self._reader.each():
                self._attach_followers()
                self._add(request)
                for follower in self._followers:
                    follower.on_ledger_record(request)
                self._save_if_due()
            self._is_read = True

    def read_in_background(self) -> None:
        """Start a thread that reads new records, unless one is running."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._read_until_success, daemon=True)
            self._thread.start()

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read new records, and lock the totals until the end of the `with`.

        Raises:
            OSError: the ledger cannot be read.
        """
        with self._lock:
            self.catch_up()
            yield

    async def wait_until_loaded(self) -> bool:
        """Wait up to two seconds for the first read. Returns whether it is complete."""
        give_up_at = time.monotonic() + _SOON_S
        while not self.is_loaded and time.monotonic() < give_up_at:
            self.read_in_background()
            await asyncio.sleep(_POLL_S)
        return self.is_loaded

    def recent(self, since: float) -> Iterator[RequestUsage]:
        """Yield records of requests that ended after a Unix time."""
        return self._reader.again(since)

    def _read_until_success(self) -> None:
        while True:
            try:
                self.catch_up()
                return
            except Exception:  # the thread must survive: keys with a budget wait for it
                _log.exception("%s: cannot read the ledger; requests of keys with a budget must wait", self.folder)
                time.sleep(_RETRY_S)

    def _restore(self) -> None:
        self._is_restored = True
        found = read_checkpoint(self._checkpoint)
        if found is None:
            return
        if not self._reader.resume(found.marks):
            _log.warning("%s does not match the ledger's files; reading the whole ledger", self._checkpoint)
            return
        self.cells = found.cells
        self._newest_minute = max((cell.minute for cell in self.cells), default=0)
        self.budgets.restore(found.spent_by_day, found.batches)
        self.prices.update(found.prices)

    def _save_if_due(self) -> None:
        """Save the totals if due, also in the middle of a ledger. If that fails, the next process reads more."""
        if self._num_unsaved < max(_MIN_UNSAVED, len(self.cells) // _CELLS_PER_LINE):
            return
        self._num_unsaved = 0
        self.cells = merge_old(self.cells, self._newest_minute)
        try:
            write_checkpoint(
                self._checkpoint,
                TotalsCheckpoint(
                    marks=self._reader.marks(),
                    cells=self.cells,
                    spent_by_day=self.budgets.ledger_by_day,
                    batches=self.budgets.ledger_batches,
                    prices=self.prices,
                ),
            )
        except OSError as error:
            _log.error("%s: cannot be written; the next start takes longer: %s", self._checkpoint, error)

    def _attach_followers(self) -> None:
        while self._joining:
            follower = self._joining.pop(0)
            follower.on_attach(self)
            self._followers.append(follower)

    def _add(self, request: RequestUsage) -> None:
        minute = int(request.usage.finished_at // MINUTE_S)
        cell = RequestGroup(minute, request.usage.session_id, request.key, request.model, request.drafter, request.tags)
        self.cells.setdefault(cell, Sums(request.usage)).add(request)
        self._newest_minute = max(minute, self._newest_minute)
        self.budgets.on_ledger_record(request)
        self._num_unsaved += 1
        if not request.is_batch:
            self._update_price(request)

    def _update_price(self, request: RequestUsage) -> None:
        price = self.prices.get(request.model) or TokenPrice()
        price.update(request)
        if price.is_known:
            self.prices[request.model] = price


@functools.cache
def totals_of(folder: Path) -> Totals:
    """Return the totals of a ledger, one instance per process.

    Ray creates the gate and the other parts of the ingress from pickled arguments, so they cannot share an object
    otherwise.
    """
    return Totals(folder)
