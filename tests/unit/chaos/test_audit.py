"""The audit finds what it looks for: a run is made by hand, then spoilt in one way."""

import asyncio
import json
import time
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from peagle import hardware
from peagle.corpus.rows import Span
from peagle.economics.account import account
from peagle.economics.usage import EngineSession, UnitUsage
from peagle.engine.fake import ByteTokenizer, FakeEngine
from peagle.files import write_json
from peagle.runs.directory import RunDirectory
from peagle.runs.lease import hold_lease
from peagle.runs.plan import Plan, WorkUnit
from peagle.speculation import SpeculationStats
from pipelines.batch.config import GenerateConfig
from pipelines.batch.resolve import resolve_price
from tests.chaos.audit import audit
from tests.chaos.driver import Job

NUM_LOST_TOKENS = 5


def row(job, number):
    chat = ByteTokenizer().apply_chat_template([{"role": "user", "content": job.prompt(number)}])
    sampling = {"temperature": 0.0, "max_tokens": 256}
    done = asyncio.run(FakeEngine().generate("", list(chat.encode()), sampling))
    return {
        "id": f"{number:09d}",
        "prompt": job.prompt(number),
        "response": done.text,
        "num_prompt_tokens": done.num_prompt_tokens,
        "num_cached_tokens": 0,
        "num_output_tokens": done.num_output_tokens,
    }


def usage_of(rows):
    sums = {name: sum(one[name] for one in rows) for name in ("num_prompt_tokens", "num_output_tokens")}
    return UnitUsage(
        session_id="s", num_rows=len(rows), num_failed_rows=0, num_cached_tokens=0, busy_s=0.25,
        speculation=SpeculationStats.empty(), started_at=1.0, finished_at=2.0, **sums,
    )  # fmt: skip


def write_report(run):
    from peagle.economics.prices import Price

    total = account(run.usages(), run.sessions(), Price.from_dict(run.manifest()["price"]))
    write_json(run.root / "report.json", {"run": {"complete": True}, "account": total.to_dict()})


@pytest.fixture
def job(tmp_path):
    """A finished run of two units of two rows."""
    job = Job(folder=tmp_path, num_rows=4, is_fake=True)
    run = RunDirectory(job.output)
    here = hardware.detect()
    price = resolve_price(GenerateConfig(input="a", output="b", engine="fake", usd_per_hour=36), here)
    span = Span(path="a", format="jsonl", first_row=0, num_rows=2)
    units = tuple(WorkUnit(unit=n, first_id=2 * n, span=span) for n in range(2))
    plan = Plan(units=units, rows_per_unit=2, schema=pa.schema([("prompt", pa.string())]), corpus_fingerprint="c")
    run.create({"price": price.to_dict()}, plan)
    with hold_lease(run.root, expiry_s=30, command=["peagle"], announce=lambda text: None):
        pass
    rows = [row(job, number) for number in range(4)]
    num_tokens = sum(one["num_output_tokens"] for one in rows) + NUM_LOST_TOKENS
    run.write_session(
        EngineSession(
            session_id="s", engine_index=0, hostname="h", num_devices=1, device=price.device, started_at=1.0,
            last_seen_at=2.0, load_s=0.0, compile_s=0.0, busy_s=1.0, idle_s=0.0, num_output_tokens=num_tokens,
            ended=False,
        )
    )  # fmt: skip
    for unit in range(2):
        own = rows[2 * unit : 2 * unit + 2]
        run.commit(unit, pa.Table.from_pylist(own), usage_of(own), [])
    write_report(run)
    return job


def rewrite(job, unit, change, usage=None):
    run = RunDirectory(job.output)
    rows = change(pq.read_table(run.unit_path(unit)).to_pylist())
    own = run.usage(unit)
    run.unit_path(unit).unlink()
    run.commit(unit, pa.Table.from_pylist(rows), usage or own, [])


def test_a_run_that_is_as_it_has_to_be_has_no_problem(job):
    found = audit(job)
    assert found.problems == ()
    assert (found.num_rows, found.num_lost, found.num_doubled, found.num_dead_letters) == (4, 0, 0, 0)
    assert found.num_regenerated_tokens == NUM_LOST_TOKENS
    assert 0 < found.regenerated_usd < found.total_usd


def lose(job):
    rewrite(job, 0, lambda rows: rows[:1])


def double(job):
    rewrite(job, 1, lambda rows: [*rows, row(job, 0)])


def invent(job):
    rewrite(job, 1, lambda rows: [*rows, row(job, 4)])


def swap_responses(job):
    rewrite(job, 0, lambda rows: [{**one, "response": "else"} for one in rows])


def swap_prompts(job):
    rewrite(job, 0, lambda rows: [{**one, "prompt": rows[0]["prompt"]} for one in rows])


def miscount(job):
    usage = RunDirectory(job.output).usage(0)
    rewrite(job, 0, lambda rows: rows, replace(usage, num_output_tokens=usage.num_output_tokens + 1))


def set_aside(job):
    run = RunDirectory(job.output)
    letter = {"id": f"{0:09d}", "reason": "engine_died", "message": "m"}
    rows, usage = pq.read_table(run.unit_path(0)).slice(1), run.usage(0)
    run.unit_path(0).unlink()
    run.commit(0, rows, usage, [letter])


def leave_a_temporary(job):
    (job.output / "data" / ".unit.tmp").touch()


def leave_a_note(job):
    (job.output / "suspects" / "unit-00000000.s.json").touch()


def leave_letters(job):
    (job.output / "failed" / "unit-00000000.abc.jsonl").touch()


def leave_the_lease(job):
    path = job.output / ".lease" / "1.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "outcome": None, "renewed_at": time.time()}))


def forget_lost_tokens(job):
    path = job.output / "report.json"
    report = json.loads(path.read_text())
    report["account"]["num_lost_tokens"] = 0
    path.write_text(json.dumps(report))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lose, "row 1 is in no committed unit"),
        (double, "row 0 is there 2 times"),
        (invent, "row 4 was never in the corpus"),
        (swap_responses, "row 000000000 has another row's response"),
        (swap_prompts, "row 000000001 carries another row's prompt"),
        (miscount, "num_output_tokens of its usage is not the sum of its rows"),
        (set_aside, "row 000000000 is a dead letter: engine_died"),
        (leave_a_temporary, "data/.unit.tmp was left behind"),
        (leave_a_note, "suspects/unit-00000000.s.json was left behind"),
        (leave_letters, "failed/unit-00000000.abc.jsonl belongs to no committed unit"),
        (leave_the_lease, "the lease is held"),
        (forget_lost_tokens, "the account has 0 lost tokens; the sessions have 5"),
    ],
)
def test_what_is_spoilt_is_found(job, spoil, problem):
    spoil(job)
    assert any(problem in found for found in audit(job).problems), audit(job).problems
