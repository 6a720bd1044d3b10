"""Warnings about drafters that cost more than they save, for bulk runs and the endpoint."""

import math
from collections.abc import Mapping

from peagle.speculation import drafter_warning

_MIN_DRAFTS = 200


def reliable_length(num_drafts: int, acceptance_length: float | None) -> float | None:
    """Return the acceptance length, or None until there are enough drafts."""
    return acceptance_length if num_drafts >= _MIN_DRAFTS else None


def break_even_at(break_even: Mapping[int, float], concurrency: float | None) -> float | None:
    """Return the break-even acceptance length of the nearest measured concurrency, by ratio."""
    if not break_even or concurrency is None:
        return None
    # Below a concurrency of 1 an engine idles between requests.
    nearest = min(break_even, key=lambda measured: abs(math.log(measured / max(concurrency, 1.0))))
    return break_even[nearest]


class DrafterWatch:
    """Warns once if a drafter costs more than it saves.

    Args:
        break_even: break-even acceptance length by concurrency. If it is empty, the only reason for a warning is that
            nearly all drafts are rejected.
        concurrency: the engine's concurrency, for callers that cannot measure it.
    """

    def __init__(self, break_even: Mapping[int, float], concurrency: float | None = None) -> None:
        self._break_even, self._concurrency = break_even, concurrency
        self._has_warned = False

    @property
    def break_even_length(self) -> float | None:
        return break_even_at(self._break_even, self._concurrency)

    def new_warnings(
        self, *, num_drafts: int, acceptance_length: float | None, concurrency: float | None = None
    ) -> list[str]:
        """Return the warning if these figures justify it and it was not returned before; otherwise an empty list."""
        length = reliable_length(num_drafts, acceptance_length)
        break_even = self.break_even_length if concurrency is None else break_even_at(self._break_even, concurrency)
        if self._has_warned or (warning := drafter_warning(length, break_even=break_even)) is None:
            return []
        self._has_warned = True
        return [warning]
