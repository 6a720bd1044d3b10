"""Play one run: start it, kill its processes by a schedule, continue it until it is complete, and audit it."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from peagle.runs.directory import RunDirectory
from tests.chaos import processes
from tests.chaos.audit import Audit, audit
from tests.chaos.driver import Driver, Job
from tests.chaos.ray_nodes import RayNodes
from tests.chaos.schedule import Kill

_POLL_S = 0.05
_MAX_ATTEMPTS = 20
_MAX_EXIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KillRecord:
    """A kill that was carried out: its victim is a process, or the number of a node."""

    kind: str
    victim: int
    at_s: float
    attempt: int
    num_committed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    exit_code: int
    wall_s: float
    last_words: str


@dataclass(kw_only=True)
class RunResult:
    """What happened in a run."""

    kills: list[KillRecord] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    wall_s: float = 0.0
    audit: Audit | None = None
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Player:
    """Plays one run.

    Args:
        nodes: the cluster. If None, each driver starts a local cluster; to kill a node then means to kill its raylet.
        limit_s: maximum duration; a longer run counts as hung.
    """

    def __init__(
        self, job: Job, kills: list[Kill], nodes: RayNodes | None, *, limit_s: float, say: Callable[[str], None]
    ) -> None:
        self._job, self._pending_kills, self._nodes, self._say = job, list(kills), nodes, say
        self._started_at = time.monotonic()
        self._units_at_last_kill = 0
        self._due_at: float | None = None
        self._give_up_at = self._started_at + limit_s
        self._result = RunResult()

    def play(self) -> RunResult:
        self._job.write_corpus()
        while not self._is_over():
            attempt_started = time.monotonic()
            driver = Driver(self._job, len(self._result.attempts), self._nodes and self._nodes.environment)
            try:
                self._watch(driver)
            finally:
                driver.end()
            self._result.attempts.append(
                Attempt(
                    exit_code=driver.wait(60),
                    wall_s=round(time.monotonic() - attempt_started, 1),
                    last_words=driver.last_message(),
                )
            )
        self._result.wall_s = round(time.monotonic() - self._started_at, 1)
        if not self._result.problems:
            self._result.audit = audit(self._job)
            self._result.problems += [*self._result.audit.problems, *self._survivors()]
        return self._result

    def _is_over(self) -> bool:
        attempts = self._result.attempts
        if attempts and attempts[-1].exit_code == 0:
            return True
        if len(attempts) >= _MAX_ATTEMPTS:
            self._result.problems.append(f"not done after {len(attempts)} attempts: {attempts[-1].last_words}")
        if time.monotonic() > self._give_up_at:
            self._result.problems.append(f"the run hung: not done after {time.monotonic() - self._started_at:.0f} s")
        return bool(self._result.problems)

    def _watch(self, driver: Driver) -> None:
        while driver.exit_code() is None and time.monotonic() < self._give_up_at:
            if self._pending_kills and self._is_due(self._pending_kills[0]):
                self._try_kill(self._pending_kills[0], driver)
            time.sleep(_POLL_S)

    def _is_due(self, kill: Kill) -> bool:
        now = time.monotonic()
        if self._due_at is None and self._num_committed() >= self._units_at_last_kill + kill.after_units:
            self._due_at = now + kill.wait_s
        return self._due_at is not None and now >= self._due_at

    def _try_kill(self, kill: Kill, driver: Driver) -> None:
        """Carry out a kill if its target exists now; otherwise leave it pending."""
        num_committed = self._num_committed()
        victim = self._carry_out(kill, driver)
        if victim is None:
            return
        self._pending_kills.pop(0)
        self._due_at, self._units_at_last_kill = None, num_committed
        record = KillRecord(
            kind=kill.kind,
            victim=victim,
            at_s=round(time.monotonic() - self._started_at, 1),
            attempt=len(self._result.attempts),
            num_committed=num_committed,
        )
        self._result.kills.append(record)
        self._say(f"  {record.at_s:6.1f} s  killed {kill.kind} {victim} with {num_committed} units committed")

    def _num_committed(self) -> int:
        return len(RunDirectory(self._job.output).committed())

    def _carry_out(self, kill: Kill, driver: Driver) -> int | None:
        """Kill one of the candidates and return it; return None if there is none, or if it had already ended."""
        if kill.kind == "driver":
            candidates = [driver.pid]
        elif kill.kind == "engine":
            candidates = processes.cores(self._job.output)
        elif kill.kind == "actor":
            candidates = processes.actors(self._job.output)
        elif self._nodes is None:
            candidates = processes.raylets(driver.pid)
        else:
            candidates = self._nodes.node_numbers_of(processes.actors(self._job.output))
        if not candidates:
            return None
        victim = kill.choose(candidates)
        if kill.kind == "node" and self._nodes is not None:
            was_running = self._nodes.kill_node(victim)
            self._nodes.replace_lost()
        else:
            was_running = processes.kill(victim)
        return victim if was_running else None

    def _survivors(self) -> list[str]:
        """Return a problem for each engine that outlived the run."""
        deadline = time.monotonic() + _MAX_EXIT_S
        while pids := processes.actors(self._job.output):
            if time.monotonic() > deadline:
                return [f"process {pid} is alive: {processes.command_line(pid)[:80]}" for pid in pids]
            time.sleep(0.2)
        return []
