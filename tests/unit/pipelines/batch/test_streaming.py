from types import SimpleNamespace

import pytest
from resolved_runs import corpus_plan

from peagle.errors import EngineError, PeagleError, StoppedEarly, StorageError
from peagle.profiles.watch import DrafterWatch
from peagle.speculation import SpeculationStats
from pipelines.batch import streaming
from pipelines.cluster import ray as cluster


class FakeDirectory:
    """A fake run directory in which only the given units are committed."""

    lease = None

    def __init__(self, *committed):
        self._committed = set(committed)

    def committed(self):
        return self._committed

    stop = SimpleNamespace(clear=lambda: None)


METRICS = SimpleNamespace(record_committed=lambda _: None, update=lambda *_: None)


class FakeSupervisor:
    tally = ending = None
    sessions = ()

    def observe(self):
        pass

    def new_warnings(self):
        return []

    def error(self):
        return EngineError("the run ended before its last unit")


@pytest.fixture
def stream(monkeypatch):
    """Return a function that streams units 0 and 1 from a dataset that ends immediately."""
    monkeypatch.setattr(streaming, "_dataset", lambda *_: SimpleNamespace(iter_rows=lambda: iter(())))
    progress = SimpleNamespace(show=lambda *_, **__: None, close=lambda: None)

    def start(directory):
        plan = corpus_plan(num_units=2)
        run = SimpleNamespace(directory=directory, plan=plan, drafter_watch=lambda: None)
        streaming.stream(run, plan.units, FakeSupervisor(), progress, METRICS)

    return start


def test_stream_ends_with_the_last_unit(stream):
    stream(FakeDirectory(0, 1))
    for run in (FakeDirectory(0), FakeDirectory(0, 7)):  # unit 7 is not in the plan; unit 1 is missing
        with pytest.raises(EngineError, match="before its last unit"):
            stream(run)


def test_drafter_slower_than_no_drafter_is_reported_once(monkeypatch):
    monkeypatch.setattr(streaming, "_POLL_S", 0.0)
    supervisor, messages = FakeSupervisor(), []
    supervisor.tally = SimpleNamespace(speculation=SpeculationStats.from_histogram([200, 100], num_draft_tokens=300))
    progress = SimpleNamespace(show=lambda *_: None, say=messages.append)
    run = SimpleNamespace(directory=FakeDirectory(0, 1), drafter_watch=lambda: DrafterWatch({1: 1.2, 8: 2.0}, 8))
    streaming._watch(run, [None, None], supervisor, progress, METRICS)
    assert len(messages) == 1
    assert "1.33 tokens per step, but this hardware needs 2.00" in messages[0]


@pytest.mark.parametrize("error", [OSError("no such device"), StorageError("503")])
def test_failed_observation_abandons_ray(monkeypatch, error):
    def observe():
        raise error

    abandoned = []
    monkeypatch.setattr(cluster, "abandon", lambda: abandoned.append(True))
    with pytest.raises((OSError, PeagleError)):
        streaming._observe(SimpleNamespace(observe=observe))
    assert abandoned == [True]


@pytest.mark.parametrize(("ending", "ends_quietly"), [(StoppedEarly, True), (EngineError, False), (None, False)])
def test_stream_error_while_stopping_is_treated_as_stop(monkeypatch, ending, ends_quietly):
    """A signal to all processes on the machine also ends Ray, so the stream fails."""

    def receipts():
        yield "usage"
        raise EngineError("the run failed: the actor died")

    abandoned, observed = [], []
    monkeypatch.setattr(cluster, "abandon", lambda: abandoned.append(True))
    ended = ending and SimpleNamespace(error=ending)
    supervisor = SimpleNamespace(observe=lambda: observed.append("called"), ending=ended)
    result = streaming._until_stopped(receipts(), supervisor)
    assert next(result) == "usage"
    if ends_quietly:
        assert list(result) == []
    else:
        with pytest.raises(EngineError, match="run failed"):
            next(result)
    assert observed == ["called"]
    assert bool(abandoned) is ends_quietly
