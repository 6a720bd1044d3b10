"""What a report says about a run besides its account: the model, the drafter, the machine, the dates.

It checks that what it is told is of the right kind; what is left out stays unknown.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from types import NoneType, UnionType
from typing import Any, Self, get_args

from peagle.errors import PeagleError, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The run that an account belongs to. Only the model is required.

    Args:
        label: what to call the run; by default the model and its drafter.
        drafter: the drafter's name or path, None for none.
        started_at: Unix seconds or ISO 8601, as `finished_at`; kept as ISO 8601 in UTC.
        complete: whether every input row ended as a committed row or a dead letter.
        concurrency: requests an engine runs at once.
        break_even_acceptance_length: what this hardware needs at this concurrency, if measured.

    Raises:
        PeagleError: a value is of the wrong kind.
    """

    model: str
    label: str | None = None
    path: str | None = None
    drafter: str | None = None
    num_speculative_tokens: int | None = None
    precision: str | None = None
    concurrency: int | None = None
    num_engines: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    num_input_rows: int | None = None
    started_at: str | float | None = None
    finished_at: str | float | None = None
    complete: bool | None = None
    break_even_acceptance_length: float | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not _is_of(value, item.type):
                raise PeagleError(f"the run's {item.name} is {value!r}: that is not of type {_spelled(item.type)}")
        for name in ("started_at", "finished_at"):
            object.__setattr__(self, name, _utc(name, getattr(self, name)))
        if self.label is None:
            object.__setattr__(self, "label", self._default_label())

    def _default_label(self) -> str:
        if self.drafter is None:
            return f"{self.model}, no drafter"
        draft = f" K={self.num_speculative_tokens}" if self.num_speculative_tokens else ""
        return f"{self.model} with {self.drafter}{draft}"

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Build one from plain data; a key that is none of the fields is refused.

        Raises:
            PeagleError: an unknown key, no model, or a value of the wrong kind.
        """
        for name in data:
            if name not in RUN_KEYS:
                raise PeagleError(f"a report knows no {name!r} of a run", hint=did_you_mean(name, RUN_KEYS))
        if "model" not in data:
            raise PeagleError("a report needs the run's model")
        return cls(**data)  # type: ignore[arg-type]  # __post_init__ checks

    def to_dict(self) -> dict[str, Any]:
        """Every field, ready for JSON."""
        return asdict(self)


RUN_KEYS = tuple(item.name for item in fields(RunInfo))


def _is_of(value: object, kind: Any) -> bool:
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, int) and float in kinds:
        return True
    return isinstance(value, tuple(dict if get_args(one) else one for one in kinds))


def _spelled(kind: Any) -> str:
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return " or ".join("dict" if get_args(one) else one.__name__ for one in kinds if one is not NoneType)


def _utc(name: str, moment: str | float | None) -> str | None:
    if moment is None:
        return None
    try:
        if isinstance(moment, str):
            return datetime.fromisoformat(moment).astimezone(UTC).isoformat(timespec="seconds")
        return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError) as error:
        raise PeagleError(f"the run's {name} is {moment!r}: that is no time ({error})") from error
