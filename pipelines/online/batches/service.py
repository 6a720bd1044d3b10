"""The endpoint's batches: the store, and the thread that schedules if this ingress has the folder's lease."""

import logging
import threading
from collections.abc import Callable

from peagle.errors import RunInUse
from peagle.runs.lease import Holding, hold_lease
from pipelines.online.batches.creation import BatchCreator, Quota
from pipelines.online.batches.downloads import TransferLimit
from pipelines.online.batches.scheduler import Scheduler
from pipelines.online.batches.settings import BatchSettings
from pipelines.online.batches.store import BatchStore
from pipelines.online.batches.work import Runner
from pipelines.online.gateway.keys import KeyRecord

_LEASE_S = 30.0
_POLL_S = 1.0
_REMOTE_POLL_S = 5.0  # each poll sends a few requests to S3
_RETRY_S = 5.0
_log = logging.getLogger("ray.serve")


class Batches:
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
        """Stop scheduling. The next scheduler resumes running work."""
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

    def _schedule_with(self, lease: Holding) -> None:
        self.store.begin_to_schedule()
        try:
            while not (self._ended.is_set() or lease.lost.is_set()):
                self._wake.clear()
                self._scheduler.tick()
                self._wake.wait(self._poll_s)
        finally:
            self.store.is_scheduling = False
            self._scheduler.abandon()
