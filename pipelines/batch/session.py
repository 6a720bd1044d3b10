"""One engine process from start to shutdown: its slot, its log and its heartbeats in the ledger.

An actor that has not loaded its engine yet (`StartPolicy`) writes no session, so it is not charged.
"""

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from peagle.economics.usage import EngineSession
from peagle.private import restrict_new_files
from peagle.runs.directory import RunDirectory
from peagle.runs.liveness import Heartbeats
from peagle.runs.logs import COPY_S, LogCopy
from peagle.runs.meter import BilledMeter, EngineMeter, new_session_id
from peagle.runs.plan import Plan
from peagle.runs.scaling import is_worth_loading
from peagle.storage import WRITE_ERRORS
from pipelines.batch.resolve import ResolvedRun
from pipelines.cluster.node import claim_slot, redirect_output


class Session:
    """A session of the ledger. A thread writes heartbeats until `end`.

    Attributes:
        slot: slot of this engine on this node, within its slot group.
        log: output of this process and its children.
        meter: measures the engine's seconds by state.
        self_check: the result of the self-check as JSON; empty before it.
        start_warnings: warnings from the engine's start.
    """

    def __init__(self, run: ResolvedRun) -> None:
        restrict_new_files()
        is_lent = run.lender is not None  # billed by the endpoint that owns the engine
        self.meter = BilledMeter() if is_lent else EngineMeter()
        self.self_check = ""
        self.start_warnings: list[str] = []
        self._started_at = time.time()
        self.session_id = new_session_id(is_lent=is_lent)
        self._directory = run.directory
        self._facts = run.facts
        self._heartbeat_s = run.config.heartbeat_s
        self.log = run.directory.logs / f"engine-{self.session_id}.log"
        redirect_output(self.log)
        self._log_copy = LogCopy(run.directory.root, self.log, self.log.name)
        self.slot = claim_slot(run.slot_group_name)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.beat()
        threading.Thread(target=self._keep_beating, daemon=True).start()

    def beat(self) -> None:
        """Write a heartbeat now.

        Raises:
            OSError, StorageError: the disk is full, or the folder or the store cannot be written.
        """
        with self._lock:
            if not self._ended.is_set():
                self._write(ended=False)

    def end(self) -> None:
        """Write the session's last heartbeat, before this process ends."""
        self.copy_log()
        with self._lock:
            self._ended.set()
            self._write(ended=True)

    def copy_log(self) -> None:
        """Copy the log's new lines to the run directory."""
        self._log_copy.update()

    def _keep_beating(self) -> None:
        copied_at = time.monotonic()
        while not self._ended.wait(self._heartbeat_s):
            with contextlib.suppress(*WRITE_ERRORS):  # the next heartbeat includes these totals
                self.beat()
            if time.monotonic() - copied_at >= COPY_S:
                self.copy_log()
                copied_at = time.monotonic()

    def _write(self, *, ended: bool) -> None:
        self._directory.write_session(
            self.meter.snapshot().to_session(
                self.session_id,
                self._facts,
                engine_index=self.slot,
                started_at=self._started_at,
                ended=ended,
                self_check=self.self_check,
                start_warnings="\n".join(self.start_warnings),
            )
        )


_HEARTBEATS_PER_CHECK = 3.0  # an engine counts as dead after two missed heartbeats


@dataclass(frozen=True, kw_only=True)
class StartPolicy:
    """Decides when an actor loads its engine.

    Attributes:
        num_engines: minimum number of engines; below it, an actor loads its engine even for little work.
        work: estimated work of each unit by number (`work_by_unit`).
        sessions_before: ids of the sessions of earlier attempts, which have all ended.
    """

    num_engines: int
    work: Sequence[int]
    sessions_before: frozenset[str]
    heartbeat_s: float

    def wait_until_needed(self, run: RunDirectory) -> None:
        """Wait until another engine should be loaded."""
        heartbeats = Heartbeats(self.sessions_before, heartbeat_s=self.heartbeat_s)
        while True:
            sessions = run.sessions()
            heartbeats.observe(sessions)
            num_alive = len(heartbeats.alive(sessions))
            is_needed = num_alive < self.num_engines or self._is_worth_loading(run, sessions, num_alive)
            if is_needed and run.stop.grace_s() is None:  # and the run is not being stopped
                return
            time.sleep(_HEARTBEATS_PER_CHECK * self.heartbeat_s)

    def _is_worth_loading(self, run: RunDirectory, sessions: Sequence[EngineSession], num_alive: int) -> bool:
        committed_work = sum(self.work[unit] for unit in run.committed() if unit < len(self.work))
        return is_worth_loading(sessions, num_alive, committed_work, sum(self.work) - committed_work)


def work_by_unit(plan: Plan) -> tuple[int, ...]:
    """Return the estimated work of each unit, by unit number; in plans of older versions, its number of rows."""
    work = {unit.unit: unit.work or unit.num_rows for unit in plan.units}
    return tuple(work.get(number, 0) for number in range(max(work) + 1))
