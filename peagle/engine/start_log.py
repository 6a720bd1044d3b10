"""What vLLM warns of when it starts, as far as it costs time or correctness: a user should see it, not only a log."""

import re
from collections.abc import Iterable, Iterator

from peagle.economics.usage import EngineSession

_WARNED = re.compile(r"^(?:\([^)]*\) )?WARNING [\d-]+ [\d:]+ \[[^\]]*\] (.*)$", re.MULTILINE)
_COSTS = re.compile(
    r"perform|slow|degrad|accura|incorrect|unreliable|again|fall(?:s|ing)? ?back|sub-?optimal", re.IGNORECASE
)
# What costs nothing here, or what we decide ourselves.
_HARMLESS = (
    "max_num_scheduled_tokens is set to",  # `arguments.py` sizes a step for drafts
    "Failed to create oneDNN linear",  # of `lm_head`; torch's own takes over, and there is no choice
)
_MOST = 10
_LONGEST = 400  # characters


def costly_warnings(log: str) -> list[str]:
    """Warnings of a start that cost time or correctness, each once, in their order.

    >>> costly_warnings("(Worker pid=7) WARNING 11-25 08:22:20 [cpu_worker.py:127] no libtcmalloc: performance is lost")
    ['no libtcmalloc: performance is lost']
    """
    return list(dict.fromkeys(_costly(log)))[:_MOST]


def warnings_of(sessions: Iterable[EngineSession]) -> list[str]:
    """Warnings that engines' ledgers have of their starts, each once, in their order."""
    return list(dict.fromkeys(line for session in sessions for line in session.start_warnings.splitlines()))


def as_told(warning: str) -> str:
    """The line in which a user is told of a warning."""
    return f"warning of an engine's start: {warning}"


def _costly(log: str) -> Iterator[str]:
    for warning in _WARNED.findall(log):
        if _COSTS.search(warning) and not warning.startswith(_HARMLESS):
            yield warning if len(warning) <= _LONGEST else f"{warning[:_LONGEST]}..."
