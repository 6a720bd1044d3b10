"""Exceptions with hints for the user. The exit code is 2 for `ConfigError`, 3 for `StoppedEarly`, and 1 for others.

A message says what is wrong, where, and with which value; `hint` says how to fix it. `assert` is only for invariants.
"""

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any, ClassVar

_MAX_SHOWN = 100  # characters of a user's value
_VALUE_REPR = reprlib.Repr()
_VALUE_REPR.maxstring = _VALUE_REPR.maxother = _MAX_SHOWN


class PeagleError(Exception):
    """An error that the user can fix: `message` says what is wrong and where, `hint` how to fix it."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (Ray), and the default pickling drops keyword-only arguments.
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(error_type: type[PeagleError], message: str, hint: str) -> PeagleError:
    return error_type(message, hint=hint)


class ConfigError(PeagleError):
    """Bad usage or configuration."""

    exit_code = 2


class CatalogError(ConfigError):
    """Unknown model or head, or an invalid catalog card."""


class PrecisionError(ConfigError):
    """The hardware does not support the precision."""


class DrafterError(ConfigError):
    """The drafter does not fit the target."""


class PriceError(ConfigError):
    """No price is known for the hardware. A missing price never counts as zero."""


class InputError(ConfigError):
    """The corpus cannot be read: missing file or column, wrong format, or empty."""


class CapacityError(PeagleError):
    """The machine or the cluster is too small."""


class DivergedError(PeagleError):
    """The training loss or its gradient is not finite."""


class EngineError(PeagleError):
    """The engine failed to start or crashed."""


class StorageError(PeagleError):
    """An object store refused a request, or did not respond in time."""


class RunInUse(PeagleError):  # noqa: N818 - an outcome, not a fault
    """Another driver holds the run's lease."""


class TooManyFailedRows(PeagleError):  # noqa: N818
    """More rows failed than --max-failed-rows allows."""


class StoppedEarly(PeagleError):  # noqa: N818
    """The run was stopped early and can be resumed."""

    exit_code = 3


def shown(value: Any) -> str:
    """Format a user's value for a message, truncated if it is long.

    >>> shown("gpt-4"), len(shown("x" * 1_000_000)), len(shown([[0] * 1_000] * 1_000)) < 1_000
    ("'gpt-4'", 105, True)
    """
    if isinstance(value, str):
        return repr(value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}...")
    return _VALUE_REPR.repr(value)


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return a hint with the most similar valid names, or all valid names if none is similar.

    >>> did_you_mean("temprature", ["temperature", "top_p"])
    'did you mean temperature?'
    """
    choices = sorted(valid)
    similar = difflib.get_close_matches(name[:_MAX_SHOWN], choices, n=2, cutoff=0.6)
    if similar:
        return f"did you mean {' or '.join(similar)}?"
    return f"valid names: {', '.join(choices)}" if choices else "there are no choices"
