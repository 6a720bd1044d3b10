"""The account of a run: the cost of its engines, by use of their time, and the output that they committed.

Every device-second of an engine has one use: load, compile, busy (produced committed output), idle, or lost
(work that was not committed). All seconds cost money; only committed tokens are output.

Example: an engine on 2 vCPUs at 0.10 USD per vCPU-hour runs for 100 s: 20 load, 10 compile, 60 busy, 10 idle. One unit
commits 1,500 tokens in 50 busy seconds. Device-seconds: 40 load, 20 compile, 100 busy, 20 idle, 20 lost; 200 in total.
The cost is 200 / 3600 * 0.10 = 0.00556 USD, and 1,500 / 0.00556 = 270,000 tokens per USD.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, pairwise

from peagle.economics.prices import Price
from peagle.economics.usage import UNIT_COUNTS, EngineSession, UnitUsage
from peagle.errors import PeagleError, PriceError
from peagle.speculation import SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalsByUse:
    """Seconds, device-seconds or USD by use."""

    load: float = 0.0
    compile: float = 0.0
    busy: float = 0.0
    idle: float = 0.0
    lost: float = 0.0

    @property
    def total(self) -> float:
        return self.load + self.compile + self.busy + self.idle + self.lost

    def scaled(self, factor: float) -> "TotalsByUse":
        return TotalsByUse(**{name: value * factor for name, value in asdict(self).items()})

    def __add__(self, other: "TotalsByUse") -> "TotalsByUse":
        return TotalsByUse(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The output of a run and its cost.

    Attributes:
        device_s: device-seconds by use; a device is an accelerator or a vCPU.
        num_lost_tokens: tokens that were generated but not committed.
        busy_s: committed busy seconds of all engines, not multiplied by devices.
        wall_s: seconds with at least one live engine; pauses between attempts do not count.
        num_unended_sessions: sessions without a final heartbeat: crashed, or still running.
    """

    price: Price
    device_s: TotalsByUse
    num_units: int
    num_rows: int
    num_failed_rows: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_lost_tokens: int
    busy_s: float
    wall_s: float
    num_sessions: int
    num_unended_sessions: int
    speculation: SpeculationStats

    @property
    def usd(self) -> TotalsByUse:
        return self.device_s.scaled(self.price.usd_per_device_s)

    @property
    def total_usd(self) -> float:
        return self.usd.total

    @property
    def tokens_per_usd(self) -> float | None:
        """Committed output tokens per dollar, or None if there are no tokens or no cost."""
        return self.num_output_tokens / self.total_usd if self.total_usd and self.num_output_tokens else None

    @property
    def usd_per_million_tokens(self) -> float | None:
        return 1e6 / self.tokens_per_usd if self.tokens_per_usd else None

    @property
    def tokens_per_busy_usd(self) -> float | None:
        """Committed tokens per dollar of busy time, which is the limit of `tokens_per_usd` in long runs."""
        return self.num_output_tokens / self.usd.busy if self.usd.busy else None

    @property
    def output_tokens_per_s(self) -> float | None:
        return self.num_output_tokens / self.busy_s if self.busy_s else None

    @property
    def output_tokens_per_wall_s(self) -> float | None:
        """Committed tokens per second with a live engine."""
        return self.num_output_tokens / self.wall_s if self.wall_s else None

    def to_dict(self) -> dict[str, object]:
        speculation = {
            **self.speculation.to_dict(),
            "num_accepted_tokens": self.speculation.num_accepted_tokens,
            "acceptance_length": self.speculation.acceptance_length,
            "acceptance_rates": list(self.speculation.acceptance_rates),
            "draft_acceptance_rate": self.speculation.draft_acceptance_rate,
        }
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "price": {**self.price.to_dict(), "usd_per_device_s": self.price.usd_per_device_s},
            "device_s": {**asdict(self.device_s), "total": self.device_s.total},
            "usd": {**asdict(self.usd), "total": self.total_usd},
            "tokens_per_usd": self.tokens_per_usd,
            "usd_per_million_tokens": self.usd_per_million_tokens,
            "tokens_per_busy_usd": self.tokens_per_busy_usd,
            "output_tokens_per_s": self.output_tokens_per_s,
            "output_tokens_per_wall_s": self.output_tokens_per_wall_s,
            "speculation": speculation,
        }


def account(units: Iterable[UnitUsage], sessions: Iterable[EngineSession], price: Price) -> Account:
    """Compute the account of a run.

    A committed unit is never lost. If a session crashed between a commit and its next heartbeat, the busy seconds of
    the committed units still count, and the session is extended to contain them.
    """
    num_units, usage_by_session = 0, dict[str, UnitUsage]()
    for unit in units:
        num_units += 1
        earlier_usage = usage_by_session.get(unit.session_id)
        usage_by_session[unit.session_id] = unit if earlier_usage is None else earlier_usage + unit
    sessions = list(sessions)
    require_sessions(sessions, usage_by_session)
    require_devices(sessions, price)
    device_s, num_lost_tokens = TotalsByUse(), 0
    for session in sessions:
        usage = usage_by_session.get(session.session_id)
        (seconds,) = totals_by_period([session], [usage.busy_s if usage else 0.0])
        device_s += seconds.scaled(session.num_devices)
        num_lost_tokens += max(session.num_output_tokens - (usage.num_output_tokens if usage else 0), 0)
    return Account(
        price=price,
        device_s=device_s,
        num_units=num_units,
        **{name: sum(getattr(usage, name) for usage in usage_by_session.values()) for name in UNIT_COUNTS},
        num_lost_tokens=num_lost_tokens,
        busy_s=sum(usage.busy_s for usage in usage_by_session.values()),
        wall_s=_wall_s(sessions, usage_by_session),
        num_sessions=len(sessions),
        num_unended_sessions=sum(not session.ended for session in sessions),
        speculation=sum((usage.speculation for usage in usage_by_session.values()), SpeculationStats.empty()),
    )


def require_sessions(sessions: Collection[EngineSession], committing_ids: Iterable[str]) -> None:
    session_ids = {session.session_id for session in sessions}
    if len(session_ids) < len(sessions):
        raise PeagleError("the ledger contains the same engine session twice")
    if orphans := sorted(set(committing_ids) - session_ids):
        raise PeagleError(
            f"units were committed by engine sessions that are not in the ledger: {', '.join(orphans)}",
            hint="restore ledger/session-<id>.parquet of each session",
        )


def require_devices(sessions: Iterable[EngineSession], price: Price) -> None:
    for session in sessions:
        if session.device != price.device:
            raise PriceError(
                f"the price of {price.instance_type} is per {price.device}, but an engine on "
                f"{session.hostname} ran on {session.num_devices} x {session.device}",
                hint="set --instance-type to the machine that the engine ran on",
            )


def totals_by_period(snapshots: Sequence[EngineSession], committed_s: Sequence[float]) -> list[TotalsByUse]:
    """Return the seconds of an engine in consecutive periods of its life, by use.

    Work counts when it is committed: busy seconds of an open unit belong to the period in which the unit is committed
    or lost. So no amount is negative, and the periods add up to the whole life.

    Example: a unit takes 30 s, of which 10 s are before midnight. At the ends of the two days, busy seconds are 10 and
    30, and committed seconds 0 and 30. All 30 s belong to the second day, and none are lost.

    Args:
        snapshots: the session at the end of each period.
        committed_s: busy seconds of the work committed in each period.
    """
    all_committed_s = accumulate(committed_s)
    lost_s = _suffix_minima(
        [max(at_end.busy_s - committed, 0.0) for at_end, committed in zip(snapshots, all_committed_s, strict=True)]
    )
    # All seconds count as load until an engine is ready; then some of them are reclassified as compile.
    load_s = _suffix_minima([at_end.load_s for at_end in snapshots])
    compile_s = [at_end.compile_s + at_end.load_s - load for at_end, load in zip(snapshots, load_s, strict=True)]
    idle_s = [at_end.idle_s for at_end in snapshots]
    parts = zip(*map(_differences, (load_s, compile_s, idle_s, lost_s)), committed_s, strict=True)
    return [
        TotalsByUse(load=load, compile=compiling, busy=busy, idle=idle, lost=lost)
        for load, compiling, idle, lost, busy in parts
    ]


def _suffix_minima(totals: Sequence[float]) -> list[float]:
    """Return, for each running total, the minimum of that total and all later totals."""
    return list(accumulate(reversed(totals), min))[::-1]


def _differences(totals: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise([0.0, *totals])]


def _wall_s(sessions: list[EngineSession], usage_by_session: Mapping[str, UnitUsage]) -> float:
    wall_s, covered_until = 0.0, float("-inf")
    for session in sorted(sessions, key=lambda session: session.started_at):
        usage = usage_by_session.get(session.session_id)
        end = max(session.last_seen_at, usage.finished_at if usage else session.last_seen_at)
        wall_s += max(end - max(session.started_at, covered_until), 0.0)
        covered_until = max(covered_until, end)
    return wall_s
