"""Recover peagle's errors from Ray's, which wrap or print them."""

import re

from peagle import errors
from peagle.errors import PeagleError

_CHAINED = "\nThe above exception was the direct cause of"
# A traceback ends with `str(error)`: the message, and below it the hint, indented by two spaces.
_PRINTED = re.compile(r"^peagle\.errors\.(\w+): (.*)(?:\n  (.+))?$", re.MULTILINE)
_RETRY_ADVICE = re.compile(r"Failed to [^\n]* attempts \(total backoff.*", re.DOTALL)


def to_peagle_error(
    error: BaseException, what: str, *, hint: str, otherwise: type[PeagleError] = PeagleError
) -> PeagleError:
    """Return the peagle error that a Ray error wraps, or a short form of the Ray error.

    Args:
        what: what failed; the short form begins with it.
        hint: used if the error has no hint.
        otherwise: type of the short form.
    """
    # Ray Data keeps the cause of a failed actor as an exception, but that of a failed task only as traceback text.
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PeagleError):
            return cause
        cause = getattr(cause, "cause", None) or cause.__cause__
    printed_errors = _PRINTED.findall(str(error))
    if printed_errors:
        kind, message, advice = printed_errors[-1]
        return getattr(errors, kind)(message, hint=advice or hint)  # type: ignore[no-any-return]
    root, *_ = str(error).split(_CHAINED)
    last = (_RETRY_ADVICE.sub("", root).strip().splitlines() or [repr(error)])[-1]
    return otherwise(f"{what}: {last}", hint=hint)
