"""Whether an engine actor that Ray has placed loads its engine: at once, later, or never.

It reads the run directory as any other machine would. An actor that waits here takes no work and writes no session, so
nothing is charged for it; it ends with the run.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from peagle.economics.usage import EngineSession
from pipelines.batch.heartbeats import Heartbeats
from pipelines.batch.plan import Plan
from pipelines.batch.pool import is_worth_loading
from pipelines.batch.rundir import RunDirectory

_HEARTBEATS_A_LOOK = 3.0  # more than an engine may be silent for


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What an actor has to know of the run.

    Attributes:
        num_engines: below so many, an actor loads whatever is left to do.
        work: of each unit of the plan, by its number (`work_by_unit`).
        sessions_before: of earlier attempts; none of them is alive.
    """

    num_engines: int
    work: Sequence[int]
    sessions_before: frozenset[str]
    heartbeat_s: float

    def wait(self, run: RunDirectory) -> None:
        """Return when an engine is to be loaded."""
        heartbeats = Heartbeats(self.sessions_before, heartbeat_s=self.heartbeat_s)
        while True:
            sessions = run.sessions()
            heartbeats.observe(sessions)
            num_alive = len(heartbeats.alive(sessions))
            is_wanted = num_alive < self.num_engines or self._is_worth_it(run, sessions, num_alive)
            if is_wanted and run.stop.grace_s() is None:
                return
            time.sleep(_HEARTBEATS_A_LOOK * self.heartbeat_s)

    def _is_worth_it(self, run: RunDirectory, sessions: Sequence[EngineSession], num_alive: int) -> bool:
        done = sum(self.work[unit] for unit in run.committed() if unit < len(self.work))
        return is_worth_loading(sessions, num_alive, done, sum(self.work) - done)


def work_by_unit(plan: Plan) -> tuple[int, ...]:
    """The work of each unit by its number: as it was guessed, or its rows where an older plan has no guess."""
    work = {unit.unit: unit.work or unit.num_rows for unit in plan.units}
    return tuple(work.get(number, 0) for number in range(max(work) + 1))
