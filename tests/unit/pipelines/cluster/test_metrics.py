import pytest
from usage_records import engine_session, unit_usage

from peagle.economics.usage import EngineFacts, RequestUsage
from peagle.speculation import SpeculationStats
from pipelines.cluster.metrics import METRICS, UsageMetrics
from pipelines.online.replica.account import EngineAccount
from pipelines.online.wire import Context

MODEL = ("m", "")
ENGINE = EngineFacts(model="m", drafter=None, num_devices=2, device="vcpu", usd_per_device_s=0.5)
STATS = SpeculationStats(num_drafts=3, num_draft_tokens=9, accepted_per_position=(2, 1, 1), num_lookup_tokens=1)


def request(outcome="ok", *, ttft_s=1.0, num_output_tokens=11, num_choices=1, duration_s=6.0):
    usage = unit_usage(
        num_prompt_tokens=7,
        num_cached_tokens=4,
        num_output_tokens=num_output_tokens,
        busy_s=2.0,
        speculation=STATS,
        started_at=100.0,
        finished_at=100.0 + duration_s,
    )
    return RequestUsage(
        request_id="1", key="alice", model="m", drafter=None, outcome=outcome, ttft_s=ttft_s, usd=0.25, usage=usage,
        num_choices=num_choices,
    )  # fmt: skip


def test_request_is_recorded_in_all_metrics(ray_metrics):
    UsageMetrics("m", None).record_request(request())
    assert ray_metrics == {
        ("peagle_requests_total", *MODEL, "ok"): 1,
        ("peagle_request_usd_total", *MODEL): 0.25,
        ("peagle_prompt_tokens_total", *MODEL): 7,
        ("peagle_cached_tokens_total", *MODEL): 4,
        ("peagle_output_tokens_total", *MODEL): 11,
        ("peagle_drafts_total", *MODEL): 3,
        ("peagle_draft_tokens_total", *MODEL): 9,
        ("peagle_accepted_tokens_total", *MODEL): 4,
        ("peagle_accepted_tokens_per_pos_total", *MODEL, "0"): 2,
        ("peagle_accepted_tokens_per_pos_total", *MODEL, "1"): 1,
        ("peagle_accepted_tokens_per_pos_total", *MODEL, "2"): 1,
        **{("peagle_draft_tokens_per_pos_total", *MODEL, str(position)): 3 for position in range(3)},
        ("peagle_accepted_lookup_tokens_total", *MODEL): 1,
        ("gen_ai_server_request_duration_seconds", *MODEL, ""): [6.0],
        ("gen_ai_server_time_to_first_token_seconds", *MODEL): [1.0],
        ("gen_ai_server_time_per_output_token_seconds", *MODEL): [0.5],  # 5 s for the ten tokens after the first
        ("gen_ai_client_token_usage", *MODEL, "input"): [7],
        ("gen_ai_client_token_usage", *MODEL, "output"): [11],
    }


def test_time_per_output_token_is_per_choice(ray_metrics):
    UsageMetrics("m", None).record_request(request(num_output_tokens=22, num_choices=2))
    assert ray_metrics["gen_ai_server_time_per_output_token_seconds", *MODEL] == [0.5]


@pytest.mark.parametrize("record", [request(ttft_s=None), request(num_output_tokens=1), request(num_output_tokens=0)])
def test_no_time_per_output_token_without_ttft_or_a_second_token(ray_metrics, record):
    UsageMetrics("m", None).record_request(record)
    assert ("gen_ai_server_time_per_output_token_seconds", *MODEL) not in ray_metrics


def test_cut_and_failed_requests_have_metrics_by_outcome(ray_metrics):
    metrics = UsageMetrics("m", None)
    metrics.record_request(request("cut"))  # the client disconnected
    metrics.record_request(request("failed"))
    assert ("gen_ai_server_time_to_first_token_seconds", *MODEL) not in ray_metrics
    assert ray_metrics["gen_ai_server_request_duration_seconds", *MODEL, "cut"] == [6.0]
    assert ray_metrics["gen_ai_server_request_duration_seconds", *MODEL, "failed"] == [6.0]
    assert ray_metrics["gen_ai_client_token_usage", *MODEL, "output"] == [11]


def test_engine_cost_is_recorded_by_state(ray_metrics, clock, tmp_path):
    account = EngineAccount(tmp_path, ENGINE, heartbeat_s=300, monotonic=clock, listener=UsageMetrics("m", None))
    clock.now += 10
    account.ready(compile_s=4)
    clock.now += 5
    running = account.begin(Context(request_id="1", key="alice"))
    clock.now += 3
    running.finish("ok")
    running.write("ok")
    account.heartbeat()
    account.heartbeat()
    account.end()
    assert {state: ray_metrics["peagle_engine_usd_total", *MODEL, state] for state in ("start", "idle", "busy")} == {
        "start": pytest.approx(10), "idle": pytest.approx(5), "busy": pytest.approx(3),
    }  # fmt: skip


def test_late_heartbeat_is_ignored(ray_metrics):
    metrics = UsageMetrics("m", None)
    for name, busy_s in (("a", 4.0), ("a", 3.0), ("a", 5.0), ("b", 1.0)):
        metrics.record_heartbeat(engine_session(name, busy_s=busy_s, ended=False, usd_per_device_s=0.5))
    assert ray_metrics["peagle_engine_usd_total", *MODEL, "busy"] == pytest.approx(3.0)


def test_metric_names_follow_prometheus_conventions():
    for metric in METRICS.values():
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert (metric.kind == "histogram") == bool(metric.boundaries), metric.name
        assert list(metric.boundaries) == sorted(set(metric.boundaries)), metric.name
        if metric.unit in ("s", "Unix s"):
            assert metric.name.endswith("_seconds"), metric.name
