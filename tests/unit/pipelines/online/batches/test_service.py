import contextlib
import time

from peagle.runs.lease import hold_lease
from pipelines.online.batches import service
from pipelines.online.batches.records import BatchProgress
from pipelines.online.batches.service import Batches


def test_new_scheduler_reloads_progress(settings, runner, store, make_order, monkeypatch):
    monkeypatch.setattr(service, "_RETRY_S", 0.01)
    batch_id = store.add_batch(make_order()).id
    with (
        hold_lease(store.root, expiry_s=30, command=["another"], announce=print) as lease,
        contextlib.closing(Batches(settings, runner, spent_usd=lambda key: 0.0)) as batches,
    ):
        assert batches.store.batch(batch_id, "alice").progress.status == "validating"
        store.save(batch_id, BatchProgress(status="completed"))
        lease.end()
        deadline = time.monotonic() + 20
        while not batches.store.is_scheduling and time.monotonic() < deadline:
            time.sleep(0.01)
        assert batches.store.is_scheduling
        assert batches.store.batch(batch_id, "alice").progress.status == "completed"
        assert runner.works == []
