"""The endpoint's batches: the store, and the only scheduling thread.

A new ingress may start before the old one has gone. So scheduling goes with the lease of the folder: whoever does not
hold it takes orders and answers questions, and looks again.
"""

import logging
import threading
from collections.abc import Callable

from peagle.errors import RunInUse
from peagle.runs.lease import Holding, hold_lease
from pipelines.online.batches.actors import Runner
from pipelines.online.batches.downloads import Room
from pipelines.online.batches.ordering import Orders, Quota
from pipelines.online.batches.scheduler import Scheduler
from pipelines.online.batches.settings import BatchSettings
from pipelines.online.batches.store import BatchStore
from pipelines.online.gateway.keys import KeyRecord

_LEASE_S = 30.0
_LOOK_S = 1.0
_LOOK_REMOTE_S = 5.0  # a look at a store is a few requests
_AGAIN_S = 5.0
_log = logging.getLogger("ray.serve")


class Batches:
    """The routes' view of batches, and the work behind them until `close`.

    Args:
        spent_usd, present_key: as `Scheduler` has them.

    Attributes:
        room: for files under way, up and down.
        quota: for what keys keep.
        orders: takes those for batches.
    """

    def __init__(
        self,
        settings: BatchSettings,
        runner: Runner,
        *,
        spent_usd: Callable[[str], float | None],
        present_key: Callable[[KeyRecord], KeyRecord | None] | None = None,
    ) -> None:
        self.settings = settings
        self.store = BatchStore(settings.folder)
        self.quota = Quota(self.store, settings.shares)
        self.orders = Orders(self.store, self.quota, settings.shares)
        self.room = Room(most_bytes=settings.max_transfers_bytes, most_bytes_of_key=settings.max_transfers_bytes_of_key)
        self._scheduler = Scheduler(self.store, runner, settings, spent_usd=spent_usd, present_key=present_key)
        self._look_s = _LOOK_REMOTE_S if self.store.is_remote else _LOOK_S
        self._wake, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._schedule, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is something to do."""
        self._wake.set()

    def close(self) -> None:
        """End; what is being done is left to whoever schedules next."""
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
                    self._go_on(lease)
            except RunInUse as error:
                _log.info("batches: %s", error.message)
            except Exception:  # the thread must not end: a store may be away for a while
                _log.exception("batches: scheduling broke off, and begins again")
            self._ended.wait(_AGAIN_S)

    def _go_on(self, lease: Holding) -> None:
        self.store.begin_to_schedule()
        try:
            while not (self._ended.is_set() or lease.lost.is_set()):
                self._wake.clear()
                self._scheduler.tick()
                self._wake.wait(self._look_s)
        finally:
            self.store.is_scheduling = False
            self._scheduler.abandon()
