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
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, Self, get_args

from peagle.economics.baseline import Baseline
from peagle.economics.prices import Device
from peagle.economics.tags import NO_TAGS, tags_from_text
from peagle.errors import PeagleError
from peagle.speculation import SpeculationStats

UNIT_KEY = b"peagle.usage"
VERSION = 1
Outcome = Literal["ok", "cut", "failed"]
_TOLERANCE_S = 1e-6


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

    @classmethod
    def empty(cls, session_id: str, *, started_at: float, finished_at: float, busy_s: float = 0.0) -> Self:
        """The usage of no row: seconds alone."""
        return cls(
            session_id=session_id,
            num_rows=0,
            num_failed_rows=0,
            num_prompt_tokens=0,
            num_cached_tokens=0,
            num_output_tokens=0,
            busy_s=busy_s,
            speculation=SpeculationStats.empty(),
            started_at=started_at,
            finished_at=finished_at,
        )

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
        check_version(record.pop("version", None) if isinstance(record, dict) else None)
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
        tags: the endpoint's, the key's and its own, as JSON (`tags.py`).
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
            check_version(record.pop("version", None) if isinstance(record, dict) else None)
            _check_names(cls, record)
            if not 0 <= record["usd"] < math.inf:  # NaN is none either: a budget less that would be without end
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
        model, drafter, num_speculative_tokens, tags, instance_type, provider, region, market, usd_per_device_s,
            on_demand_usd_per_device_s, baseline, price_basis, is_stand_in: as `EngineFacts` has them; empty, 0 and
            False in older records.

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
    model: str = ""
    drafter: str | None = None
    tags: str = NO_TAGS
    instance_type: str = ""
    provider: str = ""
    region: str = ""
    usd_per_device_s: float = 0.0
    num_speculative_tokens: int = 0
    market: str = ""
    on_demand_usd_per_device_s: float = 0.0
    baseline: str = ""
    price_basis: str = ""
    is_stand_in: bool = False

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.device not in get_args(Device):
            raise ValueError(f"device is {self.device!r}, not one of {', '.join(get_args(Device))}")
        tags_from_text(self.tags)
        Baseline.from_text(self.baseline)
        if self.num_devices < 1:
            raise ValueError("an engine holds one device or more")
        life_s = self.last_seen_at - self.started_at
        states_s = self.load_s + self.compile_s + self.busy_s + self.idle_s
        if abs(states_s - life_s) > _TOLERANCE_S:
            raise ValueError(f"load, compile, busy and idle sum to {states_s} s of a life of {life_s} s")


def check_version(version: object) -> None:
    """Require the version of this peagle's records.

    Raises:
        ValueError: it is another.
    """
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
