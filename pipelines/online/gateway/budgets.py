"""Budgets of keys: money spent, and money held by batches and requests.

The gate lets requests in and the scheduler begins batches, each in a thread of its own, and both spend what is left of
the same budget. So each holds here what it may cost from its start to its end, in one step with the look at what is
left. What has been spent is what the ledger says, with what an answer has told already and no line of it yet. Each
request and batch has an id, by which the two are never added. It knows neither HTTP nor files; what a request may cost
is `limits.py`.
"""

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peagle.economics.usage import RequestUsage
from pipelines.online.totals import Totals, account_of, totals_of

Refusal = Literal["spent", "held by a batch", "held by requests"]


@dataclass(frozen=True, slots=True)
class _Amount:
    """Somebody's."""

    key: str
    usd: float
    at: float = 0.0


class Budgets:
    """By key: US dollars that are spent, and those that are held.

    It follows the ledger.

    A key stands here by its account (`KeyRecord.account`).
    """

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.RLock()
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._requests: defaultdict[str, dict[str, float]] = defaultdict(dict)  # under way: by key, by id
        self._batches: dict[str, _Amount] = {}
        self._told: dict[str, _Amount] = {}  # spent, and not read in the ledger yet
        self._read_batches: set[str] = set()
        self._totals: Totals | None = None

    @property
    def is_known(self) -> bool:
        """Whether all of the ledger is in it."""
        return self._totals is not None and self._totals.is_known

    def begin(self, totals: Totals) -> None:
        """Take over what keys have spent before."""
        with self._lock:
            for account, usd in totals.spent_usd.items():
                self._spent[account] += usd
            self._read_batches |= totals.batches
            self._totals = totals

    def hear(self, request: RequestUsage) -> None:
        """The ledger says what a request or a batch has cost: in place of what was told."""
        with self._lock:
            told = self._told.pop(request.request_id, None)
            account = account_of(request)
            self._spent[account] += request.usd - (told.usd if told else 0.0)
            self._requests[account].pop(request.request_id, None)
            self._batches.pop(request.request_id, None)
            if request.is_batch:
                self._read_batches.add(request.request_id)

    # --- requests

    def refusal(self, key: str, budget_usd: float | None, *, is_free: bool = False) -> Refusal | None:
        """Why a key may begin nothing now, or nothing that costs anything; None if it may."""
        with self._lock:
            refusal = self._refusal(key, budget_usd)
            return None if is_free and refusal == "held by a batch" else refusal

    def hold_request(self, request_id: str, key: str, budget_usd: float | None, usd: float | None) -> Refusal | None:
        """Hold what a request may cost, or say why it cannot begin.

        One that is alone under way gets in with whatever is left. One of which nobody knows what it may cost gets in
        only so, and holds all of it.
        """
        with self._lock:
            held_usd = usd or 0.0
            if budget_usd is not None:
                if refusal := self._refusal(key, budget_usd):
                    return refusal
                others = self._requests[key].values()
                left_usd = budget_usd - self._spent_by(key) - self.held_by_batches(key)
                if others and (usd is None or sum(others) + usd > left_usd):
                    return "held by requests"
                held_usd = left_usd if usd is None else usd
            self._requests[key][request_id] = held_usd
            return None

    def settle_request(self, request_id: str, key: str, usd: float) -> None:
        """A request has ended and cost as much, unless the ledger has said so before."""
        with self._lock:
            if self._requests[key].pop(request_id, None) is not None:
                self._tell(request_id, key, usd)

    def let_go(self, request_id: str, key: str) -> None:
        """Nothing will be told of a request; should the ledger name it yet, that counts."""
        with self._lock:
            self._requests[key].pop(request_id, None)

    def forget(self, before: float) -> None:
        """Stop waiting for the ledger's records of requests settled before this time.

        They stay spent.
        """
        with self._lock:
            while self._told:
                request_id, told = next(iter(self._told.items()))
                if told.at >= before:
                    return
                del self._told[request_id]

    # --- batches

    def hold_rest(self, batch_id: str, key: str, left_usd: float) -> float:
        """Hold the rest of a budget for a batch, and return how much that is.

        Without what requests under way hold.

        Nothing is held where there is nothing.
        """
        with self._lock:
            rest_usd = left_usd - sum(self._requests[key].values())
            if rest_usd > 0:
                self._batches[batch_id] = _Amount(key, rest_usd)
            return max(0.0, rest_usd)

    def settle_batch(self, batch_id: str, key: str, usd: float) -> None:
        """Settle a batch that has ended at that cost.

        Saying it again, as the ledger does, changes nothing.
        """
        with self._lock:
            self._batches.pop(batch_id, None)
            if batch_id not in self._told and batch_id not in self._read_batches:
                self._tell(batch_id, key, usd)

    def is_held_by(self, batch_id: str) -> bool:
        """Whether a batch has begun and not ended."""
        return batch_id in self._batches

    def held_by_batches(self, key: str) -> float:
        """The money that batches under way may still spend."""
        with self._lock:
            return sum(one.usd for one in self._batches.values() if one.key == key)

    def spent_usd(self, key: str) -> float:
        """The money that a key has spent, ended batches included."""
        with self._lock:
            return self._spent_by(key)

    # --- with the lock

    def _refusal(self, key: str, budget_usd: float | None) -> Refusal | None:
        if budget_usd is None:
            return None
        left_usd = budget_usd - self._spent_by(key)
        if left_usd <= 0:
            return "spent"
        return "held by a batch" if left_usd <= self.held_by_batches(key) else None

    def _spent_by(self, key: str) -> float:
        """With what older records say of its name alone."""
        name = key.partition(" ")[0]
        return self._spent[key] + (self._spent[name] if name != key else 0.0)

    def _tell(self, record_id: str, key: str, usd: float) -> None:
        self._spent[key] += usd
        self._told[record_id] = _Amount(key, usd, self._monotonic())


@functools.cache
def budgets_of(ledger: Path) -> Budgets:
    """The budgets of a ledger's keys, one object for this process.

    Ray builds the gate and the rest of the ingress from copies of what they are given, so neither can hand them to the
    other.
    """
    budgets = Budgets()
    totals_of(ledger).follow(budgets)
    return budgets
