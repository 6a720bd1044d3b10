import pytest
from usage_records import drafts, engine_session, unit_usage

from peagle.economics.account import account
from peagle.economics.prices import Price
from peagle.economics.report.data import report_dict

PRICE = Price.fixed(usd_per_hour=0.20, device="vcpu", num_devices=2)
RUN = {
    "precision": "bf16",
    "concurrency": 1,
    "num_input_rows": 40,
    "complete": True,
    "sampling": {"temperature": 0.0, "max_tokens": 128},
    "versions": {"vllm": "0.29.0"},
}


@pytest.fixture
def make_report():
    """Return a function that makes the report of one engine on 2 vCPUs.

    The engine loads for 20 s, compiles for 10 s, and commits `busy_s` seconds of work.
    """

    def make(*, tokens=4000, busy_s=100.0, lost_s=0.0, idle_s=0.0, num_failed_rows=0, accepted=(), num_drafts=0,
             price=PRICE, **run):  # fmt: skip
        started_at = 1_780_000_000.0
        unit = unit_usage(
            "a", num_rows=40, num_failed_rows=num_failed_rows, num_prompt_tokens=8000, num_cached_tokens=1000,
            num_output_tokens=tokens, busy_s=busy_s, speculation=drafts(num_drafts, *accepted),
            started_at=started_at + 30, finished_at=started_at + 30 + busy_s,
        )  # fmt: skip
        session = engine_session(
            "a", num_devices=2, device=price.device, started_at=started_at, load_s=20.0, compile_s=10.0,
            busy_s=busy_s + lost_s, idle_s=idle_s, num_output_tokens=tokens + round(tokens * lost_s / busy_s),
        )  # fmt: skip
        return report_dict(account([unit], [session], price), {"model": "smollm2-135m", **run})

    return make


@pytest.fixture
def drafter_report(make_report):
    drafter = {"drafter": "peagle", "num_speculative_tokens": 3, "num_drafts": 1000, "accepted": (480, 100, 20)}
    return make_report(tokens=6000, **drafter, **RUN)


@pytest.fixture
def plain_report(make_report):
    return make_report(**RUN)


@pytest.fixture
def detailed_report(drafter_report):
    """The report of a run with a timeline, rows and failures."""
    sample = {
        "id": "000000007", "input": [["prompt", "What is <script>alert(1)</script>?"]],
        "answer": "Nothing & <b>more</b>", "finish_reason": "stop",
    }  # fmt: skip
    histogram = {"first": 0.0, "step": 0.1, "counts": [10, 60, 30], "has_more": True}
    measure = {"p50": 0.2, "p95": 0.4, "p99": 0.5, "histogram": histogram}
    spans = [("load", 0.0, 20.0), ("busy", 20.0, 60.0), ("busy", 60.0, 100.0), ("lost", 100.0, 120.0)]
    seconds = {"load": 20.0, "compile": 0.0, "busy": 80.0, "idle": 0.0, "lost": 20.0}
    return {
        **drafter_report,
        "timeline": {
            "started_at": 0.0,
            "total_s": 120.0,
            "step_s": 40.0,
            "tokens_per_s": [10.0, 60.0, 30.0],
            "usd": [0.001, 0.002, 0.003],
            "pauses": [{"at_s": 60.0, "lasted_s": 3600.0}],
            "num_engines": 1,
            "engines": [{"engine": 0, "num_starts": 1, "seconds": seconds, "spans": spans}],
        },
        "account": {**drafter_report["account"], "num_rows": 400},
        "rows": {
            "num_read": 100,
            "finish_reasons": {"stop": 90, "length": 10},
            "measures": {"num_output_tokens": measure, "ttft_s": measure},
            "samples": [sample],
        },
        "failures": [
            {"reason": "invalid_row", "count": 3, "example": "line 7: <b>no</b>"},
            {"reason": "time_limit", "count": 1, "example": "too long"},
        ],
    }
