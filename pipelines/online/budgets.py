"""Money of keys that more than the ledger knows: what batches and requests under way hold of budgets.

The gate lets requests in and the scheduler begins batches, each in a thread of its own, and both spend what is left of
the same budget. So each writes here what it holds from start to end, and looks at what the other does. It knows neither
HTTP nor files; what a request may cost is `limits.py`.
"""

import functools
import threading
from collections import defaultdict
from pathlib import Path


class Budgets:
    """By key: US dollars that are held, and those that batches have spent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held_by_requests: defaultdict[str, float] = defaultdict(float)
        self._held_by_batches: dict[str, tuple[str, float]] = {}
        self._spent_by_batches: defaultdict[str, float] = defaultdict(float)
        self._settled: set[str] = set()

    def hold_request(self, key: str, usd: float) -> None:
        """A request has begun that may cost as much; what it held is given back with the sign turned."""
        with self._lock:
            self._held_by_requests[key] += usd

    def hold_rest(self, batch_id: str, key: str, left_usd: float) -> float:
        """Hold for a batch what requests under way do not hold of the rest of a budget; how much that is.

        Nothing is held where there is nothing.
        """
        with self._lock:
            rest_usd = left_usd - self._held_by_requests[key]
            if rest_usd > 0:
                self._held_by_batches[batch_id] = (key, rest_usd)
            return max(0.0, rest_usd)

    def settle_batch(self, batch_id: str, key: str, usd: float) -> None:
        """A batch has ended and cost as much; saying it again, as the ledger does, changes nothing."""
        with self._lock:
            self._held_by_batches.pop(batch_id, None)
            if batch_id not in self._settled:
                self._settled.add(batch_id)
                self._spent_by_batches[key] += usd

    def is_held_by(self, batch_id: str) -> bool:
        """Whether a batch has begun and not ended."""
        return batch_id in self._held_by_batches

    def held_by_batches(self, key: str) -> float:
        """What they may still spend."""
        with self._lock:
            return sum(usd for owner, usd in self._held_by_batches.values() if owner == key)

    def spent_by_batches(self, key: str) -> float:
        """What those that have ended have cost."""
        with self._lock:
            return self._spent_by_batches[key]


@functools.cache
def budgets_of(ledger: Path) -> Budgets:
    """Those of the keys of a ledger, the same for all of this process: Ray builds the gate and the rest of the ingress
    from copies of what they are given, so neither can hand them to the other."""
    return Budgets()
