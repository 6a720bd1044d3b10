"""One ledger: what a run used, times what it costs, over what it delivered.

Pure: records and a price in, an account out. It knows no files and no formats.

Every device-second an engine lived belongs to one share: load, compile, busy (it became committed output),
idle, or lost (killed engines, units done twice). Only committed tokens are output; all seconds are paid.

Worked by hand: an engine on 2 vCPUs at 0.10 USD per vCPU-hour lives 100 s: 20 load, 10 compile, 60 busy, 10
idle. One unit commits 1,500 tokens with 50 s. Device-seconds: 40 load, 20 compile, 100 busy, 20 idle, 20
lost; 200 in all, 200 / 3600 * 0.10 = 0.00556 USD; 1,500 / 0.00556 = 270,000 tokens per USD.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, pairwise

from peagle.economics.prices import Price
from peagle.economics.usage import EngineSession, UnitUsage
from peagle.errors import PeagleError, PriceError
from peagle.speculation import SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """A total and where it went; device-seconds or USD alike."""

    load: float = 0.0
    compile: float = 0.0
    busy: float = 0.0
    idle: float = 0.0
    lost: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all shares."""
        return self.load + self.compile + self.busy + self.idle + self.lost

    def times(self, factor: float) -> "Shares":
        """Every share multiplied: device-seconds become USD."""
        return Shares(**{name: value * factor for name, value in asdict(self).items()})

    def __add__(self, other: "Shares") -> "Shares":
        return Shares(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The output of a run and its cost.

    Args:
        device_s: device-seconds by share (one accelerator or vCPU for one second).
        num_output_tokens: committed tokens only.
        num_lost_tokens: tokens that were generated and never committed.
        busy_s: seconds that engines were busy with committed work, summed over engines; not times devices.
        wall_s: seconds in which at least one engine lived. A pause between two attempts is not counted.
        num_sessions: engine processes, restarted ones counted again.
        num_unended_sessions: those whose last heartbeat did not say that they ended: killed, or still alive.
    """

    price: Price
    device_s: Shares
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
    def usd(self) -> Shares:
        """Dollars by share."""
        return self.device_s.times(self.price.usd_per_device_s)

    @property
    def total_usd(self) -> float:
        """Dollars for every second the engines lived."""
        return self.usd.total

    @property
    def tokens_per_usd(self) -> float | None:
        """Committed output tokens over all dollars; None while there are none of either."""
        return self.num_output_tokens / self.total_usd if self.total_usd and self.num_output_tokens else None

    @property
    def usd_per_million_tokens(self) -> float | None:
        """The same the other way round."""
        return 1e6 / self.tokens_per_usd if self.tokens_per_usd else None

    @property
    def tokens_per_busy_usd(self) -> float | None:
        """Committed tokens per dollar of busy time.

        `tokens_per_usd` nears it as a run grows longer.
        """
        return self.num_output_tokens / self.usd.busy if self.usd.busy else None

    @property
    def output_tokens_per_s(self) -> float | None:
        """Committed tokens per busy second, without loading and idling."""
        return self.num_output_tokens / self.busy_s if self.busy_s else None

    @property
    def output_tokens_per_wall_s(self) -> float | None:
        """Committed tokens per second of the whole run, everything included."""
        return self.num_output_tokens / self.wall_s if self.wall_s else None

    def to_dict(self) -> dict[str, object]:
        """Every figure, the derived ones too, ready for JSON."""
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
    """Put units, sessions and a price together.

    A committed unit is never lost: where a killed session's last heartbeat is older than its last commit, the
    units' busy seconds count and the session's total grows by the difference.

    Args:
        units: gone through once, before `sessions`.

    Raises:
        PeagleError: a unit names no session of the ledger, or a session is there twice.
        PriceError: the price is for another kind of device than the engines held.
    """
    num_units, work_of = _work_by_session(units)
    sessions = list(sessions)
    require_sessions(sessions, work_of)
    work = list(work_of.values())
    require_devices(sessions, price)
    return Account(
        price=price,
        device_s=sum((_shares(one, work_of.get(one.session_id)) for one in sessions), Shares()),
        num_units=num_units,
        num_rows=sum(one.num_rows for one in work),
        num_failed_rows=sum(one.num_failed_rows for one in work),
        num_prompt_tokens=sum(one.num_prompt_tokens for one in work),
        num_cached_tokens=sum(one.num_cached_tokens for one in work),
        num_output_tokens=sum(one.num_output_tokens for one in work),
        num_lost_tokens=sum(_num_lost_tokens(one, work_of.get(one.session_id)) for one in sessions),
        busy_s=sum(one.busy_s for one in work),
        wall_s=_wall_s(sessions, work_of),
        num_sessions=len(sessions),
        num_unended_sessions=sum(not session.ended for session in sessions),
        speculation=sum((one.speculation for one in work), SpeculationStats.empty()),
    )


def _work_by_session(units: Iterable[UnitUsage]) -> tuple[int, dict[str, UnitUsage]]:
    """Number of units, and the sum of each session's.

    Units are not kept: a run may have more than memory holds.
    """
    num_units, work_of = 0, dict[str, UnitUsage]()
    for unit in units:
        num_units += 1
        before = work_of.get(unit.session_id)
        work_of[unit.session_id] = unit if before is None else before + unit
    return num_units, work_of


def require_sessions(sessions: Collection[EngineSession], committing: Iterable[str]) -> None:
    """Require every session that committed units, each once.

    Args:
        committing: ids of the sessions that units name.

    Raises:
        PeagleError: a unit names no session of the ledger, or a session is there twice.
    """
    known = {session.session_id for session in sessions}
    if len(known) < len(sessions):
        raise PeagleError("the ledger holds the same engine session twice, and would be paid twice")
    if orphans := sorted(set(committing) - known):
        raise PeagleError(
            f"units were committed by engine sessions that are not in the ledger: {', '.join(orphans)}",
            hint="without ledger/session-<id>.parquet of each their cost is unknown; restore these files",
        )


def require_devices(sessions: Iterable[EngineSession], price: Price) -> None:
    """Require engines on the devices that the price is for.

    Raises:
        PriceError: one held another kind.
    """
    for session in sessions:
        if session.device != price.device:
            raise PriceError(
                f"the price of {price.instance_type} is per {price.device}, but an engine on "
                f"{session.hostname} ran on {session.num_devices} x {session.device}",
                hint="name the instance type it ran on with --instance-type",
            )


def _shares(session: EngineSession, work: UnitUsage | None) -> Shares:
    (shares,) = shares_by_period([session], [work.busy_s if work else 0.0])
    return shares.times(session.num_devices)


def shares_by_period(ends: Sequence[EngineSession], committed_s: Sequence[float]) -> list[Shares]:
    """An engine's seconds in consecutive periods of its life, by share.

    Work counts when it is committed: seconds of what is under way at the end of a period belong to the period in which
    it is committed, or is seen to be lost. So no share is negative, and periods add up to the life however it is cut.

    Worked by hand: a day ends 10 s into a unit that takes 30 s and is committed the day after. Busy seconds at the two
    ends are 10 and 30, committed are 0 and 30: the first day has none of them, the second has all, and none is lost.

    Args:
        ends: the session as it stood at the end of each period.
        committed_s: busy seconds of the work that was committed in each.
    """
    total_s = accumulate(committed_s)
    lost_s = _for_good([max(end.busy_s - s, 0.0) for end, s in zip(ends, total_s, strict=True)])
    # While an engine starts all its seconds are load; when it is up, some of them turn out to be compile.
    load_s = _for_good([end.load_s for end in ends])
    compile_s = [end.compile_s + end.load_s - s for end, s in zip(ends, load_s, strict=True)]
    idle_s = [end.idle_s for end in ends]
    parts = zip(*map(_differences, (load_s, compile_s, idle_s, lost_s)), committed_s, strict=True)
    return [
        Shares(load=load, compile=compiled, busy=busy, idle=idle, lost=lost)
        for load, compiled, idle, lost, busy in parts
    ]


def _for_good(totals: Sequence[float]) -> list[float]:
    """The part of each running total that no later one takes back."""
    return list(accumulate(reversed(totals), min))[::-1]


def _differences(totals: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise([0.0, *totals])]


def _num_lost_tokens(session: EngineSession, work: UnitUsage | None) -> int:
    return max(session.num_output_tokens - (work.num_output_tokens if work else 0), 0)


def _wall_s(sessions: list[EngineSession], work_of: Mapping[str, UnitUsage]) -> float:
    """The length of the union of the sessions' lives."""
    wall_s, seen_until = 0.0, float("-inf")
    for session in sorted(sessions, key=lambda one: one.started_at):
        work = work_of.get(session.session_id)
        end = max(session.last_seen_at, work.finished_at if work else session.last_seen_at)
        wall_s += max(end - max(session.started_at, seen_until), 0.0)
        seen_until = max(seen_until, end)
    return wall_s
