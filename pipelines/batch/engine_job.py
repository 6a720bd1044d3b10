"""The job of an engine actor, and the start of its engine.

The job is picklable. Names of models are resolved on the node of the engine.
"""

import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

from peagle.economics.usage import EngineFacts
from peagle.engine.fake import FakeEngine, FakeTraits
from peagle.engine.interface import Checkable, RowEngine
from peagle.engine.spec import EngineSpec
from peagle.errors import EngineError
from peagle.runs.meter import BilledMeter
from pipelines.batch.lender import Lender
from pipelines.batch.multinode import FollowerJob, OtherNodes
from pipelines.batch.session import Admission, Session
from pipelines.batch.watchdog import ENGINE_TIMEOUT_S


@dataclass(frozen=True, kw_only=True)
class EngineJob:
    """The job of an engine actor.

    Attributes:
        facts: of its engine, for the ledger; `spec` has the names of models as the user gave them.
        driver: the lease number of its driver, which alone can stop it.
        slot_group: the name under which engines that share a node claim slots.
        part: the resources on each node of an engine on several nodes, by Ray's names.
        fake: the traits of the fake engine; None for vLLM.
        lender: None if the actor starts its own engine.
    """

    run_dir: str
    slot_group: str
    spec: EngineSpec
    facts: EngineFacts
    driver: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)
    fake: FakeTraits | None = None
    row_timeout_s: float | None = None
    engine_timeout_s: float = ENGINE_TIMEOUT_S
    num_engines_on_node: int = 1
    part: dict[str, float] = field(default_factory=dict)
    heartbeat_s: float = 5.0
    admission: Admission | None = None
    lender: Lender | None = None

    @property
    def num_slots(self) -> int:
        """The maximum number of concurrent requests of its engine."""
        return self.lender.num_slots if self.lender else self.spec.max_num_seqs


@dataclass(frozen=True, kw_only=True)
class StartedEngine:
    """A running engine.

    Attributes:
        checkable: for the self-check; None if its lender has checked it.
        compile_s: part of the start, in seconds.
        others: its ranks on other nodes, or None.
    """

    engine: RowEngine
    checkable: Checkable | None
    compile_s: float = 0.0
    others: OtherNodes | None = None


def start_engine(job: EngineJob, session: Session) -> StartedEngine:
    """Start the engine of a job, and record its warnings in the session.

    If another node of the engine is lost, this process ends, and Ray restarts it.

    Raises:
        EngineError: it does not start; the message has the reason of vLLM.
    """
    if job.lender is not None:
        assert isinstance(session.meter, BilledMeter), "a session of a lent engine has one"
        return StartedEngine(engine=job.lender.lend(session.meter), checkable=None)
    if job.fake is not None:
        return _start_fake(job.spec, job.fake)
    from peagle.engine.vllm_internals import compile_seconds, costly_warnings, with_root_cause
    from pipelines.cluster.node import start_vllm

    others = _other_nodes(job, session) if job.spec.num_nodes > 1 else None
    try:
        engine = start_vllm(
            job.spec,
            engine_index=session.slot,
            num_engines_on_node=job.num_engines_on_node,
            node_rank=others.rank if others is not None else None,
        )
    except EngineError as error:
        if others is None or others.failure is None:
            raise with_root_cause(error, session.log.read_text(errors="replace")) from error
        if others.is_lost:
            _restart(session, others.failure.message)
        raise others.failure from error
    log = session.log.read_text(errors="replace")
    session.start_warnings = costly_warnings(log)
    return StartedEngine(engine=engine, checkable=engine.checkable, compile_s=compile_seconds(log), others=others)


def _start_fake(spec: EngineSpec, traits: FakeTraits) -> StartedEngine:
    time.sleep(traits.start_s)
    num_speculative_tokens = spec.drafter.num_speculative_tokens if spec.drafter else 0
    engine = FakeEngine(traits, num_speculative_tokens=num_speculative_tokens, max_num_seqs=spec.max_num_seqs)
    return StartedEngine(engine=engine, checkable=engine.checkable)


def _other_nodes(job: EngineJob, session: Session) -> OtherNodes:
    follower = FollowerJob(
        run_dir=job.run_dir,
        slot_group=job.slot_group,
        spec=job.spec,
        num_engines_on_node=job.num_engines_on_node,
        session_id=session.session_id,
    )
    return OtherNodes(follower, job.part)


def _restart(session: Session, why: str) -> NoReturn:
    say_end(why)
    session.end()
    os._exit(1)


def say_end(why: str) -> None:
    """Log why this process ends."""
    sys.stderr.write(f"peagle: {why}; this process ends and is replaced\n")
    sys.stderr.flush()
