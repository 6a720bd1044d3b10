"""Errors: the fault, its place, and a hint for the user.

PeagleError                 anything peagle reports by itself: exit code 1
├── ConfigError             bad usage or configuration: exit code 2
│   ├── CatalogError        no such model or head, or a card that does not parse
│   ├── PrecisionError      this hardware cannot run that precision
│   ├── DrafterError        the head does not fit the target
│   ├── PriceError          no price for that hardware
│   └── InputError          the corpus cannot be read as asked
├── CapacityError           the cluster or the machine cannot hold what was asked for
├── DivergedError           the loss of a training is not finite
├── EngineError             an engine did not start, or died
├── StorageError            an object store refuses, or does not answer
├── RunInUse                another driver is at work in the run directory
├── TooManyFailedRows       the user's limit of dead letters is reached
└── StoppedEarly            stopped on purpose and resumable: exit code 3

A message says what was wrong and where; `hint` says what to do about it. `assert` is for invariants only.
"""

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any, ClassVar

_MOST_SHOWN = 100  # characters of a user's own value
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _MOST_SHOWN


class PeagleError(Exception):
    """A failure that the user can act on.

    Args:
        message: what was wrong, and where (file, row, key).
        hint: what to do about it.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (Ray); the default pickling drops keyword-only arguments.
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(kind: type[PeagleError], message: str, hint: str) -> PeagleError:
    return kind(message, hint=hint)


class ConfigError(PeagleError):
    """Bad usage or configuration."""

    exit_code = 2


class CatalogError(ConfigError):
    """No such model or head, or a catalog card that does not parse."""


class PrecisionError(ConfigError):
    """The hardware cannot run the precision that was asked for."""


class DrafterError(ConfigError):
    """The drafter does not fit the target."""


class PriceError(ConfigError):
    """No price is known for the hardware; a price is never taken to be zero."""


class InputError(ConfigError):
    """The corpus cannot be read: missing file or column, wrong format, or empty."""


class CapacityError(PeagleError):
    """The machine or the cluster cannot hold what was asked for."""


class DivergedError(PeagleError):
    """The loss of a training is not finite."""


class EngineError(PeagleError):
    """An engine did not start, or died."""


class StorageError(PeagleError):
    """An object store refuses what was asked of it, or does not answer in time."""


class RunInUse(PeagleError):  # noqa: N818 - it is an outcome, not a fault
    """Another driver is at work in the run directory."""


class TooManyFailedRows(PeagleError):  # noqa: N818 - it is an outcome, not a fault
    """More rows ended as dead letters than the user allows."""


class StoppedEarly(PeagleError):  # noqa: N818 - it is an outcome, not a fault
    """The run was stopped before its end and can be resumed."""

    exit_code = 3


def shown(value: Any) -> str:
    """A user's value for a message: the beginning of a long one.

    >>> shown("gpt-4"), len(shown("x" * 1_000_000)), len(shown([[0] * 1_000] * 1_000)) < 1_000
    ("'gpt-4'", 105, True)
    """
    if isinstance(value, str):
        return repr(value if len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]}...")
    return _SHORT.repr(value)


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """The nearest valid names as a hint, or all of them when none is near.

    >>> did_you_mean("temprature", ["temperature", "top_p"])
    'did you mean temperature?'
    """
    choices = sorted(valid)
    near = difflib.get_close_matches(name[:_MOST_SHOWN], choices, n=2, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"valid names: {', '.join(choices)}" if choices else "there are no choices"
