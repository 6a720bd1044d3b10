"""Usage records, which make up the ledger.

    UnitUsage       the usage of a committed unit; in the metadata (`UNIT_KEY`) of its Parquet file, so that output and
                    usage are committed together
    RequestUsage    the usage of one request to the endpoint, as a line of JSON
    EngineFacts     facts about an engine that do not change
    EngineSession   these facts, and the life of one engine process as of its latest heartbeat
    Work            work of a group of units or requests, added up for cost reports

Suffixes: `_at` is a Unix time in seconds, `_s` a duration in seconds.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from peagle.economics.baseline import Baseline
from peagle.economics.prices import Device, Price
from peagle.economics.tags import NO_TAGS, tags_from_text
from peagle.errors import PeagleError
from peagle.speculation import SpeculationStats

if TYPE_CHECKING:
    import pyarrow as pa


UNIT_KEY = b"peagle.usage"  # a key of Parquet metadata, like `SESSION_KEY`
VERSION = 1
Outcome = Literal["ok", "cut", "failed"]
_TOLERANCE_S = 1e-6
UNIT_COUNTS = ("num_rows", "num_failed_rows", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitUsage:
    """The usage of a committed unit.

    Attributes:
        num_rows: rows with a response; `num_failed_rows` are the dead letters.
        num_cached_tokens: prompt tokens from the prefix cache; included in `num_prompt_tokens`.
        busy_s: the unit's share of the engine's busy seconds. The shares of all units, including those that are not
            committed, add up to the busy seconds of the session.
    """

    session_id: str
    num_rows: int
    num_failed_rows: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    busy_s: float
    speculation: SpeculationStats
    started_at: float
    finished_at: float

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.num_cached_tokens > self.num_prompt_tokens:
            raise ValueError(f"{self.num_cached_tokens} cached tokens exceed {self.num_prompt_tokens} prompt tokens")
        if self.finished_at < self.started_at:
            raise ValueError("the unit finished before it started")

    @classmethod
    def empty(cls, session_id: str, *, started_at: float, finished_at: float, busy_s: float = 0.0) -> Self:
        return cls(
            session_id=session_id,
            **dict.fromkeys(UNIT_COUNTS, 0),
            busy_s=busy_s,
            speculation=SpeculationStats.empty(),
            started_at=started_at,
            finished_at=finished_at,
        )

    def __add__(self, other: "UnitUsage") -> "UnitUsage":
        if self.session_id != other.session_id:
            raise ValueError("cannot add units of different sessions")
        return UnitUsage(
            session_id=self.session_id,
            busy_s=self.busy_s + other.busy_s,
            speculation=self.speculation + other.speculation,
            started_at=min(self.started_at, other.started_at),
            finished_at=max(self.finished_at, other.finished_at),
            **{name: getattr(self, name) + getattr(other, name) for name in UNIT_COUNTS},
        )

    def to_json(self) -> bytes:
        """Return versioned JSON for the metadata of a Parquet file."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        record["speculation"] = self.speculation.to_dict()
        return json.dumps({"version": VERSION, **record}).encode()

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        try:
            return cls.from_record(json.loads(data))
        except ValueError as error:
            raise PeagleError(f"not the usage record of a unit: {error}") from error

    @classmethod
    def from_record(cls, record: Any) -> Self:
        check_version(record.pop("version", None) if isinstance(record, dict) else None)
        _check_field_names(cls, record)
        return cls(**{**record, "speculation": SpeculationStats.from_dict(record["speculation"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUsage:
    """The usage of one request to the endpoint.

    Attributes:
        key: name of the API key; "local" if the endpoint has no keys; empty if no key is billed.
        account: unique to the key, even if another key had the same name; empty in older records.
        outcome: "failed" if there was no response; "cut" if the client disconnected. `usage` then covers the output
            until that time.
        usd: price of the request's busy seconds, without loading and idle time.
        tags: merged tags of the endpoint, the key and the request, as JSON (`tags.py`).
    """

    request_id: str
    key: str
    model: str
    drafter: str | None
    outcome: Outcome
    ttft_s: float | None
    usd: float
    usage: UnitUsage
    num_choices: int = 1
    account: str = ""
    tags: str = NO_TAGS

    @property
    def is_batch(self) -> bool:
        """Whether the record is a whole batch with its own session."""
        return self.request_id == self.usage.session_id

    def to_json(self) -> bytes:
        """Return versioned JSON without a line break."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        record["usage"] = json.loads(self.usage.to_json())
        return json.dumps({"version": VERSION, **record}).encode()

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        try:
            record = json.loads(data)
            check_version(record.pop("version", None) if isinstance(record, dict) else None)
            _check_field_names(cls, record)
            if not 0 <= record["usd"] < math.inf:  # also rejects NaN, which would disable budgets
                raise ValueError(f"usd must be a number of dollars, got {record['usd']}")
            if not all(isinstance(record[name], str) for name in ("request_id", "key", "model")):
                raise ValueError("request_id, key and model must be text")
            tags_from_text(record.get("tags", NO_TAGS))
            if type(record.get("num_choices", 1)) is not int or record.get("num_choices", 1) < 1:
                raise ValueError(f"num_choices must be 1 or more, got {record['num_choices']!r}")
            return cls(**{**record, "usage": UnitUsage.from_record(record["usage"])})
        except ValueError as error:
            raise PeagleError(f"not the usage record of a request: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts about an engine that do not change during its life. Optional facts are missing in older records.

    Attributes:
        num_devices: number of accelerators, or of vCPUs.
        num_speculative_tokens: K; 0 without a drafter.
        usd_per_device_s: price; 0 if unknown.
        on_demand_usd_per_device_s: on-demand price of a spot machine; otherwise 0.
        baseline: measured step times as JSON (`baseline.py`); may be empty.
        price_basis: stated, detected or assumed; empty without a price.
        is_stand_in: whether this is the fake engine, with meaningless speed and cost.
    """

    model: str = ""
    drafter: str | None = None
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
        price: Price | None,
        *,
        num_speculative_tokens: int | None = None,
        baseline: Baseline | None = None,
        **facts: Any,
    ) -> Self:
        """Return the facts of an engine with this price (None if unknown)."""
        if price is not None:
            names = ("usd_per_device_s", "instance_type", "provider", "region", "market", "on_demand_usd_per_device_s")
            facts |= {name: getattr(price, name) for name in names} | {"price_basis": price.basis or ""}
        return cls(
            num_speculative_tokens=num_speculative_tokens or 0,
            baseline=baseline.to_text() if baseline else "",
            **facts,
        )

    def unbilled_request(self, request_id: str, usage: UnitUsage) -> RequestUsage:
        """Return the record of work that is billed to no key."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSession(EngineFacts):
    """The life of one engine process, as of its latest heartbeat.

    Every second belongs to one of four states: load (weights), compile (including warm-up), busy (a request is running)
    and idle. The first heartbeat must be written before the first unit is committed, because a unit without a session
    cannot be priced.

    Attributes:
        engine_index: number of the engine in the run; a restarted engine is a new session.
        ended: whether the engine was shut down; False while it runs, and after a crash.
        self_check: result of the self-check as JSON (`peagle.engine.self_check`); empty until it has run.
        start_warnings: warnings about cost or correctness, one per line.
    """

    session_id: str
    engine_index: int
    hostname: str
    started_at: float
    last_seen_at: float
    load_s: float
    compile_s: float
    busy_s: float
    idle_s: float
    num_output_tokens: int
    ended: bool
    self_check: str = ""
    start_warnings: str = ""

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.device not in get_args(Device):
            raise ValueError(f"device is {self.device!r}, not one of {', '.join(get_args(Device))}")
        tags_from_text(self.tags)
        Baseline.from_text(self.baseline)
        if self.num_devices < 1:
            raise ValueError("an engine requires at least one device")
        life_s = self.last_seen_at - self.started_at
        states_s = self.load_s + self.compile_s + self.busy_s + self.idle_s
        if abs(states_s - life_s) > _TOLERANCE_S:
            raise ValueError(f"load, compile, busy and idle add up to {states_s} s, but the session lasted {life_s} s")


def check_version(version: object) -> None:
    if str(version) != str(VERSION):
        raise ValueError(f"version {version!r} is not supported; this peagle reads version {VERSION}")


def _check_field_names(record_type: type[UnitUsage] | type[RequestUsage], record: Mapping[str, object]) -> None:
    names, required = _FIELD_NAMES[record_type]
    if unknown := sorted(record.keys() - names):
        raise ValueError(f"unknown fields {', '.join(unknown)}")
    if missing := sorted(required - record.keys()):
        raise ValueError(f"missing fields {', '.join(missing)}")


def _check_fields(record: UnitUsage | EngineSession) -> None:
    for field in fields(record):
        value = getattr(record, field.name)
        if field.type is float and type(value) in (int, float):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name} must be a finite number, 0 or more, got {value}")
        elif isinstance(field.type, type) and type(value) is not field.type:
            raise ValueError(f"{field.name} must be of type {field.type.__name__}, got {value!r}")
        elif field.type is int and value < 0:
            raise ValueError(f"{field.name} cannot be negative, got {value}")


# All fields, and the required fields; computed once because ledgers are read line by line.
_FIELD_NAMES = {
    record_type: (
        frozenset(field.name for field in fields(record_type)),
        frozenset(field.name for field in fields(record_type) if field.default is MISSING),
    )
    for record_type in (UnitUsage, RequestUsage)
}


WORK_COUNTS = ("num_requests", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens")  # shown in cost reports


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Committed work. Add with `+`.

    `busy_s` is the work's share of the engine's busy seconds. `request_s` is the sum of the requests' durations, or 0
    if unknown; `request_s / busy_s` is the concurrency.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_drafts: int = 0
    num_accepted_tokens: int = 0
    busy_s: float = 0.0
    request_s: float = 0.0
    usd: float = 0.0

    @classmethod
    def of(cls, usage: UnitUsage, usd: float, *, request_s: float = 0.0) -> Self:
        return cls(
            num_requests=usage.num_rows + usage.num_failed_rows,
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            num_output_tokens=usage.num_output_tokens,
            num_drafts=usage.speculation.num_drafts,
            num_accepted_tokens=usage.speculation.num_accepted_tokens,
            busy_s=usage.busy_s,
            request_s=request_s,
            usd=usd,
        )

    def __add__(self, other: Self) -> Self:
        return type(self)(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


SESSION_KEY = b"peagle.session"
_STATE_NAMES = ("load_s", "compile_s", "busy_s", "idle_s")


def session_since(session: EngineSession, earlier: EngineSession) -> EngineSession:
    """Return the part of a session after an earlier heartbeat, as if the session had started then."""
    elapsed: dict[str, Any] = {name: max(0.0, getattr(session, name) - getattr(earlier, name)) for name in _STATE_NAMES}
    # All startup seconds count as load until the engine is ready; then part of them is reclassified as compile. The
    # difference of load + compile is used, so that no second counts twice.
    start_s = max(0.0, session.load_s + session.compile_s - earlier.load_s - earlier.compile_s)
    elapsed["compile_s"] = min(elapsed["compile_s"], start_s)
    elapsed["load_s"] = start_s - elapsed["compile_s"]
    return replace(
        session,
        started_at=session.last_seen_at - sum(elapsed.values()),
        num_output_tokens=session.num_output_tokens - earlier.num_output_tokens,
        **elapsed,
    )


def interpolate_session(moment: float, earlier: EngineSession | None, later: EngineSession) -> EngineSession:
    """Return a session as of `moment` (Unix time), interpolated linearly between two heartbeats."""
    interval_start = earlier.last_seen_at if earlier else later.started_at
    share = (moment - interval_start) / (later.last_seen_at - interval_start)

    def interpolate(name: str) -> float:
        earlier_value = getattr(earlier, name) if earlier else 0
        return float((1 - share) * earlier_value + share * getattr(later, name))

    states: dict[str, Any] = {name: interpolate(name) for name in _STATE_NAMES}
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
    """Return the sessions in a table from `sessions_to_table`. Tables from several files may be concatenated first."""
    expected = _session_schema(table.column_names)
    try:
        check_version((table.schema.metadata or {}).get(SESSION_KEY, b"").decode())
        if sorted(table.column_names) == sorted(expected.names):
            table = table.select(expected.names)  # earlier versions wrote the columns in another order
        if not table.schema.equals(expected):
            raise ValueError(f"expected the columns {_describe(expected)}; got {_describe(table.schema)}")
        return [EngineSession(**row) for row in table.to_pylist()]
    except ValueError as error:
        raise PeagleError(f"not a record of engine sessions: {error}") from error


def _describe(schema: "pa.Schema") -> str:
    return ", ".join(f"{column.name} ({column.type})" for column in schema)


def _session_schema(existing: Collection[str] | None = None) -> "pa.Schema":
    """Return all columns, or the required columns and the optional columns in `existing`."""
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
