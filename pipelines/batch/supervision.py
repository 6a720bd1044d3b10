"""The driver's judgement: go on, ask to stop, and the words at the end.

It reads the run directory and asks workers to stop through it. It knows neither Ray nor rows.
"""

import contextlib
import datetime
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from peagle.economics.prices import Price
from peagle.economics.sessions import start_warnings
from peagle.economics.usage import EngineSession, UnitUsage
from peagle.errors import EngineError, PeagleError, StoppedEarly, TooManyFailedRows
from peagle.runs.directory import RunDirectory
from peagle.runs.draws import TagDraw
from peagle.runs.limits import Limits, Reached, Situation, dollars, parse_deadline, reached
from peagle.runs.liveness import engines_at_work, tokens_per_s
from peagle.runs.plan import Plan
from peagle.runs.progress import Tally
from peagle.runs.status import Spending
from peagle.runs.stopping import resume_command
from peagle.storage import WRITE_ERRORS
from pipelines.batch.request import BY_SIGNAL, GIVE_UP_S, RunRequest
from pipelines.batch.resolve import ResolvedRun

_MAX_DEATHS_IN_A_ROW = 5
_ROOM = "once it has room, the same command continues the run"
_MEND = "mend the cause; this takes the failed rows up again and continues the run"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Why a run ends before all units are committed.

    Attributes:
        error: what it ends with.
        resume_flags: what the command that continues it needs beside the flags of this one.
        advice: what to do before.
    """

    error: type[PeagleError]
    message: str
    resume_flags: Mapping[str, str | None] = field(default_factory=dict)
    advice: str = "the same command continues the run"


class DeathWatch:
    """Counts engine deaths between which no row was finished.

    An engine that starts again takes the slot (host and number) of the one that died, so there are more sessions than
    slots. On a cluster it may start on another host: then there are more of them than engines.

    Args:
        num_engines: the most that there may be at once.
    """

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._num_deaths = 0
        self._num_finished = 0
        self.in_a_row = 0

    def observe(self, sessions: Iterable[EngineSession], num_rows: int) -> int:
        """Count deaths since a row was last finished.

        From this attempt's sessions and the committed rows.
        """
        sessions = list(sessions)
        slots = {(session.hostname, session.engine_index) for session in sessions}
        num_deaths = len(sessions) - min(len(slots), self._num_engines)
        num_finished = num_rows + sum(session.num_output_tokens for session in sessions)
        if num_finished > self._num_finished:
            self.in_a_row = 0
        self.in_a_row += num_deaths - self._num_deaths
        self._num_deaths, self._num_finished = num_deaths, num_finished
        return self.in_a_row


class Supervisor:
    """Watches one attempt at a run.

    Args:
        request: of this attempt, with its limits, its stop, and the command from which that of a resume is made.
        draw: on budgets of the run's tags.

    Attributes:
        tally: of the whole run directory.
        sessions: of this attempt's engines, as of the last look.
        ending: why the run ends early; None while it goes on.
    """

    def __init__(
        self, run: RunDirectory, plan: Plan, resolved: ResolvedRun, request: RunRequest, draw: TagDraw | None = None
    ) -> None:
        self._run, self._plan, self._resolved, self._request, self._draw = run, plan, resolved, request, draw
        price = Price.from_dict(run.manifest()["price"])
        self.tally = Tally(num_rows_planned=plan.num_rows)
        self._spending = Spending(self._earlier(), run.sessions(), price, heartbeat_s=resolved.config.heartbeat_s)
        self.tally.usd = self._spending.usd
        engines = resolved.config.engine_range
        self._deaths = DeathWatch(engines.largest)
        self._price = price
        self._limits = request.limits
        # All that may start at once: those that load cannot be asked to stop before they have loaded.
        self._limits = replace(self._limits, reserve_usd=self._reserve_usd(min(engines.largest, len(plan.units))))
        self._give_up_at = math.inf
        self._is_asked = False
        self._warnings: dict[str, bool] = {}  # of engines' starts: whether they were told
        self.sessions: Sequence[EngineSession] = ()
        self.ending: Ending | None = None

    def _earlier(self) -> Iterator[UnitUsage]:
        """The units of earlier attempts, read once.

        There may be more of them than memory holds.
        """
        for usage in self._run.usages():
            self.tally.add(usage, before=True)
            yield usage

    def require_room(self) -> None:
        """Refuse to start engines or wait for nodes after a limit or a stop.

        Raises:
            StoppedEarly: no money or time is left, or a signal came.
            TooManyFailedRows: too many rows have failed before.
        """
        if ending := self._asked_to_end():
            self.ending = ending
            raise self.error()

    def observe(self) -> None:
        """Look at the ledger, and ask the workers to stop when it is time."""
        self.sessions = sessions = self._spending.heartbeats.of_this_attempt(self._run.sessions())
        usd = self._spending.observe(sessions)
        alive = self._spending.heartbeats.alive(sessions)
        self.tally.observe(usd, num_engines=len(engines_at_work(alive)), tokens_per_s=tokens_per_s(alive) or 0.0)
        self._warnings = dict.fromkeys(start_warnings(sessions), False) | self._warnings
        self._limits = replace(self._limits, reserve_usd=self._reserve_usd(len(alive)))
        if self.ending is None and (ending := self._judge(sessions)):
            self.ending = ending
            self._give_up_at = time.monotonic() + self._resolved.config.grace_s + GIVE_UP_S
        if self.ending is not None and not self._is_asked:
            self._ask_to_stop()

    def close(self) -> None:
        """Tell the budgets of the run's tags what it has cost, as far as they can be told."""
        if self._draw is not None:
            with contextlib.suppress(*WRITE_ERRORS):  # the next attempt tells it
                self._draw.end(self._spending.usd)

    def new_warnings(self) -> list[str]:
        """New start warnings of this attempt's engines, each once."""
        new = [warning for warning, is_told in self._warnings.items() if not is_told]
        self._warnings |= dict.fromkeys(new, True)
        return new

    def _ask_to_stop(self) -> None:
        """Ask workers to stop; each look tries again where that cannot be written.

        The disk may be full. Workers are abandoned in time.
        """
        with contextlib.suppress(*WRITE_ERRORS):
            self._run.stop.request(self._resolved.config.grace_s)
            self._is_asked = True

    @property
    def gives_up(self) -> bool:
        """Whether workers had their time and must be abandoned."""
        return time.monotonic() > self._give_up_at

    def error(self) -> PeagleError:
        """The error of an unfinished run: reason, progress, and how it goes on."""
        ending = self.ending or Ending(error=StoppedEarly, message="the run ended before its last unit")
        committed = self._run.committed()  # not the tally: of what is committed last, the driver may hear nothing
        num_units, num_done = len(self._plan.units), len(committed)
        rows_left = sum(unit.num_rows for unit in self._plan.left(committed))
        command = resume_command(self._request.command, ending.resume_flags)
        return ending.error(
            f"stopped with {num_done} of {num_units} units committed: {ending.message}\n"
            f"  {rows_left} of {self._plan.num_rows} rows are left, {dollars(self.tally.usd)} spent in all",
            hint=f"{ending.advice}: {command}",
        )

    # --- reasons

    def _asked_to_end(self) -> Ending | None:
        if self._request.stop.is_set():
            return Ending(error=StoppedEarly, message=BY_SIGNAL)
        self._limits = replace(self._limits, budget_usd=self._request.budget_usd)
        if limit := reached(self._limits, self._situation()):
            return self._ending_of(limit)
        if self._draw and (message := self._draw.reached(self._spending.usd, self._limits.reserve_usd)):
            return Ending(error=StoppedEarly, message=message, advice=_ROOM)
        return None

    def _judge(self, sessions: Sequence[EngineSession]) -> Ending | None:
        if ending := self._asked_to_end():
            return ending
        if self._deaths.observe(sessions, self.tally.num_rows) >= _MAX_DEATHS_IN_A_ROW:
            return Ending(
                error=EngineError,
                message=f"engines died {self._deaths.in_a_row} times without finishing a single row in between",
                advice="the run's logs/ folder says why they died; then the same command continues the run",
            )
        return None

    def _reserve_usd(self, num_alive: int) -> float:
        """The most that ending costs, for present engines and those about to start."""
        num_engines = max(self._resolved.config.engine_range.smallest, num_alive)
        num_devices = num_engines * self._resolved.placement.num_devices
        return self._limits.reserve_s * num_devices * self._price.usd_per_device_s

    def _situation(self) -> Situation:
        return Situation(
            now=time.time(),
            spent_usd=self._spending.usd,
            num_done_rows=self.tally.num_rows + self.tally.num_failed_rows,
            num_failed_rows=self.tally.num_failed_rows,
        )

    def _ending_of(self, limit: Reached) -> Ending:
        if limit.limit == "budget":
            flags: dict[str, str | None] = {"--budget-usd": f"{self._budget_to_finish():.2g}"}
            return Ending(
                error=StoppedEarly, message=limit.message, resume_flags=flags, advice="this continues the run"
            )
        if limit.limit == "deadline":
            return Ending(error=StoppedEarly, message=limit.message, resume_flags=self._later())
        return Ending(
            error=TooManyFailedRows,
            message=f"{limit.message}\n  {describe_failures(self._run)}",
            resume_flags={"--retry-failed": None},
            advice=_MEND,
        )

    def _budget_to_finish(self) -> float:
        """The cost of the whole run, if each remaining row costs a fifth more.

        Rounded up.
        """
        budget = self._limits.budget_usd or 0.0
        done = self.tally.num_rows + self.tally.num_failed_rows
        rest = self._spending.usd / done * (self._plan.num_rows - done) if done else budget
        wanted = max(budget, self._spending.usd + 1.2 * rest) + 2 * self._limits.reserve_usd
        step = 10.0 ** (math.floor(math.log10(wanted)) - 1)
        return math.ceil(wanted / step) * step

    def _later(self) -> dict[str, str | None]:
        """A deadline set anew.

        A duration counts again; a moment, also a time of day, does not come again.
        """
        text = self._resolved.config.deadline or "none"
        again = parse_deadline(text, datetime.datetime.fromtimestamp(time.time() + 1))
        return {"--deadline": "none"} if again == self._limits.deadline_at else {}


def require_few_failures(report: Mapping[str, Any], run: RunDirectory, request: RunRequest) -> None:
    """Require no more dead letters than the user allows, of a fully committed run.

    The last rows may pass the limit when nobody looks any more; how a run ends must not depend on that.

    Args:
        report: as `make_report` makes it.

    Raises:
        TooManyFailedRows: it has.
    """
    allowed = request.limits.max_failed_rows
    if allowed is None:
        return
    num_done, num_failed = report["account"]["num_rows"], report["account"]["num_failed_rows"]
    done = Situation(now=0.0, spent_usd=0.0, num_done_rows=num_done + num_failed, num_failed_rows=num_failed)
    if limit := reached(Limits(max_failed_rows=allowed), done):
        again = resume_command(request.command, {"--retry-failed": None})
        raise TooManyFailedRows(
            f"all units are committed, but {limit.message}\n  {describe_failures(run)}",
            hint=f"{_MEND}: {again}; the report and the export are made",
        )


def describe_failures(run: RunDirectory) -> str:
    """The most frequent reasons of dead letters, and one of the most frequent kind."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for letter in run.dead_letters():
        counts[letter["reason"]] += 1
        examples.setdefault(letter["reason"], f"row {letter['id']}: {letter['message']}")
    if not counts:
        return "no dead letter can be read"
    often = counts.most_common(3)
    return f"{', '.join(f'{count} {reason}' for reason, count in often)}; for example {examples[often[0][0]]}"
