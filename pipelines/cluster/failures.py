"""Turn Ray's errors back into errors of ours.

It knows how Ray wraps and prints exceptions; it knows nothing of runs or trainings.
"""

import re

from peagle import errors
from peagle.errors import PeagleError

_CHAINED = "\nThe above exception was the direct cause of"
# A traceback ends with the error as `str` gives it: below the message, two spaces further in, what to do about it.
_PRINTED = re.compile(r"^peagle\.errors\.(\w+): (.*)(?:\n  (.+))?$", re.MULTILINE)
_RETRY_ADVICE = re.compile(r"Failed to [^\n]* attempts \(total backoff.*", re.DOTALL)


def explain(error: BaseException, what: str, *, hint: str, otherwise: type[PeagleError] = PeagleError) -> PeagleError:
    """The error of ours at the bottom of Ray's; else Ray's own, in short.

    Ray Data keeps the cause of a failed actor as an exception, that of a failed task only in the traceback's text, and
    appends to both how its own retries are configured, which is nothing that a user of this package can do.

    Args:
        what: what has happened, before Ray's last line.
        hint: what to do, where the error itself does not carry one.
        otherwise: kind of the error where it is none of ours.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PeagleError):
            return cause
        cause = getattr(cause, "cause", None) or cause.__cause__
    named = _PRINTED.findall(str(error))
    if named:
        kind, message, advice = named[-1]
        return getattr(errors, kind)(message, hint=advice or hint)  # type: ignore[no-any-return]
    root, *_ = str(error).split(_CHAINED)
    last = (_RETRY_ADVICE.sub("", root).strip().splitlines() or [repr(error)])[-1]
    return otherwise(f"{what}: {last}", hint=hint)
