"""Supervise a run from its directory: decide whether it continues, and explain why it ended.

A file in the run directory stops the workers.
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
from peagle.economics.report.figures import format_usd
from peagle.economics.usage import EngineSession, UnitUsage, start_warnings
from peagle.errors import EngineError, PeagleError, StoppedEarly, TooManyFailedRows
from peagle.runs.budget_draws import TagBudgets
from peagle.runs.directory import RunDirectory
from peagle.runs.limits import Limits, ReachedLimit, Situation, find_reached_limit, parse_deadline
from peagle.runs.liveness import loaded_engines, tokens_per_s
from peagle.runs.progress import Tally
from peagle.runs.status import Spending
from peagle.runs.stopping import resume_command
from peagle.storage import WRITE_ERRORS
from pipelines.batch.request import BY_SIGNAL, GIVE_UP_S, RunRequest
from pipelines.batch.resolve import ResolvedRun

_MAX_CONSECUTIVE_CRASHES = 5
_BUDGET_ADVICE = "when the budget has room, the same command continues the run"
_RETRY_ADVICE = "fix the cause; this command retries the failed rows and continues the run"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Why a run ends before all units are committed.

    Attributes:
        error: type of the error.
        resume_flags: additional flags of the command that continues the run.
        advice: text that introduces that command.
    """

    error: type[PeagleError]
    message: str
    resume_flags: Mapping[str, str | None] = field(default_factory=dict)
    advice: str = "the same command continues the run"


class CrashCounter:
    """Counts consecutive engine crashes without a finished row in between.

    Every crash adds a session. A restarted engine normally takes the slot (host and number) of the crashed one, so the
    number of crashes is the number of sessions minus the number of slots. On a cluster, it might start on another host
    and take a new slot, so at most `num_engines` slots count.

    Args:
        num_engines: maximum number of concurrent engines.
    """

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._num_crashes = 0
        self._progress = 0
        self.num_consecutive = 0

    def observe(self, sessions: Iterable[EngineSession], num_rows: int) -> int:
        """Return the number of crashes since the last finished row. `sessions` are this attempt's."""
        sessions = list(sessions)
        slots = {(session.hostname, session.engine_index) for session in sessions}
        num_crashes = len(sessions) - min(len(slots), self._num_engines)
        # Rows of committed units plus tokens of finished rows: the sum grows with every row that finishes.
        progress = num_rows + sum(session.num_output_tokens for session in sessions)
        if progress > self._progress:
            self.num_consecutive = 0
        self.num_consecutive += num_crashes - self._num_crashes
        self._num_crashes, self._progress = num_crashes, progress
        return self.num_consecutive


class Supervisor:
    """A supervisor of one attempt at a run.

    Args:
        request: the request of this attempt.
        tag_budgets: the budgets of the run's tags at an endpoint, or None.

    Attributes:
        tally: totals of the whole run directory.
        sessions: sessions of this attempt's engines at the last observation.
        ending: why the run ends early; None while it continues.
    """

    def __init__(self, request: RunRequest, run: ResolvedRun, tag_budgets: TagBudgets | None = None) -> None:
        self._request, self._run, self._tag_budgets = request, run, tag_budgets
        self._directory = directory = run.directory
        price = Price.from_dict(directory.manifest()["price"])
        self.tally = Tally(num_rows_planned=run.plan.num_rows)
        earlier_usages = self._count_earlier_units()
        self._spending = Spending(earlier_usages, directory.sessions(), price, heartbeat_s=run.config.heartbeat_s)
        self.tally.usd = self._spending.usd
        engines = run.config.engine_range
        self._crashes = CrashCounter(engines.largest)
        self._price = price
        self._limits = request.limits
        # The reserve covers all engines that may start at the same time, because a loading engine cannot be stopped.
        self._limits = replace(self._limits, reserve_usd=self._reserve_usd(min(engines.largest, len(run.plan.units))))
        self._give_up_at = math.inf
        self._is_stop_requested = False
        self._warnings: dict[str, bool] = {}  # start warnings, and whether they were shown
        self.sessions: Sequence[EngineSession] = ()
        self.ending: Ending | None = None

    def _count_earlier_units(self) -> Iterator[UnitUsage]:
        """Yield the units of earlier attempts, adding each to the tally, without holding them in memory."""
        for usage in self._directory.usages():
            self.tally.add(usage, is_earlier=True)
            yield usage

    def require_within_limits(self) -> None:
        """Refuse to start engines or wait for nodes if a limit is reached or the run was stopped.

        Raises:
            StoppedEarly: no money or time is left, or a signal arrived.
            TooManyFailedRows: too many rows failed in earlier attempts.
        """
        if ending := self._find_stop_or_limit():
            self.ending = ending
            raise self.error()

    def observe(self) -> None:
        """Read the ledger, and ask the workers to stop if a limit is reached."""
        self.sessions = sessions = self._spending.heartbeats.of_this_attempt(self._directory.sessions())
        usd = self._spending.observe(sessions)
        alive = self._spending.heartbeats.alive(sessions)
        self.tally.observe(usd, num_engines=len(loaded_engines(alive)), tokens_per_s=tokens_per_s(alive) or 0.0)
        self._warnings = dict.fromkeys(start_warnings(sessions), False) | self._warnings
        self._limits = replace(self._limits, reserve_usd=self._reserve_usd(len(alive)))
        if self.ending is None and (ending := self._find_ending(sessions)):
            self.ending = ending
            self._give_up_at = time.monotonic() + self._run.config.grace_s + GIVE_UP_S
        if self.ending is not None and not self._is_stop_requested:
            self._request_stop()

    def close(self) -> None:
        """Charge the cost to the budgets of the run's tags, if the budgets' files can be written."""
        if self._tag_budgets is not None:
            with contextlib.suppress(*WRITE_ERRORS):  # otherwise the next attempt charges the cost
                self._tag_budgets.end(self._spending.usd)

    def new_warnings(self) -> list[str]:
        """Return the start warnings of this attempt's engines that were not returned before."""
        new = [warning for warning, is_shown in self._warnings.items() if not is_shown]
        self._warnings |= dict.fromkeys(new, True)
        return new

    def _request_stop(self) -> None:
        """Ask workers to stop. If that fails, for example on a full disk, the next observation tries again."""
        with contextlib.suppress(*WRITE_ERRORS):
            self._directory.stop.request(self._run.config.grace_s)
            self._is_stop_requested = True

    @property
    def should_give_up(self) -> bool:
        """Whether the driver should stop waiting, because workers have had enough time to stop."""
        return time.monotonic() > self._give_up_at

    def error(self) -> PeagleError:
        """Return the error of an unfinished run: reason, progress, and how to continue."""
        ending = self.ending or Ending(error=StoppedEarly, message="the run ended before its last unit")
        committed = self._directory.committed()  # the tally may miss the last units
        num_units, num_done = len(self._run.plan.units), len(committed)
        rows_left = sum(unit.num_rows for unit in self._run.plan.remaining_units(committed))
        command = resume_command(self._request.command, ending.resume_flags)
        return ending.error(
            f"stopped with {num_done} of {num_units} units committed: {ending.message}\n"
            f"  {rows_left} of {self._run.plan.num_rows} rows are left, {format_usd(self.tally.usd)} spent in all",
            hint=f"{ending.advice}: {command}",
        )

    # --- reasons

    def _find_stop_or_limit(self) -> Ending | None:
        if self._request.stop.is_set():
            return Ending(error=StoppedEarly, message=BY_SIGNAL)
        self._limits = replace(self._limits, budget_usd=self._request.budget_usd)
        if limit := find_reached_limit(self._limits, self._situation()):
            return self._ending_of(limit)
        if self._tag_budgets and (message := self._tag_budgets.reached(self._spending.usd, self._limits.reserve_usd)):
            return Ending(error=StoppedEarly, message=message, advice=_BUDGET_ADVICE)
        return None

    def _find_ending(self, sessions: Sequence[EngineSession]) -> Ending | None:
        if ending := self._find_stop_or_limit():
            return ending
        num_consecutive = self._crashes.observe(sessions, self.tally.num_rows)
        if num_consecutive >= _MAX_CONSECUTIVE_CRASHES:
            return Ending(
                error=EngineError,
                message=f"engines crashed {num_consecutive} times without finishing a row",
                advice="find the cause in the run's logs/ folder; then the same command continues the run",
            )
        return None

    def _reserve_usd(self, num_alive: int) -> float:
        """Return the maximum cost of shutting down the running engines and those that are about to start."""
        num_engines = max(self._run.config.engine_range.smallest, num_alive)
        num_devices = num_engines * self._run.placement.num_devices
        return self._limits.reserve_s * num_devices * self._price.usd_per_device_s

    def _situation(self) -> Situation:
        return Situation(
            now=time.time(),
            spent_usd=self._spending.usd,
            num_processed_rows=self.tally.num_rows + self.tally.num_failed_rows,
            num_failed_rows=self.tally.num_failed_rows,
        )

    def _ending_of(self, limit: ReachedLimit) -> Ending:
        if limit.limit == "budget":
            flags: dict[str, str | None] = {"--budget-usd": f"{self._budget_to_finish():.2g}"}
            return Ending(
                error=StoppedEarly, message=limit.message, resume_flags=flags, advice="this continues the run"
            )
        if limit.limit == "deadline":
            return Ending(error=StoppedEarly, message=limit.message, resume_flags=self._deadline_flags())
        return Ending(
            error=TooManyFailedRows,
            message=f"{limit.message}\n  {describe_failures(self._directory)}",
            resume_flags={"--retry-failed": None},
            advice=_RETRY_ADVICE,
        )

    def _budget_to_finish(self) -> float:
        """Return a rounded budget that suffices if remaining rows cost at most 20 % more than finished rows."""
        budget = self._limits.budget_usd or 0.0
        num_done = self.tally.num_rows + self.tally.num_failed_rows
        remaining_usd = self._spending.usd / num_done * (self._run.plan.num_rows - num_done) if num_done else budget
        suggested_usd = max(budget, self._spending.usd + 1.2 * remaining_usd) + 2 * self._limits.reserve_usd
        step = 10.0 ** (math.floor(math.log10(suggested_usd)) - 1)
        return math.ceil(suggested_usd / step) * step

    def _deadline_flags(self) -> dict[str, str | None]:
        """Return the flag to resume with: `none` instead of a fixed time, which has passed; no flag for a duration."""
        deadline = self._run.config.deadline or "none"
        # One second later, a duration gives another deadline, and a fixed time the same one.
        parsed_later = parse_deadline(deadline, datetime.datetime.fromtimestamp(time.time() + 1))
        return {"--deadline": "none"} if parsed_later == self._limits.deadline_at else {}


def require_few_failures(report: Mapping[str, Any], run: RunDirectory, request: RunRequest) -> None:
    """Check the limit of dead letters of a fully committed run, since its last rows may exceed the limit.

    Args:
        report: result of `make_report`.

    Raises:
        TooManyFailedRows: the run has more dead letters than the user allows.
    """
    allowed = request.limits.max_failed_rows
    if allowed is None:
        return
    num_done, num_failed = report["account"]["num_rows"], report["account"]["num_failed_rows"]
    final_situation = Situation(
        now=0.0, spent_usd=0.0, num_processed_rows=num_done + num_failed, num_failed_rows=num_failed
    )
    if limit := find_reached_limit(Limits(max_failed_rows=allowed), final_situation):
        command = resume_command(request.command, {"--retry-failed": None})
        raise TooManyFailedRows(
            f"all units are committed, but {limit.message}\n  {describe_failures(run)}",
            hint=f"{_RETRY_ADVICE}: {command}; the report and the export were written",
        )


def describe_failures(run: RunDirectory) -> str:
    """Describe the most frequent reasons of dead letters, with an example of the most frequent one."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for letter in run.dead_letters():
        counts[letter["reason"]] += 1
        examples.setdefault(letter["reason"], f"row {letter['id']}: {letter['message']}")
    if not counts:
        return "no dead letter can be read"
    most_common = counts.most_common(3)
    example = examples[most_common[0][0]]
    return f"{', '.join(f'{count} {reason}' for reason, count in most_common)}; for example {example}"
