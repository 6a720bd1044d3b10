import os
from types import SimpleNamespace

import pytest

from peagle.economics.sessions import EngineFacts
from peagle.engine.spec import EngineSpec
from peagle.speculation import SpeculationStats
from pipelines.online.replica import server
from pipelines.online.replica.account import EngineAccount
from pipelines.online.replica.server import EngineMetrics


@pytest.mark.parametrize(("set_by_user", "max_num_seqs", "expected"), [(None, 8, "0"), (None, 7, None), ("1", 8, "1")])
def test_threads_of_an_engine_with_many_requests_keep_their_cores(monkeypatch, set_by_user, max_num_seqs, expected):
    """As of a bulk engine; the threads that Ray sets do not hold."""

    class Replica(server.PeagleServer):
        def __init__(self):
            self._account = SimpleNamespace()

        def __del__(self):
            pass

    for name, value in (("KMP_USE_YIELD", set_by_user), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value or "")  # so that it is as before when this test is over
    if set_by_user is None:
        monkeypatch.delenv("KMP_USE_YIELD")
    monkeypatch.setattr(server, "claim_slot", lambda app_id: 1)
    monkeypatch.setattr(server, "set_environment", lambda *_, **__: None)  # what holds on this machine
    monkeypatch.setattr(server, "make_llm_config", lambda *_, **__: dict(os.environ))
    job = SimpleNamespace(
        spec=EngineSpec(model="m", max_num_seqs=max_num_seqs), app_id="a", num_engines_on_node=1, fake=True,
        engine=SimpleNamespace(model="m"), sizes=None, parsers={},
    )  # fmt: skip
    variables = Replica()._local_config(job)
    assert variables.get("KMP_USE_YIELD") == expected
    assert "OMP_NUM_THREADS" not in variables


class Counter:
    """Ray's, with what was counted by name and tags; it refuses what Ray refuses."""

    counted: dict = {}  # noqa: RUF012

    def __init__(self, name, description, tag_keys):
        assert description
        self.name, self.tag_keys, self.default = name, tag_keys, {}

    def set_default_tags(self, tags):
        assert set(tags) <= set(self.tag_keys)
        self.default = tags
        return self

    def inc(self, value, tags):
        if value <= 0:
            raise ValueError(f"value must be >0, got {value}")
        assert set(self.default | tags) == set(self.tag_keys)
        self.counted[self.name, *tags.values()] = self.counted.get((self.name, *tags.values()), 0) + value


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr("ray.util.metrics.Counter", Counter)
    monkeypatch.setattr(Counter, "counted", {})
    return Counter.counted


def test_what_the_ledger_learns_is_counted(counted, clock, tmp_path):
    engine = EngineFacts(model="m", drafter=None, num_devices=2, device="vcpu", usd_per_device_s=0.5)
    account = EngineAccount(tmp_path, engine, heartbeat_s=300, monotonic=clock, listener=EngineMetrics(engine))
    clock.now += 10
    account.ready(compile_s=4)
    clock.now += 5
    for request_id, outcome in (("1", "ok"), ("2", "cut")):
        request = account.begin(request_id, "alice")
        clock.now += 3
        request.tally.num_output_tokens = 7
        request.tally.num_prompt_tokens = 11
        request.tally.speculation = SpeculationStats(
            num_drafts=3, num_draft_tokens=9, accepted_per_position=(2, 1, 1), num_lookup_tokens=1
        )
        request.finish("ok")
        request.write(outcome)
        account.heartbeat()
    account.end()
    assert counted == {
        ("peagle_requests_total", "ok"): 1,
        ("peagle_requests_total", "cut"): 1,
        ("peagle_request_usd_total",): pytest.approx(6),
        ("peagle_prompt_tokens_total",): 22,
        ("peagle_output_tokens_total",): 14,
        ("peagle_drafts_total",): 6,
        ("peagle_draft_tokens_total",): 18,
        ("peagle_accepted_tokens_total",): 8,
        ("peagle_accepted_lookup_tokens_total",): 2,
        ("peagle_engine_usd_total", "start"): pytest.approx(10),
        ("peagle_engine_usd_total", "idle"): pytest.approx(5),
        ("peagle_engine_usd_total", "busy"): pytest.approx(6),
    }
