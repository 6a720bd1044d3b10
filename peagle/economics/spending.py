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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, date, datetime
from typing import Self

from peagle.economics.account import shares_by_period
from peagle.economics.baseline import Baseline
from peagle.economics.gain import Gain, gain_of, spot_gain
from peagle.economics.usage import EngineSession
from peagle.economics.work import COUNTS, Work

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


def today() -> date:
    """This day, in UTC."""
    return datetime.now(UTC).date()


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
        return self.overlap(day, day)

    def overlap(self, first: int, last: int) -> bool:
        """Whether one of these days is among them."""
        return (self.first is None or last >= self.first) and (self.last is None or first <= self.last)


@dataclass(frozen=True, slots=True)
class SpendingGroup:
    """Spending that is never told apart: its day, its engine and its payer.

    Attributes:
        key: that pays; empty for a bulk run and for overhead.
        drafter: None for none.
        tags: as JSON.
    """

    day: int
    session_id: str
    key: str
    model: str
    drafter: str | None
    tags: str


_NO_GAIN = Gain()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spend:
    """Dollars by kind, and what they bought; they add up with `+`.

    Attributes:
        gain: what a drafter and spot machines saved of it.
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
    gain: Gain = _NO_GAIN
    is_priced: bool = True

    @classmethod
    def of(cls, work: Work, gain: Gain) -> Self:
        """The spending on committed work."""
        return cls(attributed_usd=work.usd, gain=gain, **{name: getattr(work, name) for name in COUNTS})

    def __add__(self, other: Self) -> Self:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _ADDED}
        return type(self)(**sums, is_priced=self.is_priced and other.is_priced)


_ADDED = tuple(field.name for field in fields(Spend) if field.name != "is_priced")
KINDS = ("attributed", "loading", "idle", "lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The ledger of a run or of an endpoint.

    Attributes:
        run: its name.
        sessions: as of their last heartbeats.
        work: that was committed, by whose it is. A batch of an endpoint has engines of its own and no session here.
        then: a session as it stood at a Unix time of its life.
    """

    run: str
    sessions: Sequence[EngineSession]
    work: Mapping[SpendingGroup, Work]
    then: Callable[[EngineSession, float], EngineSession]


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """Spending of one engine process on one day.

    Attributes:
        key: that pays for it; empty where nobody's does.
        drafter: "none" for none; empty where no model is known.
        instance, provider, region, market, usd_per_device_s: of the price; empty and 0 where it is not known.
        tags: as JSON.
    """

    day: int
    run: str
    instance: str
    provider: str
    region: str
    market: str
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
    work_of: defaultdict[str, list[tuple[SpendingGroup, Work]]] = defaultdict(list)
    for whose, work in ledger.work.items():
        work_of[whose.session_id].append((whose, work))
    for session in ledger.sessions:
        begins = day_of(session.started_at)
        own = [
            (replace(whose, day=max(whose.day, begins)), work) for whose, work in work_of.pop(session.session_id, [])
        ]
        ends = max([day_of(session.last_seen_at), *(whose.day for whose, _ in own)])
        if not days.overlap(begins, ends):
            continue
        paid = [(whose.day, work.usd) for whose, work in own]
        spends = [(whose, _on_work(session, whose, work)) for whose, work in own]
        spends += _overheads(session, ledger.then, range(begins, ends + 1), paid)
        yield from (_charge(ledger.run, session, whose, spend) for whose, spend in spends if whose.day in days)
    for rest in work_of.values():
        spends = [(whose, _on_work(None, whose, work)) for whose, work in rest]
        yield from (_charge(ledger.run, None, whose, spend) for whose, spend in spends if whose.day in days)


def _on_work(session: EngineSession | None, whose: SpendingGroup, work: Work) -> Spend:
    """The spending on committed work, with what was saved of it."""
    baseline = Baseline.from_text(session.baseline) if session else None
    gain = gain_of(work, has_drafter=whose.drafter is not None, baseline=baseline)
    if session:
        gain += spot_gain(session, kept_usd=work.usd, lost_usd=0.0)
    return Spend.of(work, gain)


def _overheads(
    session: EngineSession,
    then: Callable[[EngineSession, float], EngineSession],
    days: range,
    paid: Iterable[tuple[int, float]],
) -> Iterator[tuple[SpendingGroup, Spend]]:
    """The part of an engine's cost that no work pays for, by day.

    Args:
        days: all days of its life, and until its last work was committed.
        paid: days of committed work, and its dollars.
    """
    nobody = SpendingGroup(days.start, session.session_id, "", session.model, session.drafter, session.tags)
    usd_per_s = session.usd_per_device_s * session.num_devices
    if not usd_per_s:
        yield from ((replace(nobody, day=day), Spend(is_priced=False)) for day in days)
        return
    committed_s = [0.0] * len(days)
    for day, usd in paid:
        committed_s[day - days.start] += usd / usd_per_s
    midnights = [(day + 1) * DAY_S for day in days]
    states = [then(session, end) if end < session.last_seen_at else session for end in midnights]
    for day, seconds in zip(days, shares_by_period(states, committed_s), strict=True):
        by_kind = seconds.times(usd_per_s)
        loading_usd = by_kind.load + by_kind.compile
        spend = Spend(
            loading_usd=loading_usd,
            idle_usd=by_kind.idle,
            lost_usd=by_kind.lost,
            gain=spot_gain(session, kept_usd=loading_usd + by_kind.idle, lost_usd=by_kind.lost),
        )
        if spend != Spend():
            yield replace(nobody, day=day), spend


def _charge(run: str, session: EngineSession | None, whose: SpendingGroup, spend: Spend) -> Charge:
    return Charge(
        day=whose.day,
        run=run,
        instance=session.instance_type if session else "",
        provider=session.provider if session else "",
        region=session.region if session else "",
        market=session.market if session else "",
        usd_per_device_s=session.usd_per_device_s if session else 0.0,
        model=whose.model,
        drafter=(whose.drafter or "none") if whose.model else "",
        key=whose.key,
        tags=whose.tags,
        spend=spend,
    )
