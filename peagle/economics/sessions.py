"""Engine sessions: facts about engines, interpolation between heartbeats, Parquet tables."""

from collections.abc import Collection, Iterable
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

from peagle.economics.baseline import Baseline
from peagle.economics.prices import Device, Price
from peagle.economics.tags import NO_TAGS
from peagle.economics.usage import VERSION, EngineSession, RequestUsage, UnitUsage, check_version
from peagle.errors import PeagleError

if TYPE_CHECKING:
    import pyarrow as pa

SESSION_KEY = b"peagle.session"
_STATES = ("load_s", "compile_s", "busy_s", "idle_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts about an engine that do not change during its life.

    Attributes:
        model: the name that clients or the run use.
        num_devices: its accelerators, or vCPUs.
        num_speculative_tokens: K; 0 without a drafter.
        usd_per_device_s: 0 if unknown.
        on_demand_usd_per_device_s: for spot machines; 0 if unknown.
        tags: as JSON (`tags.py`).
        baseline: measured step times as JSON (`baseline.py`); may be empty.
        price_basis: stated, detected or assumed; empty without a price.
        is_stand_in: the fake engine, whose speed and cost are meaningless.
    """

    model: str
    drafter: str | None
    num_devices: int
    device: Device
    usd_per_device_s: float = 0.0
    instance_type: str = ""
    provider: str = ""
    region: str = ""
    market: str = ""
    on_demand_usd_per_device_s: float = 0.0
    tags: str = NO_TAGS
    num_speculative_tokens: int = 0
    baseline: str = ""
    price_basis: str = ""
    is_stand_in: bool = False

    @classmethod
    def priced(
        cls,
        price: Price,
        *,
        model: str,
        drafter: str | None,
        num_devices: int,
        device: Device,
        tags: str,
        num_speculative_tokens: int | None,
        baseline: Baseline | None,
        is_stand_in: bool = False,
    ) -> Self:
        return cls(
            model=model,
            drafter=drafter,
            num_devices=num_devices,
            device=device,
            usd_per_device_s=price.usd_per_device_s,
            instance_type=price.instance_type,
            provider=price.provider,
            region=price.region,
            market=price.market,
            on_demand_usd_per_device_s=price.on_demand_usd_per_device_s,
            tags=tags,
            num_speculative_tokens=num_speculative_tokens or 0,
            baseline=baseline.to_text() if baseline else "",
            price_basis=price.basis or "",
            is_stand_in=is_stand_in,
        )

    def unbilled(self, request_id: str, usage: UnitUsage) -> RequestUsage:
        """Return the record of work that no key pays for."""
        return RequestUsage(
            request_id=request_id,
            key="",
            model=self.model,
            drafter=self.drafter,
            outcome="ok",
            ttft_s=None,
            usd=usage.busy_s * self.num_devices * self.usd_per_device_s,
            usage=usage,
            tags=self.tags,
        )


def session_since(session: EngineSession, earlier: EngineSession) -> EngineSession:
    """Return a session's usage after an earlier heartbeat, as if it had started then.

    All startup seconds are load until the engine is ready; then part of them becomes compile. The difference of both
    together is used, so none counts twice.
    """
    passed: dict[str, Any] = {name: max(0.0, getattr(session, name) - getattr(earlier, name)) for name in _STATES}
    start_s = max(0.0, session.load_s + session.compile_s - earlier.load_s - earlier.compile_s)
    passed["compile_s"] = min(passed["compile_s"], start_s)
    passed["load_s"] = start_s - passed["compile_s"]
    return replace(
        session,
        started_at=session.last_seen_at - sum(passed.values()),
        num_output_tokens=session.num_output_tokens - earlier.num_output_tokens,
        **passed,
    )


def session_at(moment: float, earlier: EngineSession | None, later: EngineSession) -> EngineSession:
    """Return a session at a Unix time between two heartbeats, by linear interpolation.

    Args:
        earlier: None if `later` is the first heartbeat.
    """
    started_at = earlier.last_seen_at if earlier else later.started_at
    share = (moment - started_at) / (later.last_seen_at - started_at)

    def interpolate(name: str) -> float:
        before = getattr(earlier, name) if earlier else 0
        return float((1 - share) * before + share * getattr(later, name))

    states: dict[str, Any] = {name: interpolate(name) for name in _STATES}
    return replace(
        later,
        last_seen_at=later.started_at + sum(states.values()),
        num_output_tokens=round(interpolate("num_output_tokens")),
        ended=False,
        **states,
    )


def start_warnings(sessions: Iterable[EngineSession]) -> list[str]:
    return list(dict.fromkeys(line for session in sessions for line in session.start_warnings.splitlines()))


def sessions_to_table(sessions: Iterable[EngineSession]) -> "pa.Table":
    import pyarrow as pa

    return pa.Table.from_pylist([asdict(session) for session in sessions], schema=_session_schema())


def sessions_from_table(table: "pa.Table") -> list[EngineSession]:
    """Load `sessions_to_table`. Tables of several files may be concatenated first."""
    expected = _session_schema(table.column_names)
    try:
        check_version((table.schema.metadata or {}).get(SESSION_KEY, b"").decode())
        if not table.schema.equals(expected):
            raise ValueError(f"its columns are {table.schema.names}, not {expected.names} of the same types")
        return [EngineSession(**row) for row in table.to_pylist()]
    except ValueError as error:
        raise PeagleError(f"not a record of engine sessions: {error}") from error


def _session_schema(existing: Collection[str] | None = None) -> "pa.Schema":
    """Return all columns, or the required ones and those of the others in `existing`."""
    import pyarrow as pa

    types: dict[Any, Any] = {
        str: pa.string(),
        str | None: pa.string(),
        int: pa.int64(),
        float: pa.float64(),
        bool: pa.bool_(),
        Device: pa.string(),
    }
    columns = [
        (field.name, types[field.type])
        for field in fields(EngineSession)
        if existing is None or field.default is MISSING or field.name in existing
    ]
    return pa.schema(columns, metadata={SESSION_KEY: str(VERSION).encode()})
