from dataclasses import replace
from types import SimpleNamespace

import pytest

from peagle.economics.ledger import append_request
from peagle.economics.prices import Price
from peagle.errors import PeagleError
from peagle.speculation import SpeculationStats
from pipelines.online.cost import CostView
from pipelines.online.live import (
    NUM_POINTS,
    STEP_S,
    LiveView,
    publish_break_even_forever,
    watch_drafters,
)
from pipelines.online.totals import totals_of
from pipelines.online.wire import AnswerTally, Context

PRICE = Price.fixed(usd_per_hour=72, device="vcpu", num_devices=2)
NOW = 1_000_000.0  # at the start of an interval of STEP_S


@pytest.fixture
def write_request(engine_account, clock, tmp_path):
    """Return a function that records a request that ended `ended_s_ago` seconds before NOW."""
    engine_account.ready()

    def write_request(request_id, *, ended_s_ago, duration_s=4.0, tokens=40, ttft_s=0.5, key="alice", model="m"):
        request = engine_account.begin(Context(request_id=request_id, key=key))
        stats = SpeculationStats(num_drafts=10, num_draft_tokens=30, accepted_per_position=(6, 3, 1))
        request.tally = AnswerTally(num_prompt_tokens=5, num_output_tokens=tokens, speculation=stats)
        clock.now += duration_s
        record = replace(request.finish("ok"), ttft_s=ttft_s, model=model)
        finished_at = NOW - ended_s_ago
        usage = replace(record.usage, started_at=finished_at - duration_s, finished_at=finished_at)
        append_request(tmp_path / "ledger", replace(record, usage=usage))

    return write_request


@pytest.fixture
def now():
    class Clock:
        seconds = NOW

        def __call__(self):
            return self.seconds

    return Clock()


@pytest.fixture
def view(tmp_path, engine_account, now):
    return LiveView(CostView(tmp_path / "ledger", PRICE, now=now), now=now)


def test_tokens_count_when_they_were_generated(write_request, view):
    write_request("1", ended_s_ago=10, duration_s=8.5, ttft_s=0.5, tokens=80)  # 8 s of 10 tokens/s, from 18 to 10 s ago
    report = view.report()
    assert report["total"]["output_tokens_per_s"] == pytest.approx(80 / 60)
    series = report["series"]["output_tokens_per_s"]  # 30 points, one for every 2 s
    assert series[NUM_POINTS - 9 : NUM_POINTS - 5] == pytest.approx([10, 10, 10, 10])
    assert sum(series) * report["series"]["step_s"] == pytest.approx(80)


def test_non_streaming_answer_counts_over_its_whole_time(write_request, view):
    write_request("1", ended_s_ago=10, duration_s=8, ttft_s=None, tokens=80)
    report = view.report()
    assert report["series"]["output_tokens_per_s"][NUM_POINTS - 9 : NUM_POINTS - 5] == pytest.approx([10, 10, 10, 10])
    assert report["total"]["ttft_p50_s"] is None


def test_tokens_before_the_window_do_not_count(write_request, view):
    write_request("1", ended_s_ago=50, duration_s=20, ttft_s=0.0, tokens=100)  # the first half is before the window
    report = view.report()
    assert report["total"]["output_tokens_per_s"] == pytest.approx(50 / 60)
    assert report["total"]["num_output_tokens"] == 100  # of requests that ended in the window


def test_percentiles_of_the_window(write_request, view):
    for number in range(1, 6):
        write_request(str(number), ended_s_ago=10 * number, ttft_s=number / 10)
    write_request("old", ended_s_ago=100, ttft_s=9.0)
    report = view.report()
    assert report["total"]["ttft_p50_s"] == pytest.approx(0.3)
    assert report["total"]["ttft_p95_s"] == pytest.approx(0.48)
    assert view.report(window_s=300)["total"]["num_requests"] == 6
    assert [value for value in report["series"]["ttft_p50_s"] if value] == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1])


def test_costs_equal_the_cost_report(write_request, view, tmp_path, now):
    write_request("1", ended_s_ago=10)
    write_request("2", ended_s_ago=20, key="bob", model="other")
    report, cost = view.report(), CostView(tmp_path / "ledger", PRICE, now=now).report(window_s=60)
    assert report["account"] == cost["account"]
    for name, value in cost["total"].items():
        assert report["total"][name] == value
    assert report["total"]["acceptance_rates"] == pytest.approx([0.6, 0.3, 0.1])
    assert report["by_model"]["other"]["usd"] == pytest.approx(cost["by_model"]["other"]["usd"])


def test_key_sees_only_its_own_metrics(write_request, view):
    write_request("1", ended_s_ago=10, tokens=10)
    write_request("2", ended_s_ago=10, tokens=99, key="bob", model="other")
    report = view.report("alice")
    assert report["total"]["num_output_tokens"] == 10
    assert sum(report["series"]["output_tokens_per_s"]) * STEP_S == pytest.approx(10)
    assert set(report["by_model"]) == {"m"}
    assert "account" not in report


def test_window_without_requests_has_zeros(view):
    report = view.report(window_s=900)
    assert report["total"]["output_tokens_per_s"] == 0
    assert report["total"]["ttft_p50_s"] is report["total"]["acceptance_length"] is None
    assert report["series"]["output_tokens_per_s"] == [0.0] * NUM_POINTS
    assert report["series"]["step_s"] == 30


def test_metrics_are_cached_for_a_second(write_request, view, now):
    write_request("1", ended_s_ago=5)
    assert view.report()["total"]["num_requests"] == 1
    write_request("2", ended_s_ago=4)
    assert view.report()["total"]["num_requests"] == 1
    now.seconds += 1
    assert view.report()["total"]["num_requests"] == 2
    now.seconds += 1000
    assert view.report(window_s=900)["total"]["num_requests"] == 0
    assert not view._steps


def test_metrics_survive_a_restart(write_request, tmp_path, now, monkeypatch):
    monkeypatch.setattr("pipelines.online.totals._MIN_UNSAVED", 0)
    reports = []
    for number in range(2):
        write_request(str(number), ended_s_ago=10 * number + 10)
        totals_of.cache_clear()
        reports.append(LiveView(CostView(tmp_path / "ledger", PRICE, now=now), now=now).report()["total"])
    assert (tmp_path / "ledger" / "totals.jsonl").exists()
    assert [(report["num_requests"], report["output_tokens_per_s"]) for report in reports] == [
        (1, 40 / 60),
        (2, 80 / 60),
    ]


def run_watch(*reports):
    """Run `watch_drafters`, which gets one of these reports per check.

    Returns:
        The messages, and the metrics that the watch of model "m" received.
    """
    unread, watched_metrics, messages = list(reports), [], []

    def report(*, window_s):
        by_model = unread.pop(0)
        if isinstance(by_model, Exception):
            raise by_model
        return {"by_model": by_model}

    def new_warnings(**metrics):
        watched_metrics.append(metrics)
        return [f"check {len(watched_metrics)}"]

    stopped = SimpleNamespace(wait=lambda timeout: not unread)
    watch_drafters(
        {"m": SimpleNamespace(new_warnings=new_warnings)}, SimpleNamespace(report=report), stopped, messages.append
    )
    return messages, watched_metrics


METRICS = {"num_drafts": 900, "acceptance_length": 1.2, "requests_at_once": 7.5}


def test_note_on_a_drafter_that_costs_more_than_it_saves(write_request, tmp_path, now):
    view = LiveView(CostView(tmp_path / "ledger", PRICE, now=now), {"m": {1: 1.5, 8: 4.0}}, now=now)  # by concurrency
    for number in range(20):  # each has ten drafts and ten accepted tokens
        write_request(str(number), ended_s_ago=10)
        write_request(f"other {number}", ended_s_ago=10, model="unknown")
    assert view.report()["by_model"]["m"]["acceptance_length"] == 2.0
    assert view.report()["notes"] == []
    losing = LiveView(CostView(tmp_path / "ledger", PRICE, now=now), {"m": {1: 4.0}}, now=now)
    (note,) = losing.report()["notes"]
    assert note.startswith(
        "m: The drafter costs more than it saves: 2.00 tokens per step, but this hardware needs 4.00"
    )


def test_break_even_is_read_at_the_recent_concurrency(write_request, tmp_path, now):
    view = LiveView(CostView(tmp_path / "ledger", PRICE, now=now), {"m": {1: 1.5, 8: 4.0}, "idle": {1: 2.0}}, now=now)
    assert view.break_even_by_model() == {}
    write_request("1", ended_s_ago=10)
    write_request("2", ended_s_ago=10, model="unknown")
    assert view.break_even_by_model() == {"m": 1.5}


def test_publishing_continues_after_read_errors(monkeypatch):
    class View:
        result = iter([PeagleError("no ledger"), OSError("no disk"), {"m": 1.5}, SystemExit()])

        def break_even_by_model(self):
            result = next(self.result)
            if isinstance(result, BaseException):
                raise result
            return result

    published = []
    with pytest.raises(SystemExit):
        publish_break_even_forever(View(), lambda model, length: published.append((model, length)), every_s=0)
    assert published == [("m", 1.5)]


def test_watch_gets_the_metrics_of_its_model():
    messages, watched_metrics = run_watch({"m": METRICS, "other": METRICS}, {})
    assert watched_metrics == [{"num_drafts": 900, "acceptance_length": 1.2, "concurrency": 7.5}]
    assert messages == ["m: check 1"]


def test_watch_of_drafters_continues_after_read_errors():
    (error, message), _ = run_watch(PeagleError("ledger is damaged"), {"m": METRICS})
    assert "ledger is damaged" in error
    assert message == "m: check 1"
