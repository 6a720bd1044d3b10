"""A batch store, and a batch runner that tests control."""

from dataclasses import replace
from itertools import count

import pytest
from usage_records import engine_session, unit_usage

from peagle.economics.usage import RequestUsage
from peagle.errors import PeagleError
from peagle.hardware import Hardware
from peagle.requests.fields import CHAT_URL
from pipelines.cluster.placement import Neighbours, Placement
from pipelines.online.batches.records import FILE_PREFIX, INPUT, WINDOW_S, BatchRequest, StoredFile, new_id
from pipelines.online.batches.settings import BatchModel, BatchSettings
from pipelines.online.batches.store import BatchStore
from pipelines.online.batches.work import BatchResult
from pipelines.online.gateway.admission import ServedModel
from pipelines.online.gateway.keys import KeyRecord

CPU = Hardware(platform="cpu", memory_gib=16, free_memory_gib=16, num_cpus=2)


@pytest.fixture
def make_key():
    return lambda name="alice", **limits: KeyRecord(name=name, sha256="0" * 64, **limits)


@pytest.fixture
def make_batch_request(make_key, clock):
    next_number = count()

    def make(input_file_id="file-x", *, key=None, **changes):
        return BatchRequest(
            id=f"batch_{next(next_number):028x}", key=key or make_key(), endpoint=CHAT_URL, input_file_id=input_file_id,
            completion_window="24h", created_at=clock.now, expires_at=clock.now + WINDOW_S, **changes,
        )  # fmt: skip

    return make


@pytest.fixture
def store(tmp_path, clock):
    batch_store = BatchStore(tmp_path / "batches", now=clock, monotonic=clock)
    batch_store.prepare()
    batch_store.is_scheduling = True
    return batch_store


@pytest.fixture
def upload(clock):
    """Return a function that stores a file, without an HTTP request."""

    def upload(store, data=b"{}\n", *, owner="alice", **changes):
        file_id = new_id(FILE_PREFIX)
        with store.writer(file_id) as (path, target):
            target.write(data)
        stored = StoredFile(
            id=file_id, owner=owner, filename="in.jsonl", purpose=INPUT, num_bytes=len(data), created_at=clock.now,
            at=path, **changes,
        )  # fmt: skip
        store.add_file(stored)
        return stored

    return upload


@pytest.fixture
def settings(tmp_path, store):
    placement = Placement(num_cpus=1, num_gpus=0, num_devices=1, device="vcpu", num_engines_on_node=2)
    batch_model = BatchModel(
        model=ServedModel(name="m", max_model_len=1000),
        config={"engine": "fake", "usd_per_hour": 1},
        neighbours=Neighbours(slot_group="app", hardware=CPU, placement=placement),
        commits={"org/model": "abc"},
    )
    return BatchSettings(
        folder=str(store.root),
        models={"m": batch_model},
        max_concurrent=1,
        max_output_tokens=None,
        ledger=tmp_path / "ledger",
    )


class FakeHandle:
    """A handle of a check, run or collection, which ends once a test sets `answer` to its result or error."""

    def __init__(self, kind, *arguments):
        self.kind, self.arguments = kind, arguments
        self.answer = self.reason = None
        self.current = (0, 0, 0.0)  # completed, failed, US dollars
        self.allowed = []
        self.is_killed = False

    def poll(self):
        if isinstance(self.answer, PeagleError):
            raise self.answer
        return self.answer

    def counts(self):
        return self.current

    def set_cost_limit(self, usd):
        self.allowed.append(usd)

    def stop(self, reason):
        self.reason = reason

    def kill(self):
        self.is_killed = True


class FakeRunner:
    """A batch runner that starts nothing and records each call in `handles`."""

    def __init__(self):
        self.handles = []

    def check(self, path, rules):
        return self._begin("check", path, rules)

    def run(self, task):
        return self._begin("run", task)

    def collect(self, task, reason):
        return self._begin("collect", task, reason)

    def _begin(self, kind, *arguments):
        self.handles.append(FakeHandle(kind, *arguments))
        return self.handles[-1]


@pytest.fixture
def runner():
    return FakeRunner()


@pytest.fixture
def make_session():
    """Return a function that makes sessions of an engine that took 30 s to start and costs one cent per second."""

    def make(**changes):
        session = engine_session(
            load_s=10.0, compile_s=20.0, busy_s=10.0, ended=False, model="m", usd_per_device_s=0.01
        )
        return replace(session, **changes)

    return make


@pytest.fixture
def make_result():
    def make(batch_id, reason=None, num_completed=3, num_failed=0):
        usage = unit_usage(
            batch_id,
            num_rows=num_completed,
            num_failed_rows=num_failed,
            num_prompt_tokens=12,
            num_cached_tokens=4,
            num_output_tokens=30,
        )
        record = RequestUsage(
            request_id=batch_id, key="alice", model="m", drafter=None, outcome="ok", ttft_s=None, usd=0.5, usage=usage
        )
        output = ("export/openai-batch/output.jsonl", 10) if num_completed else None
        return BatchResult(
            reason=reason, num_completed=num_completed, num_failed=num_failed, output=output,
            errors=20 if num_failed else 0, usage=usage, record=record,
        )  # fmt: skip

    return make
