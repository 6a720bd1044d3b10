"""Record the cost of a measurement's engines in OUTPUT/ledger: a session per engine, a record per request.

Passes are busy time. Everything else after the start, such as warm-up or an interrupted pass, is idle time.
"""

import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from peagle.bench.engine import Answer, PassResult
from peagle.bench.plan import BenchPlan, Setup
from peagle.economics.ledger import append_request, write_session
from peagle.economics.usage import EngineFacts, EngineSession, RequestUsage, UnitUsage
from peagle.files import make_folder
from peagle.speculation import SpeculationStats


class EngineSpending:
    """Record the cost of one engine, from its start to its shutdown."""

    def __init__(self, folder: Path, plan: BenchPlan, setup: Setup, *, now: Callable[[], float] = time.time) -> None:
        make_folder(folder)
        self._folder, self._facts, self._now = folder, _facts(plan, setup), now
        self._session_id = uuid.uuid4().hex
        self._started_at = now()
        self._load_s: float | None = None
        self._busy_s = 0.0
        self._num_requests = self._num_output_tokens = 0
        self._write()

    def mark_ready(self, load_s: float) -> None:
        self._load_s = load_s
        self._write()

    def add(self, result: PassResult) -> None:
        answers = [answer for answer in result.answers if answer]
        elapsed_s = sum(answer.elapsed_s for answer in answers)
        self._busy_s += result.wall_s
        self._num_output_tokens += sum(answer.generation.num_output_tokens for answer in answers)
        self._write()  # write the session before records that refer to it
        for answer in answers:
            append_request(self._folder, self._request(answer, result.wall_s * answer.elapsed_s / elapsed_s))

    def end(self) -> None:
        self._write(ended=True)

    def _request(self, answer: Answer, busy_s: float) -> RequestUsage:
        """Return the record of a request, with its share of the busy time."""
        self._num_requests += 1
        now, generation = self._now(), answer.generation
        usage = UnitUsage(
            session_id=self._session_id,
            num_rows=1,
            num_failed_rows=0,
            num_prompt_tokens=generation.num_prompt_tokens,
            num_cached_tokens=generation.num_cached_tokens or 0,
            num_output_tokens=generation.num_output_tokens,
            busy_s=busy_s,
            speculation=generation.speculation or SpeculationStats.empty(),
            started_at=now - answer.elapsed_s,
            finished_at=now,
        )
        return self._facts.unbilled_request(f"{self._session_id}-{self._num_requests}", usage)

    def _write(self, *, ended: bool = False) -> None:
        lifetime_s = max(0.0, self._now() - self._started_at)
        load_s = lifetime_s if self._load_s is None else self._load_s
        idle_s = max(0.0, lifetime_s - load_s - self._busy_s)
        session = EngineSession(
            session_id=self._session_id,
            engine_index=0,
            hostname=socket.gethostname(),
            started_at=self._started_at,
            last_seen_at=self._started_at + load_s + self._busy_s + idle_s,
            load_s=load_s,
            compile_s=0.0,
            busy_s=self._busy_s,
            idle_s=idle_s,
            num_output_tokens=self._num_output_tokens,
            ended=ended,
            **asdict(self._facts),
        )
        write_session(self._folder, session)


def _facts(plan: BenchPlan, setup: Setup) -> EngineFacts:
    return EngineFacts.priced(
        plan.price,
        model=plan.model.name,
        drafter=setup.head or (setup.label if setup.k else None),
        num_devices=plan.num_devices,
        device="accelerator" if plan.hardware.platform == "cuda" else "vcpu",
        num_speculative_tokens=setup.k,
    )
