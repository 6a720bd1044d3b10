"""Usage records: the ledger's contents and their bytes.

It knows counts and seconds; not prices, and not where the bytes are kept.

    UnitUsage       what a committed work unit used; kept in the unit's own Parquet file (metadata key
                    `UNIT_KEY`), so that output and account commit together.
    RequestUsage    what one request to the endpoint used: a unit of one row, and whose it was; a line of JSON.
    EngineSession   the life of one engine process, committed work or not; heartbeats replace it.

Times are Unix times in seconds; every other `_s` is a duration in seconds of one engine.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from peagle.economics.prices import Device
from peagle.errors import PeagleError
from peagle.speculation import SpeculationStats

if TYPE_CHECKING:
    import pyarrow as pa

UNIT_KEY = b"peagle.usage"
SESSION_KEY = b"peagle.session"
VERSION = 1
Outcome = Literal["ok", "cut", "failed"]
_TOLERANCE_S = 1e-6
_STATES = ("load_s", "compile_s", "busy_s", "idle_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitUsage:
    """The usage of one committed unit.

    Args:
        session_id: the engine session that committed it.
        num_rows: rows with a response.
        num_failed_rows: rows that ended as dead letters; not among `num_rows`.
        num_cached_tokens: prompt tokens that the prefix cache answered; among `num_prompt_tokens`.
        num_output_tokens: tokens of the committed responses.
        busy_s: the unit's share of the engine's busy seconds. Units that ran interleaved divide them, so that
            over all units, committed or not, they sum to the session's `busy_s`.

    Raises:
        ValueError: a field has the wrong type or contradicts another.
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
            raise ValueError(f"{self.num_cached_tokens} of {self.num_prompt_tokens} prompt tokens were cached")
        if self.finished_at < self.started_at:
            raise ValueError("the unit finished before it started")

    def __add__(self, other: "UnitUsage") -> "UnitUsage":
        """Both together, as one unit of the same session."""
        if self.session_id != other.session_id:
            raise ValueError("units of two sessions do not add up to one")
        counts = ("num_rows", "num_failed_rows", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens")
        return UnitUsage(
            session_id=self.session_id,
            busy_s=self.busy_s + other.busy_s,
            speculation=self.speculation + other.speculation,
            started_at=min(self.started_at, other.started_at),
            finished_at=max(self.finished_at, other.finished_at),
            **{name: getattr(self, name) + getattr(other, name) for name in counts},
        )

    def to_json(self) -> bytes:
        """The record as versioned JSON, for `UNIT_KEY` in the metadata of a Parquet file."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        record["speculation"] = self.speculation.to_dict()
        return json.dumps({"version": VERSION, **record}).encode()

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """The inverse of `to_json`.

        Raises:
            PeagleError: not JSON, another version, or not exactly these fields with believable values.
        """
        try:
            return cls.from_record(json.loads(data))
        except ValueError as error:
            raise PeagleError(f"not the usage record of a unit: {error}") from error

    @classmethod
    def from_record(cls, record: Any) -> Self:
        """The same of JSON that has been read.

        Raises:
            ValueError: as `from_json` raises PeagleError.
        """
        _check_version(record.pop("version", None) if isinstance(record, dict) else None)
        _check_names(cls, record)
        return cls(**{**record, "speculation": SpeculationStats.from_dict(record["speculation"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUsage:
    """The usage of one request to the endpoint.

    Args:
        key: name of the API key; "local" where there are none.
        account: of that key alone, though others had its name before or have it since; empty in older records.
        model: what the client called it.
        outcome: "ok"; "cut" if the client left before the end, and `usage` then holds what was made until then;
            "failed" if there was no answer.
        ttft_s: from the engine's taking the request to its first token; None without one, and of a whole answer that
            failed.
        usage: its tokens and its share of the engine's busy seconds, as of a unit with one row.
        usd: price of those seconds; loading and idling is not in it. 0 where it failed before anything of an answer
            was there.
        num_choices: slots of the engine that its choices took at most.
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

    @property
    def is_batch(self) -> bool:
        """Whether it stands for a whole batch, which is a session of its own."""
        return self.request_id == self.usage.session_id

    def to_json(self) -> bytes:
        """The record as versioned JSON without a line break."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        record["usage"] = json.loads(self.usage.to_json())
        return json.dumps({"version": VERSION, **record}).encode()

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """The inverse of `to_json`.

        Raises:
            PeagleError: not JSON, another version, or not exactly these fields.
        """
        try:
            record = json.loads(data)
            _check_version(record.pop("version", None) if isinstance(record, dict) else None)
            _check_names(cls, record)
            if not 0 <= record["usd"] < math.inf:  # NaN is none either: a budget less that would be without end
                raise ValueError(f"usd must be a number of dollars, got {record['usd']}")
            if type(record.get("num_choices", 1)) is not int or record.get("num_choices", 1) < 1:
                raise ValueError(f"num_choices must be 1 or more, got {record['num_choices']!r}")
            return cls(**{**record, "usage": UnitUsage.from_record(record["usage"])})
        except ValueError as error:
            raise PeagleError(f"not the usage record of a request: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSession:
    """The life of one engine process, as of its last heartbeat.

    Every second belongs to one of four states: load (weights), compile (warm-up included), busy (a request in
    the engine), idle. Write the first heartbeat before the first unit commits: a committed unit without its
    session cannot be priced.

    Args:
        engine_index: which of the run's engines it was; a restarted engine is a new session.
        num_devices: accelerators it holds, or vCPUs.
        num_output_tokens: all tokens it generated, committed or not.
        ended: False while it runs, and for ever if it was killed.
        self_check: what its self-check found, as JSON (`peagle.engine.self_check`); empty before it.
        start_warnings: of its start, those that cost time or correctness, one a line.

    Raises:
        ValueError: a field has the wrong type, or the four states do not sum to its life.
    """

    session_id: str
    engine_index: int
    hostname: str
    num_devices: int
    device: Device
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
        if self.num_devices < 1:
            raise ValueError("an engine holds one device or more")
        life_s = self.last_seen_at - self.started_at
        states_s = self.load_s + self.compile_s + self.busy_s + self.idle_s
        if abs(states_s - life_s) > _TOLERANCE_S:
            raise ValueError(f"load, compile, busy and idle sum to {states_s} s of a life of {life_s} s")


def session_since(session: EngineSession, earlier: EngineSession) -> EngineSession:
    """A session's usage after an earlier heartbeat, as if it had started then.

    While an engine starts, all its seconds are load; only when it is up it says which of them were compile. So the two
    are taken together, and none counts twice.
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
    """A session at a Unix time between two of its heartbeats.

    Usage between them is divided evenly.

    Args:
        earlier: the last one before; None if there was none since the session began.
    """
    began = earlier.last_seen_at if earlier else later.started_at
    share = (moment - began) / (later.last_seen_at - began)

    def between(name: str) -> float:
        before = getattr(earlier, name) if earlier else 0
        return float((1 - share) * before + share * getattr(later, name))

    states: dict[str, Any] = {name: between(name) for name in _STATES}
    return replace(
        later,
        last_seen_at=later.started_at + sum(states.values()),
        num_output_tokens=round(between("num_output_tokens")),
        ended=False,
        **states,
    )


def start_warnings(sessions: Iterable[EngineSession]) -> list[str]:
    """The warnings of these engines' starts, each once, in their order."""
    return list(dict.fromkeys(line for session in sessions for line in session.start_warnings.splitlines()))


def sessions_to_table(sessions: Iterable[EngineSession]) -> "pa.Table":
    """One row a session, for `ledger/session-<id>.parquet`."""
    import pyarrow as pa

    return pa.Table.from_pylist([asdict(session) for session in sessions], schema=_session_schema())


def sessions_from_table(table: "pa.Table") -> list[EngineSession]:
    """The inverse of `sessions_to_table`.

    Tables of several files may be concatenated first.

    Raises:
        PeagleError: another version, other columns, or rows that contradict themselves.
    """
    expected = _session_schema(table.column_names)
    try:
        _check_version((table.schema.metadata or {}).get(SESSION_KEY, b"").decode())
        if not table.schema.equals(expected):
            raise ValueError(f"its columns are {table.schema.names}, not {expected.names} of the same types")
        return [EngineSession(**row) for row in table.to_pylist()]
    except ValueError as error:
        raise PeagleError(f"not a record of engine sessions: {error}") from error


def _session_schema(there: Collection[str] | None = None) -> "pa.Schema":
    """All columns, or the required ones and those of the others that exist."""
    import pyarrow as pa

    types = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_(), Device: pa.string()}
    columns = [
        (field.name, types[field.type])
        for field in fields(EngineSession)
        if there is None or field.default is MISSING or field.name in there
    ]
    return pa.schema(columns, metadata={SESSION_KEY: str(VERSION).encode()})


def _check_version(version: object) -> None:
    if str(version) != str(VERSION):
        raise ValueError(f"its version is {version!r}, and this peagle reads version {VERSION}")


def _check_names(kind: type[UnitUsage] | type[RequestUsage], record: Mapping[str, object]) -> None:
    names, needed = _NAMES[kind]
    if unknown := sorted(record.keys() - names):
        raise ValueError(f"unknown fields {', '.join(unknown)}")
    if missing := sorted(needed - record.keys()):
        raise ValueError(f"missing fields {', '.join(missing)}")


def _check_fields(record: UnitUsage | EngineSession) -> None:
    """Check types as declared, and no negative number.

    Records come back from files anyone may have written.
    """
    for field in fields(record):
        value = getattr(record, field.name)
        if field.type is float and type(value) in (int, float):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name} must be a number of seconds, got {value}")
        elif isinstance(field.type, type) and type(value) is not field.type:
            raise ValueError(f"{field.name} must be of type {field.type.__name__}, got {value!r}")
        elif field.type is int and value < 0:
            raise ValueError(f"{field.name} cannot be negative, got {value}")


# All fields, and those without a default. Once, as a ledger is read line by line.
_NAMES = {
    kind: (
        frozenset(field.name for field in fields(kind)),
        frozenset(field.name for field in fields(kind) if field.default is MISSING),
    )
    for kind in (UnitUsage, RequestUsage)
}
