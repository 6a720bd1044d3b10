"""The limits of a run: dollars, a time, dead letters; and whether one is reached.

Pure functions of what is passed in: it reads no clock, no file and no ledger.
"""

import datetime
import math
import re
from dataclasses import dataclass
from typing import Literal

MIN_ROWS_FOR_SHARE = 100  # a share of fewer rows says little: one bad row of the first two is no 50 %

_DURATION = re.compile(r"(?=\d)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.IGNORECASE)
_TOO_FAR = "the time is too far in the future"
_DEADLINE_FORMS = "a time of day (18:30), a timestamp (2026-11-30T18:30:00+01:00), a duration (2h30m) or none"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxFailedRows:
    """The most dead letters of a run: a number, or a share of the finished rows."""

    count: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str) -> "MaxFailedRows":
        """From `N` or `P%`.

        Raises:
            ValueError: it is neither.
        """
        match = re.fullmatch(r"(\d+(?:\.\d+)?)%|(\d+)", text.strip())
        if match is None or (match[1] and float(match[1]) > 100):
            raise ValueError("a number of rows or a share such as 5%")
        return cls(share=float(match[1]) / 100) if match[1] else cls(count=int(match[2]))

    def is_passed(self, num_failed_rows: int, num_done_rows: int) -> bool:
        """Whether too many of the rows that are done have failed."""
        if self.count is not None:
            return num_failed_rows > self.count
        assert self.share is not None, "one of the two is set"
        return num_done_rows >= MIN_ROWS_FOR_SHARE and num_failed_rows > self.share * num_done_rows

    def __str__(self) -> str:
        return str(self.count) if self.share is None else f"{100 * self.share:g}%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a run; None is no limit.

    Attributes:
        deadline_at: by when everything must have ended, in Unix seconds.
        reserve_s: what ending takes at most, from the request to stop to engines that are abandoned.
        reserve_usd: what that costs at most; a stop is asked for while it is left.
    """

    budget_usd: float | None = None
    deadline_at: float | None = None
    max_failed_rows: MaxFailedRows | None = None
    reserve_s: float = 0.0
    reserve_usd: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The situation of a run: time, total cost, and finished and failed rows."""

    now: float
    spent_usd: float
    num_done_rows: int
    num_failed_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A limit that is reached, in words."""

    limit: Literal["budget", "deadline", "failed_rows"]
    message: str


def reached(limits: Limits, situation: Situation) -> Reached | None:
    """The limit for which the run has to stop now; None while it may go on.

    Example: a budget of 10 USD and an end that may cost 0.40 USD: the stop is asked for at 9.60 USD.
    """
    failed, done = situation.num_failed_rows, situation.num_done_rows
    if limits.max_failed_rows is not None and limits.max_failed_rows.is_passed(failed, done):
        return Reached(
            limit="failed_rows",
            message=f"{failed} of {done} rows are dead letters, more than --max-failed-rows {limits.max_failed_rows}",
        )
    if limits.budget_usd is not None and situation.spent_usd + limits.reserve_usd >= limits.budget_usd:
        return Reached(
            limit="budget",
            message=f"the budget of {dollars(limits.budget_usd)} is reached: {dollars(situation.spent_usd)} are spent, "
            f"and ending may cost {dollars(limits.reserve_usd)}",
        )
    if limits.deadline_at is not None and situation.now + limits.reserve_s >= limits.deadline_at:
        at = datetime.datetime.fromtimestamp(limits.deadline_at).astimezone()
        return Reached(
            limit="deadline",
            message=f"the deadline {at:%Y-%m-%d %H:%M:%S %z} is near: ending may take {limits.reserve_s:g} s",
        )
    return None


def parse_deadline(text: str, now: datetime.datetime) -> float | None:
    """Parse a deadline into Unix seconds.

    A time of day is the next such moment, a duration counts from `now`.

    A local time is taken with the offset of its own day. One in an hour that comes twice is the first that lies ahead;
    one that the clocks skip is as long after the change as it says.

    Args:
        now: its time zone, this machine's where it names none, is that of a deadline that names none.

    Raises:
        ValueError: it is none of the forms.
    """
    text = text.strip()
    if text.lower() == "none":
        return None
    if text and (match := _DURATION.fullmatch(text)):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return _shown(now.timestamp() + ((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if re.fullmatch(r"\d{1,2}:\d\d(:\d\d)?", text):
        time_of_day = datetime.time.fromisoformat(text.zfill(5 if text.count(":") == 1 else 8))
        today = datetime.datetime.combine(now.date(), time_of_day, now.tzinfo)
        days_on = (today + datetime.timedelta(days=day) for day in range(3))
        return next(moment for day in days_on for moment in _moments(day) if moment > now.timestamp())
    try:
        at = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(_DEADLINE_FORMS) from error
    try:
        moments = _moments(at if at.tzinfo else at.replace(tzinfo=now.tzinfo))
    except (OverflowError, ValueError, OSError) as error:
        raise ValueError(_TOO_FAR) from error
    return _shown(next((moment for moment in moments if moment > now.timestamp()), moments[0]))


def _moments(at: datetime.datetime) -> list[float]:
    """A local time in Unix seconds: once, or twice where the clocks go back over it."""
    first, second = (at.replace(fold=fold).timestamp() for fold in (0, 1))
    return [first, second] if first < second else [first]  # in an hour that is skipped, the second lies before


def _shown(moment: float) -> float:
    """The moment, which can be shown in this machine's time zone."""
    try:
        datetime.datetime.fromtimestamp(moment).astimezone()
    except (OverflowError, ValueError, OSError) as error:
        raise ValueError(_TOO_FAR) from error
    return moment


def dollars(usd: float) -> str:
    """An amount, with the digits that matter.

    >>> dollars(12.5), dollars(0.00042)
    ('$12.50', '$0.00042')
    """
    return f"${usd:.{2 if usd >= 1 or usd == 0 else 1 - math.floor(math.log10(usd))}f}"
