"""A growing ledger's totals: requests, spending of keys, prices of tokens.

By time, engine, key and model.

Each line is read once, by whoever asks next, and told to those who follow. Now and then what is added up is written
down with how far the files were read (`sums.py`), and the next process goes on from there. Memory grows with
time and keys and not with requests. It knows records; it knows neither prices of devices nor HTTP.
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
from pipelines.online.sums import (
    MINUTE_S,
    RequestGroup,
    Sums,
    TokenPrice,
    TotalsCheckpoint,
    merged,
    read_checkpoint,
    write_checkpoint,
)

CHECKPOINT_NAME = "totals.jsonl"
_LEAST_UNSAVED = 20_000  # lines; they are read in a second
_CELLS_PER_LINE = 4  # written for each line that is new: about what it took to read that line
_AGAIN_S = 5.0
_SOON_S = 2.0
_POLL_S = 0.02
_log = logging.getLogger("ray.serve")


class LedgerFollower(Protocol):
    """Told of a ledger from some moment on."""

    def on_attach(self, totals: "Totals") -> None:
        """All that `totals` has now will not be told again."""

    def on_ledger_record(self, request: RequestUsage) -> None:
        """A line that has just been read and added."""


class Totals:
    """The sums of a ledger.

    Whoever looks at them does so in `snapshot`, or as a follower.

    Attributes:
        budgets: of keys; they have each line with it.
        prices: by model, of those that have one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = RequestReader(folder)
        self.cells: dict[RequestGroup, Sums] = {}
        self.budgets = Budgets()
        self.prices: dict[str, TokenPrice] = {}
        self._was_read = False
        self._newest_minute = 0
        self._num_unsaved = 0
        self._checkpoint = folder / CHECKPOINT_NAME
        self._lock = threading.RLock()
        self._followers: list[LedgerFollower] = []
        self._joining: list[LedgerFollower] = []  # whoever follows never waits for a long look
        self._is_restored = False
        self._thread: threading.Thread | None = None

    @property
    def is_known(self) -> bool:
        """Whether the ledger was read to its end once, and followers were told."""
        return self._was_read and not self._joining

    def add_follower(self, follower: LedgerFollower) -> None:
        """Be told of each line, from the next look on."""
        self._joining.append(follower)

    def catch_up(self) -> None:
        """Read what is new.

        Raises:
            OSError: the ledger cannot be read.
        """
        with self._lock:
            if not self._is_restored:
                self._restore()
            self._let_join()
            for request in self._reader.each():
                self._let_join()
                self._add(request)
                for follower in self._followers:
                    follower.on_ledger_record(request)
                self._save_if_due()
            self._was_read = True

    def read_in_background(self) -> None:
        """Have a look on_attach, if none goes on, and wait for nothing."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._read_in_the_end, daemon=True)
            self._thread.start()

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read what is new, and let nothing change until the end of the `with`.

        Raises:
            OSError: the ledger cannot be read.
        """
        with self._lock:
            self.catch_up()
            yield

    async def wait_until_loaded(self) -> bool:
        """Whether the ledger has been read, or is within two seconds: a small one is."""
        give_up_at = time.monotonic() + _SOON_S
        while not self.is_known and time.monotonic() < give_up_at:
            self.read_in_background()
            await asyncio.sleep(_POLL_S)
        return self.is_known

    def recent(self, since: float) -> Iterator[RequestUsage]:
        """Requests that have been added and had ended after a Unix time."""
        return self._reader.again(since)

    def _read_in_the_end(self) -> None:
        while True:
            try:
                self.catch_up()
                return
            except Exception:  # the thread must not end: keys with a budget wait for it
                _log.exception("%s: the ledger cannot be read, and keys with a budget have to wait", self.folder)
                time.sleep(_AGAIN_S)

    def _restore(self) -> None:
        self._is_restored = True
        found = read_checkpoint(self._checkpoint)
        if found is None:
            return
        if not self._reader.resume(found.marks):
            _log.warning("%s is of other files than this ledger's: the whole ledger is read", self._checkpoint)
            return
        self.cells = found.cells
        self._newest_minute = max((cell.minute for cell in self.cells), default=0)
        self.budgets.restore(found.spent_by_day, found.batches)
        self.prices.update(found.prices)

    def _save_if_due(self) -> None:
        """Write the totals down when due, also in the middle of a ledger.

        Where that fails, the next process reads more.
        """
        if self._num_unsaved < max(_LEAST_UNSAVED, len(self.cells) // _CELLS_PER_LINE):
            return
        self._num_unsaved = 0
        self.cells = merged(self.cells, self._newest_minute)
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
            _log.error("%s: cannot be written, and the next start takes longer: %s", self._checkpoint, error)

    def _let_join(self) -> None:
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
            self._learn_price(request)

    def _learn_price(self, request: RequestUsage) -> None:
        price = self.prices.get(request.model) or TokenPrice()
        price.learn(request)
        if price.is_known:
            self.prices[request.model] = price


@functools.cache
def totals_of(folder: Path) -> Totals:
    """Those of a ledger, the same for all of this process, which reads it once.

    Ray builds the gate and the rest of the ingress from copies of what they are given, so neither can hand them to the
    other.
    """
    return Totals(folder)
