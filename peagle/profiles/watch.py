"""Warnings about drafters that cost more than they save, for bulk runs and the endpoint."""

import math
from collections.abc import Mapping

from peagle.speculation import drafter_warning


def reliable_length(num_drafts: int, acceptance_length: float | None) -> float | None:
    """Return the acceptance length, or None until there are enough drafts."""
    return acceptance_length if num_drafts >= 200 else None


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
        break_even: break-even acceptance length by concurrency. If it is empty, the warning only comes when nearly all
            drafts are rejected.
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
        """Return the warning the first time that live figures justify it; afterwards nothing."""
        length = reliable_length(num_drafts, acceptance_length)
        needed = self.break_even_length if concurrency is None else break_even_at(self._break_even, concurrency)
        if self._has_warned or (warning := drafter_warning(length, break_even=needed)) is None:
            return []
        self._has_warned = True
        return [warning]
