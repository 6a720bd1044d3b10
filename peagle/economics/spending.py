"""Spending by day: work that was paid for, loading and idling, losses.

    ledger of a run or an endpoint -> charges, each of one day, payer and engine process -> sums (`statement.py`)

Pure: records in, charges out. Every dollar of an engine's life is in exactly one charge:

    attributed     work that was committed, or that a request was billed for
    loading, idle  overhead: the engine starts, or has nothing to do; it belongs to no key
    lost           work that was never committed, or billed to nobody

Days are UTC's. Work counts on the day on which it is committed, with all its seconds (`shares_by_period`).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, date, datetime
from typing import Self

from peagle.economics.account import shares_by_period
from peagle.economics.usage import EngineSession, UnitUsage

DAY_S = 86_400
_EPOCH = date(1970, 1, 1).toordinal()


def day_of(moment: float) -> int:
    """The UTC day of a Unix time, counted from 1970-01-01.

    >>> day_of(86_399.9), day_of(86_400)
    (0, 1)
    """
    return math.floor(moment / DAY_S)


def day_number(day: date) -> int:
    """The same of a date."""
    return day.toordinal() - _EPOCH


def day_text(day: int) -> str:
    """A day as ISO 8601 writes it.

    >>> day_text(0)
    '1970-01-01'
    """
    return date.fromordinal(day + _EPOCH).isoformat()


def today() -> int:
    """This day, in UTC."""
    return day_of(datetime.now(UTC).timestamp())


@dataclass(frozen=True, slots=True)
class Days:
    """The days from one to another, both included; None is without that end.

    Raises:
        ValueError: the last one is before the first.
    """

    first: int | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        if self.first is not None and self.last is not None and self.last < self.first:
            raise ValueError(f"it ends on {day_text(self.last)}, before it begins on {day_text(self.first)}")

    def __contains__(self, day: int) -> bool:
        return (self.first is None or day >= self.first) and (self.last is None or day <= self.last)


@dataclass(frozen=True, slots=True)
class Whose:
    """Work that is never told apart.

    Attributes:
        key: that pays; empty for a bulk run.
        drafter: None for none.
        tags: as JSON.
    """

    day: int
    session_id: str
    key: str
    model: str
    drafter: str | None
    tags: str


@dataclass(slots=True)
class Work:
    """Counts and dollars of committed work."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    usd: float = 0.0

    @classmethod
    def of(cls, usage: UnitUsage, usd: float) -> Self:
        """The work of a unit or of requests, and what it is paid."""
        return cls(
            num_requests=usage.num_rows + usage.num_failed_rows,
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            num_output_tokens=usage.num_output_tokens,
            usd=usd,
        )

    def add(self, other: "Work") -> None:
        """That of `other` too."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The ledger of a run or of an endpoint.

    Attributes:
        run: its name.
        sessions: as of their last heartbeats.
        work: by whose it is. A batch of an endpoint has engines of its own and no session here.
        then: a session as it stood at a Unix time of its life.
    """

    run: str
    sessions: Sequence[EngineSession]
    work: Mapping[Whose, Work]
    then: Callable[[EngineSession, float], EngineSession]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spend:
    """Dollars by kind, and what they bought; they add up with `+`.

    Attributes:
        is_priced: False where seconds without a price are in it: then all but `attributed_usd` is unknown.
    """

    attributed_usd: float = 0.0
    loading_usd: float = 0.0
    idle_usd: float = 0.0
    lost_usd: float = 0.0
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    is_priced: bool = True

    def __add__(self, other: Self) -> Self:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _ADDED}
        return type(self)(**sums, is_priced=self.is_priced and other.is_priced)


_ADDED = tuple(field.name for field in fields(Spend) if field.name != "is_priced")
KINDS = ("attributed", "loading", "idle", "lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """Spending of one engine process on one day.

    Attributes:
        key: that pays for it; empty where nobody's does.
        drafter: "none" for none.
        instance, provider, region, usd_per_device_s: of the price; empty and 0 where it is not known.
        tags: as JSON.
    """

    day: int
    run: str
    instance: str
    provider: str
    region: str
    usd_per_device_s: float
    model: str
    drafter: str
    key: str
    tags: str
    spend: Spend


def charges(ledger: Ledger, days: Days) -> Iterator[Charge]:
    """The charges of these days.

    The charges of all days are the same however they are cut into periods.
    """
    work_of: defaultdict[str, list[tuple[Whose, Work]]] = defaultdict(list)
    for whose, work in ledger.work.items():
        work_of[whose.session_id].append((whose, work))
    for session in ledger.sessions:
        for charge in _of_session(ledger, session, work_of.pop(session.session_id, [])):
            if charge.day in days:
                yield charge
    for rest in work_of.values():
        yield from (_attributed(ledger.run, None, whose.day, whose, work) for whose, work in rest if whose.day in days)


def _of_session(ledger: Ledger, session: EngineSession, works: list[tuple[Whose, Work]]) -> Iterator[Charge]:
    begins = day_of(session.started_at)
    dated = [(max(whose.day, begins), whose, work) for whose, work in works]
    ends = max([day_of(session.last_seen_at), *(day for day, _, _ in dated)])
    for day, whose, work in dated:
        yield _attributed(ledger.run, session, day, whose, work)
    usd_per_s = session.usd_per_device_s * session.num_devices
    if not usd_per_s:
        yield _overhead(ledger.run, session, begins, Spend(is_priced=False))
        return
    committed_s = [0.0] * (ends - begins + 1)
    for day, _, work in dated:
        committed_s[day - begins] += work.usd / usd_per_s
    midnights = [(day + 1) * DAY_S for day in range(begins, ends + 1)]
    states = [ledger.then(session, end) if end < session.last_seen_at else session for end in midnights]
    for day, seconds in enumerate(shares_by_period(states, committed_s), start=begins):
        usd = seconds.times(usd_per_s)
        spend = Spend(loading_usd=usd.load + usd.compile, idle_usd=usd.idle, lost_usd=usd.lost)
        if spend != Spend():
            yield _overhead(ledger.run, session, day, spend)


def _attributed(run: str, session: EngineSession | None, day: int, whose: Whose, work: Work) -> Charge:
    return Charge(
        day=day,
        run=run,
        instance=session.instance_type if session else "",
        provider=session.provider if session else "",
        region=session.region if session else "",
        usd_per_device_s=session.usd_per_device_s if session else 0.0,
        model=whose.model,
        drafter=whose.drafter or "none",
        key=whose.key,
        tags=whose.tags,
        spend=Spend(
            attributed_usd=work.usd,
            num_requests=work.num_requests,
            num_prompt_tokens=work.num_prompt_tokens,
            num_cached_tokens=work.num_cached_tokens,
            num_output_tokens=work.num_output_tokens,
        ),
    )


def _overhead(run: str, session: EngineSession, day: int, spend: Spend) -> Charge:
    return Charge(
        day=day,
        run=run,
        instance=session.instance_type,
        provider=session.provider,
        region=session.region,
        usd_per_device_s=session.usd_per_device_s,
        model=session.model,
        drafter=(session.drafter or "none") if session.model else "",
        key="",
        tags=session.tags,
        spend=spend,
    )
