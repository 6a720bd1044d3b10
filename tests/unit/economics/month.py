"""The example month of docs/reference/worked-month.md, as files.

serve      an endpoint on one H100 at 6.88 USD an hour: its engine runs from 3 November, 22:00, to 4 November, 02:00
nightly    a bulk run on 2 vCPUs at 0.10264 USD an hour, from 30 November, 20:00, to 1 December, 06:00
"""

from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa
from usage_records import drafts, engine_session, unit_usage

from peagle.corpus.rows import Span
from peagle.economics.baseline import Baseline, StepTimes
from peagle.economics.ledger import append_beat, append_request, write_session
from peagle.economics.prices import PriceTable
from peagle.economics.tags import NO_TAGS
from peagle.economics.usage import RequestUsage
from peagle.runs.directory import RunDirectory
from peagle.runs.plan import Plan, WorkUnit
from peagle.speculation import SpeculationStats

NO_DRAFTS = SpeculationStats.empty()
H100_USD_PER_S = 6.88 / 3600


def timestamp(month, day, hour, minute=0):
    return datetime(2026, month, day, hour, minute, tzinfo=UTC).timestamp()


def make_unit_usage(session_id, *, busy_s, tokens, finished_at, num_rows=1, cached_tokens=0, speculation=NO_DRAFTS):
    return unit_usage(
        session_id, num_rows=num_rows, num_prompt_tokens=tokens // 2, num_cached_tokens=cached_tokens,
        num_output_tokens=tokens, busy_s=busy_s, speculation=speculation, started_at=finished_at - busy_s,
        finished_at=finished_at,
    )  # fmt: skip


def make_request_usage(key, *, usd, tags=NO_TAGS, **usage):
    return RequestUsage(
        request_id=f"{key}-{usage['finished_at']}", key=key, model="gpt-oss-20b", drafter="head", outcome="ok",
        ttft_s=None, usd=usd, usage=make_unit_usage("serving", **usage), tags=tags,
    )  # fmt: skip


STEPS = Baseline(
    source="the example's steps", steps=(StepTimes(concurrency=1, step_s=0.005, plain_step_s=0.004, error=0.05),)
)
SERVING = engine_session(
    "serving", device="accelerator", started_at=timestamp(11, 3, 22), load_s=600.0, busy_s=5700.0, idle_s=8100.0,
    num_output_tokens=3_000_000, model="gpt-oss-20b", drafter="head", instance_type="p5.4xlarge", provider="aws",
    region="us-east-1", usd_per_device_s=H100_USD_PER_S, tags='{"team": "search"}', num_speculative_tokens=4,
    market="on_demand", baseline=STEPS.to_text(),
)  # fmt: skip
SERVING_AT_MIDNIGHT = replace(
    SERVING, last_seen_at=timestamp(11, 4, 0), busy_s=3900.0, idle_s=2700.0, num_output_tokens=2_050_000, ended=False
)


def write_endpoint(state):
    ledger = state / "ledger"
    ledger.mkdir(parents=True)
    write_session(ledger, SERVING)
    append_beat(ledger, SERVING_AT_MIDNIGHT)
    append_beat(ledger, SERVING)
    tags = '{"project": "x", "team": "search"}'
    alice = make_request_usage(
        "alice", usd=6.88, busy_s=3600.0, tokens=2_000_000, finished_at=timestamp(11, 3, 23, 50), tags=tags,
        cached_tokens=400_000, speculation=drafts(640_000, 500_000, 400_000, 300_000, 160_000),
    )  # fmt: skip
    bob = make_request_usage(
        "bob", usd=3.44, busy_s=1800.0, tokens=900_000, finished_at=timestamp(11, 4, 1), tags=SERVING.tags,
        speculation=drafts(300_000, 250_000, 200_000, 100_000, 50_000),
    )  # fmt: skip
    append_request(ledger, alice)
    append_request(ledger, bob)


BULK_SESSION = engine_session(
    "bulk", num_devices=2, started_at=timestamp(11, 30, 20), load_s=360.0, busy_s=34_200.0, idle_s=1440.0,
    num_output_tokens=4_000_000,
)  # fmt: skip


def write_run(root, sessions, unit_usages, *, command=("peagle", "generate"), tags=None):
    """Write a run directory with the price of a c7a.large machine."""
    run = RunDirectory(root)
    span = Span(path="a.jsonl", format="jsonl", first_row=0, num_rows=1)
    units = tuple(WorkUnit(unit=number, first_id=number, span=span) for number in range(len(unit_usages)))
    schema = pa.schema([("prompt", pa.string())])
    price = PriceTable.load().price("c7a.large")
    manifest = {
        "created_at": 1.0,
        "command": list(command),
        "config": {"tags": tags or {}},
        "price": price.to_dict(),
        "run": {"model": "smollm2-135m", "drafter": None},
    }
    run.create(manifest, Plan(units=units, rows_per_unit=1, schema=schema, corpus_fingerprint="c"))
    for session in sessions:
        run.write_session(session)
    for number, usage in enumerate(unit_usages):
        run.commit(number, pa.table({"id": [number]}), usage, [])


def write_nightly(root):
    unit_usages = [
        make_unit_usage("bulk", busy_s=10_000.0, tokens=1_000_000, finished_at=timestamp(11, 30, 23), num_rows=500),
        make_unit_usage("bulk", busy_s=15_000.0, tokens=2_000_000, finished_at=timestamp(12, 1, 0, 30), num_rows=500),
        make_unit_usage("bulk", busy_s=9200.0, tokens=1_000_000, finished_at=timestamp(12, 1, 5), num_rows=500),
    ]
    write_run(root, [BULK_SESSION], unit_usages, tags={"team": "data"})
