"""The limits of a run: budget, deadline, and number of dead letters. Pure functions."""

import datetime
import re
from dataclasses import dataclass
from typing import Literal

from peagle.economics.report.figures import format_usd

MIN_ROWS_FOR_SHARE = 100  # with fewer rows, a share is not meaningful

_DURATION = re.compile(r"(?=\d)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.IGNORECASE)
_TOO_FAR = "the time is too far in the future"
_DEADLINE_FORMS = "must be a time of day (18:30), a timestamp (2026-11-30T18:30:00+01:00), a duration (2h30m) or none"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxFailedRows:
    """The maximum of dead letters: a number, or a share of the processed rows."""

    count: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str) -> "MaxFailedRows":
        """Parse `N` or `P%`; raises ValueError if the text has neither form."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)%|(\d+)", text.strip())
        if match is None or (match[1] and float(match[1]) > 100):
            raise ValueError("must be a number of rows or a share such as 5%")
        return cls(share=float(match[1]) / 100) if match[1] else cls(count=int(match[2]))

    def is_exceeded(self, num_failed_rows: int, num_processed_rows: int) -> bool:
        if self.count is not None:
            return num_failed_rows > self.count
        assert self.share is not None, "one of the two is set"
        return num_processed_rows >= MIN_ROWS_FOR_SHARE and num_failed_rows > self.share * num_processed_rows

    def __str__(self) -> str:
        return str(self.count) if self.share is None else f"{100 * self.share:g}%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a run; None means no limit."""

    budget_usd: float | None = None
    deadline_at: float | None = None  # Unix time by which everything must have ended
    max_failed_rows: MaxFailedRows | None = None
    reserve_s: float = 0.0  # the maximum time that shutting the run down takes
    reserve_usd: float = 0.0  # the maximum cost of the shutdown; the run is stopped when only this much is left


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The state of a run that is compared with its limits."""

    now: float
    spent_usd: float
    num_processed_rows: int
    num_failed_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachedLimit:
    limit: Literal["budget", "deadline", "failed_rows"]
    message: str


def find_reached_limit(limits: Limits, situation: Situation) -> ReachedLimit | None:
    """Return the limit that requires the run to stop now, or None.

    Example: with a budget of 10 USD and a reserve of 0.40 USD, the run is stopped at 9.60 USD.
    """
    num_failed, num_processed = situation.num_failed_rows, situation.num_processed_rows
    if limits.max_failed_rows is not None and limits.max_failed_rows.is_exceeded(num_failed, num_processed):
        return ReachedLimit(
            limit="failed_rows",
            message=f"{num_failed} of {num_processed} rows are dead letters, more than --max-failed-rows "
            f"{limits.max_failed_rows}",
        )
    if limits.budget_usd is not None and situation.spent_usd + limits.reserve_usd >= limits.budget_usd:
        spent, reserve = format_usd(situation.spent_usd), format_usd(limits.reserve_usd)
        return ReachedLimit(
            limit="budget",
            message=f"the budget of {format_usd(limits.budget_usd)} is reached: {spent} spent, and shutting the run "
            f"down may cost {reserve}",
        )
    if limits.deadline_at is not None and situation.now + limits.reserve_s >= limits.deadline_at:
        deadline = datetime.datetime.fromtimestamp(limits.deadline_at).astimezone()
        return ReachedLimit(
            limit="deadline",
            message=f"the deadline {deadline:%Y-%m-%d %H:%M:%S %z} is near: shutdown may take {limits.reserve_s:g} s",
        )
    return None


def parse_deadline(text: str, now: datetime.datetime) -> float | None:
    """Parse a deadline into Unix seconds; raises ValueError if the text is invalid or the time too far in the future.

    A time of day means its next occurrence; a duration counts from `now`. A local time has the UTC offset of its
    own date. If clocks show that time twice, the first future moment is used; if a clock change skips it, it is shifted
    by the change. A deadline without a time zone uses the zone of `now`, or of this machine.
    """
    text = text.strip()
    if text.lower() == "none":
        return None
    if text and (match := _DURATION.fullmatch(text)):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return _require_formattable(now.timestamp() + ((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if re.fullmatch(r"\d{1,2}:\d\d(:\d\d)?", text):
        time_of_day = datetime.time.fromisoformat(text.zfill(5 if text.count(":") == 1 else 8))
        today = datetime.datetime.combine(now.date(), time_of_day, now.tzinfo)
        next_days = (today + datetime.timedelta(days=day) for day in range(3))
        return next(moment for day in next_days for moment in _moments(day) if moment > now.timestamp())
    try:
        deadline = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(_DEADLINE_FORMS) from error
    try:
        moments = _moments(deadline if deadline.tzinfo else deadline.replace(tzinfo=now.tzinfo))
    except (OverflowError, ValueError, OSError) as error:
        raise ValueError(_TOO_FAR) from error
    return _require_formattable(next((moment for moment in moments if moment > now.timestamp()), moments[0]))


def _moments(local_time: datetime.datetime) -> list[float]:
    """Return the moments of a local time, in Unix seconds: two if clocks are set back and show the time twice."""
    first, second = (local_time.replace(fold=fold).timestamp() for fold in (0, 1))
    return [first, second] if first < second else [first]  # in a skipped hour, the second is earlier


def _require_formattable(moment: float) -> float:
    """Return the moment, or raise ValueError if this machine cannot format it."""
    try:
        datetime.datetime.fromtimestamp(moment).astimezone()
    except (OverflowError, ValueError, OSError) as error:
        raise ValueError(_TOO_FAR) from error
    return moment
