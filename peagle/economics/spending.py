"""Spending by day: charges from the ledgers of runs and endpoints.

Every dollar of an engine's life is in exactly one charge: attributed (work that was committed, or billed to a request),
loading, idle or lost. Only attributed charges belong to a key. Work counts on the UTC day on which it is committed
(`totals_by_period`). Cluster nodes without engines are charged at a stated price while any engine is live.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, date, datetime
from typing import Self

from peagle.economics.account import totals_by_period
from peagle.economics.baseline import Baseline
from peagle.economics.savings import Savings, spot_savings, work_savings
from peagle.economics.tags import NO_TAGS
from peagle.economics.timeline import merge_spans
from peagle.economics.usage import WORK_COUNTS, EngineSession, Work

DAY_S = 86_400
_EPOCH = date(1970, 1, 1).toordinal()


def day_of(moment: float) -> int:
    """Return the UTC day of a Unix time, counted from 1970-01-01.

    >>> day_of(86_399.9), day_of(86_400)
    (0, 1)
    """
    return math.floor(moment / DAY_S)


def day_number(day: date) -> int:
    return day.toordinal() - _EPOCH


def day_text(day: int) -> str:
    """Return a day in ISO 8601.

    >>> day_text(0)
    '1970-01-01'
    """
    return date.fromordinal(day + _EPOCH).isoformat()


def today() -> date:
    return datetime.now(UTC).date()


@dataclass(frozen=True, slots=True)
class Days:
    """A range of days, both ends included; None is unbounded."""

    first: int | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        if self.first is not None and self.last is not None and self.last < self.first:
            raise ValueError(f"the end {day_text(self.last)} is before the start {day_text(self.first)}")

    def __contains__(self, day: int) -> bool:
        return self.overlaps(day, day)

    def overlaps(self, first: int, last: int) -> bool:
        return (self.first is None or last >= self.first) and (self.last is None or first <= self.last)


@dataclass(frozen=True, slots=True)
class SpendingGroup:
    """What work is grouped by. The key is empty for bulk runs and overhead."""

    day: int
    session_id: str
    key: str
    model: str
    drafter: str | None
    tags: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spend:
    """Dollars by kind, and the work they paid for. Add them with `+`.

    `is_priced` is False if some engine time has no price; then only `attributed_usd` is known.
    """

    attributed_usd: float = 0.0
    loading_usd: float = 0.0
    idle_usd: float = 0.0
    lost_usd: float = 0.0
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    savings: Savings = field(default_factory=Savings)
    is_priced: bool = True

    @classmethod
    def of(cls, work: Work, savings: Savings) -> Self:
        return cls(attributed_usd=work.usd, savings=savings, **{name: getattr(work, name) for name in WORK_COUNTS})

    def __add__(self, other: Self) -> Self:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED_FIELDS}
        return type(self)(**sums, is_priced=self.is_priced and other.is_priced)


_SUMMED_FIELDS = tuple(attribute.name for attribute in fields(Spend) if attribute.name != "is_priced")
KINDS = ("attributed", "loading", "idle", "lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The ledger of a run or an endpoint.

    The batches of an endpoint run on separate engines, so their `work` has no session here. `session_at` returns a
    session as it was at a Unix time.
    """

    run: str
    sessions: Sequence[EngineSession]
    work: Mapping[SpendingGroup, Work]
    session_at: Callable[[EngineSession, float], EngineSession]


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """Spending of one engine session on one day, for one API key or, with an empty key, for none.

    The drafter is "none" without a drafter, and empty if the model is unknown. Values of an unknown price are empty
    or 0.
    """

    day: int
    run: str
    instance: str = ""
    provider: str = ""
    region: str = ""
    market: str
    usd_per_device_s: float
    model: str = ""
    drafter: str = ""
    key: str = ""
    tags: str = NO_TAGS
    spend: Spend


def charges(ledger: Ledger, days: Days) -> Iterator[Charge]:
    """Yield the charges of these days. Consecutive periods add up to the charges of all days."""
    work_by_session: defaultdict[str, list[tuple[SpendingGroup, Work]]] = defaultdict(list)
    for group, work in ledger.work.items():
        work_by_session[group.session_id].append((group, work))
    for session in ledger.sessions:
        first_day = day_of(session.started_at)
        committed = [
            (replace(group, day=max(group.day, first_day)), work)
            for group, work in work_by_session.pop(session.session_id, [])
        ]
        last_day = max([day_of(session.last_seen_at), *(group.day for group, _ in committed)])
        if not days.overlaps(first_day, last_day):
            continue
        attributed = [(group.day, work.usd) for group, work in committed]
        spends = [(group, _work_spend(session, group, work)) for group, work in committed]
        spends += _overheads(session, ledger.session_at, range(first_day, last_day + 1), attributed)
        yield from (_charge(ledger.run, session, group, spend) for group, spend in spends if group.day in days)
    for batch_work in work_by_session.values():
        spends = [(group, _work_spend(None, group, work)) for group, work in batch_work]
        yield from (_charge(ledger.run, None, group, spend) for group, spend in spends if group.day in days)


def _work_spend(session: EngineSession | None, group: SpendingGroup, work: Work) -> Spend:
    baseline = Baseline.from_text(session.baseline) if session else None
    savings = work_savings(work, has_drafter=group.drafter is not None, baseline=baseline)
    if session:
        savings += spot_savings(session, kept_usd=work.usd, lost_usd=0.0)
    return Spend.of(work, savings)


def _overheads(
    session: EngineSession,
    session_at: Callable[[EngineSession, float], EngineSession],
    days: range,
    attributed: Iterable[tuple[int, float]],
) -> Iterator[tuple[SpendingGroup, Spend]]:
    """Yield the loading, idle and lost cost of a session by day. `attributed` is its attributed dollars by day."""
    overhead_group = SpendingGroup(days.start, session.session_id, "", session.model, session.drafter, session.tags)
    usd_per_s = session.usd_per_device_s * session.num_devices
    if not usd_per_s:
        yield from ((replace(overhead_group, day=day), Spend(is_priced=False)) for day in days)
        return
    committed_s = [0.0] * len(days)
    for day, usd in attributed:
        committed_s[day - days.start] += usd / usd_per_s
    midnights = [(day + 1) * DAY_S for day in days]
    sessions_at_midnight = [session_at(session, end) if end < session.last_seen_at else session for end in midnights]
    for day, times in zip(days, totals_by_period(sessions_at_midnight, committed_s), strict=True):
        usd_by_state = times.scaled(usd_per_s)
        loading_usd = usd_by_state.load + usd_by_state.compile
        spend = Spend(
            loading_usd=loading_usd,
            idle_usd=usd_by_state.idle,
            lost_usd=usd_by_state.lost,
            savings=spot_savings(session, kept_usd=loading_usd + usd_by_state.idle, lost_usd=usd_by_state.lost),
        )
        if spend != Spend():
            yield replace(overhead_group, day=day), spend


def _charge(run: str, session: EngineSession | None, group: SpendingGroup, spend: Spend) -> Charge:
    return Charge(
        day=group.day,
        run=run,
        instance=session.instance_type if session else "",
        **{name: getattr(session, name, "") for name in ("provider", "region", "market")},
        usd_per_device_s=session.usd_per_device_s if session else 0.0,
        model=group.model,
        drafter=(group.drafter or "none") if group.model else "",
        key=group.key,
        tags=group.tags,
        spend=spend,
    )


NODES = "head and CPU nodes"  # stands for the run in `node_charges`


def node_charges(sessions: Iterable[EngineSession], days: Days, usd_per_hour: float) -> Iterator[Charge]:
    """Yield the charges for cluster nodes by day, for the hours with a live engine."""
    usd_per_s = usd_per_hour / 3600
    template = Charge(day=0, run=NODES, market="fixed", usd_per_device_s=usd_per_s, spend=Spend())
    for begin, end in merge_spans(((session.started_at, session.last_seen_at) for session in sessions), gap=0.0):
        while begin < end:
            day = day_of(begin)
            end_of_day = min((day + 1.0) * DAY_S, end)
            if day in days:
                yield replace(template, day=day, spend=Spend(idle_usd=(end_of_day - begin) * usd_per_s))
            begin = end_of_day
