"""Start the engine of an actor. Model names are resolved on the actor's node."""

import os
import sys
import time
from dataclasses import dataclass
from typing import NoReturn

from peagle.engine.fake import FakeEngine, FakeTraits
from peagle.engine.interface import Checkable, RowEngine
from peagle.engine.spec import EngineSpec
from peagle.errors import EngineError
from peagle.runs.meter import BilledMeter
from pipelines.batch.multinode import Followers
from pipelines.batch.resolve import ResolvedRun
from pipelines.batch.session import Session


@dataclass(frozen=True, kw_only=True)
class StartedEngine:
    """A running engine.

    Attributes:
        checkable: the engine for the self-check; None if the engine is borrowed, since its owner has checked it.
        compile_s: seconds of the start that were spent on compiling.
        followers: the engine's ranks on other nodes; None if it runs on a single node.
    """

    engine: RowEngine
    checkable: Checkable | None
    compile_s: float = 0.0
    followers: Followers | None = None


def start_engine(run: ResolvedRun, session: Session) -> StartedEngine:
    """Start an engine of a run, and record its warnings in the session.

    If one of the engine's other nodes is lost, this process exits, and Ray replaces it.

    Raises:
        EngineError: the engine does not start; the message has vLLM's reason.
    """
    if run.lender is not None:
        assert isinstance(session.meter, BilledMeter), "the session of a borrowed engine has a BilledMeter"
        return StartedEngine(engine=run.lender.lend(session.meter), checkable=None)
    if run.config.engine == "fake":
        return _start_fake(run.spec, run.config.fake)
    from peagle.engine.vllm_internals import compile_seconds, costly_warnings, with_root_cause
    from pipelines.cluster.node import start_vllm

    followers = Followers(run, session.session_id) if run.spec.num_nodes > 1 else None
    try:
        engine = start_vllm(
            run.spec,
            engine_index=session.slot,
            num_engines_on_node=run.placement.num_engines_on_node,
            node_rank=followers.rank if followers is not None else None,
        )
    except EngineError as error:
        if followers is None or followers.failure is None:
            raise with_root_cause(error, session.log.read_text(errors="replace")) from error
        if followers.is_lost:
            _exit_for_restart(session, followers.failure.message)
        raise followers.failure from error
    log = session.log.read_text(errors="replace")
    session.start_warnings = costly_warnings(log)
    return StartedEngine(engine=engine, checkable=engine.checkable, compile_s=compile_seconds(log), followers=followers)


def _start_fake(spec: EngineSpec, traits: FakeTraits) -> StartedEngine:
    time.sleep(traits.start_s)
    num_speculative_tokens = spec.drafter.num_speculative_tokens if spec.drafter else 0
    engine = FakeEngine(traits, num_speculative_tokens=num_speculative_tokens, max_num_seqs=spec.max_num_seqs)
    return StartedEngine(engine=engine, checkable=engine.checkable)


def _exit_for_restart(session: Session, reason: str) -> NoReturn:
    log_exit(reason)
    session.end()
    os._exit(1)


def log_exit(reason: str) -> None:
    """Log why this process exits."""
    sys.stderr.write(f"peagle: {reason}; this process ends and is replaced\n")
    sys.stderr.flush()
