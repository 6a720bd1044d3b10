"""Checks of a finished run directory. If possible, files are read directly, without the code under test."""

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow.parquet as pq

from peagle.economics.account import account
from peagle.economics.prices import Price
from peagle.engine.fake import ByteTokenizer, FakeEngine
from peagle.runs.directory import RunDirectory
from peagle.runs.lease import read_lease
from tests.chaos.driver import Job, report_of

_TOKENS = ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The result of an audit.

    Attributes:
        num_lost: ids that are missing.
        num_doubled: ids that occur more than once.
        num_regenerated_tokens: tokens that were generated but not committed, according to heartbeats.
        regenerated_usd: cost of engine time that was lost.
        num_sessions: engine processes of the run.
    """

    num_rows: int
    num_lost: int
    num_doubled: int
    num_dead_letters: int
    num_output_tokens: int
    num_regenerated_tokens: int
    regenerated_usd: float
    total_usd: float
    num_sessions: int
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def audit(job: Job) -> Audit:
    """Check every file of a finished run."""
    run = RunDirectory(job.output)
    dead_letters = list(run.dead_letters())
    rows = [row for path in sorted(run.data.glob("unit-*.parquet")) for row in pq.read_table(path).to_pylist()]
    occurrences = Counter(int(item["id"]) for item in [*rows, *dead_letters])
    lost = sorted(set(range(job.num_rows)) - occurrences.keys())
    duplicated = sorted(row for row, count in occurrences.items() if count > 1)
    reported_account = report_of(job)["account"]
    problems = [
        *(f"row {row} is in no committed unit or dead letter" for row in lost),
        *(f"row {row} occurs {occurrences[row]} times" for row in duplicated),
        *(f"row {row} is not in the corpus" for row in sorted(occurrences.keys() - set(range(job.num_rows)))),
        *(f"row {row['id']} is a dead letter: {row['reason']}, {row['message']}" for row in dead_letters),
        *_row_problems(job, rows),
        *_usage_problems(run, rows, reported_account),
        *_leftover_problems(run),
    ]
    return Audit(
        num_rows=len(rows),
        num_lost=len(lost),
        num_doubled=len(duplicated),
        num_dead_letters=len(dead_letters),
        num_output_tokens=sum(row["num_output_tokens"] for row in rows),
        num_regenerated_tokens=reported_account["num_lost_tokens"],
        regenerated_usd=reported_account["usd"]["lost"],
        total_usd=reported_account["usd"]["total"],
        num_sessions=reported_account["num_sessions"],
        problems=tuple(problems),
    )


def _row_problems(job: Job, rows: list[dict[str, Any]]) -> Iterator[str]:
    """Check that each row has its own prompt and, with the fake engine, the answer to this prompt."""
    expected = asyncio.run(_expected_answers([job.prompt(int(row["id"])) for row in rows])) if job.is_fake else None
    for number, row in enumerate(rows):
        if row["prompt"] != job.prompt(int(row["id"])):
            yield f"row {row['id']} has another row's prompt"
        elif expected is not None and row["response"] != expected[number]:
            yield f"row {row['id']} has another row's response"
        elif not row["num_output_tokens"]:
            yield f"row {row['id']} has no tokens"


async def _expected_answers(prompts: list[str]) -> list[str]:
    engine, tokenizer = FakeEngine(), ByteTokenizer()
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) for prompt in prompts]
    sampling = {"temperature": 0.0, "max_tokens": 256}
    return [(await engine.generate("", tokenizer.encode(chat), sampling)).text for chat in chats]


def _usage_problems(run: RunDirectory, rows: list[dict[str, Any]], reported_account: dict[str, Any]) -> Iterator[str]:
    """Check that a unit's usage is the sum of its rows, and the account the sum of all usages and lost tokens."""
    committed_tokens: defaultdict[str, int] = defaultdict(int)
    for unit in sorted(run.committed()):
        usage = run.usage(unit)
        committed_tokens[usage.session_id] += usage.num_output_tokens
        unit_rows = pq.read_table(run.unit_path(unit), columns=list(_TOKENS)).to_pylist()
        for name in _TOKENS:
            if getattr(usage, name) != sum(row[name] or 0 for row in unit_rows):
                yield f"unit {unit}: {name} in its usage is not the sum of its rows"
    for name in _TOKENS:
        if reported_account[name] != sum(row[name] or 0 for row in rows):
            yield f"{name} in the account is {reported_account[name]}, not the sum of the rows"
    sessions = run.sessions()
    lost = sum(max(0, session.num_output_tokens - committed_tokens[session.session_id]) for session in sessions)
    if reported_account["num_lost_tokens"] != lost:
        yield f"the account has {reported_account['num_lost_tokens']} lost tokens; the sessions have {lost}"
    current = account(run.usages(), sessions, Price.from_dict(run.manifest()["price"]))
    # Engines on a shared cluster may send one more idle heartbeat while the report is written.
    if (
        current.total_usd < reported_account["usd"]["total"] - 1e-9
        or current.usd.busy != reported_account["usd"]["busy"]
    ):
        yield f"the report says {reported_account['usd']}, but the ledger {current.usd}"


def _leftover_problems(run: RunDirectory) -> Iterator[str]:
    """Check that the lease is released, that no unused file is left, and that the report is complete."""
    lease = read_lease(run.root)
    if lease is None or lease.outcome is None:
        yield "the lease is not released"
    for path in run.root.rglob("*"):
        if path.is_file() and (path.name.endswith((".tmp", ".stop.json")) or path.parent == run.suspects):
            yield f"{path.relative_to(run.root)} is left over"
    referenced = {pq.read_schema(path).metadata[b"peagle.failed"].decode() for path in run.data.glob("unit-*.parquet")}
    for path in run.failed.iterdir():
        if path.name not in referenced:
            yield f"failed/{path.name} belongs to no committed unit"
    report = json.loads((run.root / "report.json").read_text())
    if report["run"]["complete"] is not True:
        yield "the report says that the run is not complete"
