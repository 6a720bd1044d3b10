"""Budgets of keys, tags and the endpoint: money spent, and money held.

The gate lets requests in and the scheduler begins batches, each in a thread of its own, and both spend what is left of
the same budget. So each holds here what it may cost from its start to its end, in one step with the look at what is
left. A key has spent what the ledger says, and what an answer has told that the ledger does not say yet. Each
request and batch has an id, by which the two are never added. It knows neither HTTP nor files; the price of a request
is the gate's matter (`limits.py`).

What is spent is kept by account: a key's, one of each tag, and the endpoint's. A request counts in its key's and its
tags', a batch in the endpoint's as well. The engines' seconds and the draws of bulk runs are told now and then.

A budget is for all time, or for each day, week or month of UTC. What was spent before the period is added to it, so all
else here compares one sum with all that was ever spent.
"""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from typing import Literal, NamedTuple

from peagle.economics.shared_budgets import ENDPOINT_ACCOUNT, ByDay, Every, period_of, tag_accounts
from peagle.economics.spending import day_number, day_of, today
from peagle.economics.usage import RequestUsage

Refusal = Literal["spent", "held by a batch", "held by requests"]


class _Told(NamedTuple):
    """Settled, and not read in the ledger yet."""

    usd: float
    at: float


class Budgets:
    """US dollars that are spent, and those that are held, by account.

    Attributes:
        read_usd: what the ledger says that accounts have spent, on requests and batches.
        read_by_day: the same by UTC day.
        read_batches: ids of the batches in it.
    """

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic, day: Callable[[], date] = today) -> None:
        self._monotonic = monotonic
        self._day = day
        self._lock = threading.RLock()
        self.read_usd: dict[str, float] = {}
        self.read_by_day: ByDay = {}
        self._never_said: ByDay = {}  # told, and waited for in vain
        self._elsewhere: ByDay = {}  # by engines and bulk runs
        self._held_elsewhere: Mapping[str, float] = {}
        self.read_batches: set[str] = set()
        self._told: dict[tuple[str, str], _Told] = {}  # by id and account
        self._told_usd: defaultdict[str, float] = defaultdict(float)  # with what the ledger never said
        self._requests: defaultdict[str, dict[str, float]] = defaultdict(dict)  # under way: by account, by id
        self._batches: defaultdict[str, dict[str, float]] = defaultdict(dict)  # likewise

    # --- the ledger

    def restore(self, read_by_day: Mapping[str, Mapping[int, float]], read_batches: Iterable[str]) -> None:
        """Begin with what was read of the ledger before."""
        with self._lock:
            self.read_by_day.update({account: dict(days) for account, days in read_by_day.items()})
            self.read_usd.update({account: sum(days.values()) for account, days in read_by_day.items()})
            self.read_batches.update(read_batches)

    def hear(self, request: RequestUsage) -> None:
        """The ledger says what a request or a batch has cost: in place of what was told."""
        with self._lock:
            for account in accounts_of(account_of(request), request.tags, is_batch=request.is_batch):
                if told := self._told.pop((request.request_id, account), None):
                    self._told_usd[account] -= told.usd
                self.read_usd[account] = self.read_usd.get(account, 0.0) + request.usd
                _add(self.read_by_day, account, day_of(request.usage.finished_at), request.usd)
                self._requests[account].pop(request.request_id, None)
                self._batches[account].pop(request.request_id, None)
            if request.is_batch:
                self.read_batches.add(request.request_id)

    def know_elsewhere(self, spent: ByDay, held: Mapping[str, float]) -> None:
        """Replace what is known of engines and bulk runs.

        Args:
            spent: by them until now.
            held: by account.
        """
        with self._lock:
            self._elsewhere, self._held_elsewhere = spent, held

    # --- requests

    def allowed_usd(self, account: str, budget_usd: float | None, every: Every | None) -> float | None:
        """All that an account may ever have spent by the end of this period.

        None is no limit.

        Args:
            every: the period of its budget; None is all time.
        """
        if budget_usd is None or every is None:
            return budget_usd
        first = day_number(period_of(every, self._day())[0])
        with self._lock:
            all_spent = (self.read_by_day, self._never_said, self._elsewhere)
            spent = [by_day.get(name, {}) for by_day in all_spent for name in _names(account)]
            return budget_usd + sum(usd for days in spent for day, usd in days.items() if day < first)

    def refusal(self, account: str, budget_usd: float | None, *, is_free: bool = False) -> Refusal | None:
        """Why nothing may begin on this account, or nothing that costs anything.

        None if it may.
        """
        with self._lock:
            refusal = self._refusal(account, budget_usd)
            return None if is_free and refusal == "held by a batch" else refusal

    def hold_request(
        self, request_id: str, account: str, budget_usd: float | None, usd: float | None
    ) -> Refusal | None:
        """Hold what a request may cost, or say why it cannot begin.

        One that is alone under way gets in with whatever is left. One of which nobody knows what it may cost gets in
        only so, and holds all of it.
        """
        with self._lock:
            held_usd = usd or 0.0
            if budget_usd is not None:
                if refusal := self._refusal(account, budget_usd):
                    return refusal
                others = self._requests[account].values()
                left_usd = budget_usd - self._spent_by(account) - self.held_by_batches(account)
                if others and (usd is None or sum(others) + usd > left_usd):
                    return "held by requests"
                held_usd = left_usd if usd is None else usd
            self._requests[account][request_id] = held_usd
            return None

    def settle_request(self, request_id: str, account: str, usd: float) -> None:
        """A request has ended and cost as much, unless the ledger has said so before."""
        with self._lock:
            if self._requests[account].pop(request_id, None) is not None:
                self._tell(request_id, account, usd)

    def let_go(self, request_id: str, account: str) -> None:
        """Nothing will be told of a request; should the ledger name it yet, that counts."""
        with self._lock:
            self._requests[account].pop(request_id, None)

    def forget(self, before: float) -> None:
        """Stop waiting for the ledger's records of requests settled before this time.

        They stay spent.
        """
        with self._lock:
            while self._told:
                (request_id, account), told = next(iter(self._told.items()))
                if told.at >= before:
                    return
                del self._told[request_id, account]
                _add(self._never_said, account, day_number(self._day()), told.usd)

    # --- batches

    def hold_batch(self, batch_id: str, account: str, left_usd: float, wanted_usd: float = math.inf) -> float:
        """Hold a part of a budget for a batch, and return how much that is.

        It is what is wanted, and no more than the rest without what requests and other batches hold. It replaces what
        the batch held before; nothing changes where there is no rest.
        """
        with self._lock:
            others_usd = sum(self._requests[account].values())
            others_usd += self.held_by_batches(account) - self.held_by(batch_id, account)
            held_usd = min(wanted_usd, left_usd - others_usd)
            if held_usd > 0:
                self._batches[account][batch_id] = held_usd
            return max(0.0, held_usd)

    def hold_as_before(self, batch_id: str, account: str, usd: float) -> None:
        """Have a batch hold what it held before of an account, which may be nothing."""
        with self._lock:
            self._batches[account].pop(batch_id, None)
            if usd:
                self._batches[account][batch_id] = usd

    def settle_batch(self, batch_id: str, accounts: Iterable[str], usd: float) -> None:
        """Settle a batch that has ended at that cost, which counts in these accounts.

        It holds nothing any more. Saying it again, as the ledger does, changes nothing.
        """
        with self._lock:
            for held in self._batches.values():
                held.pop(batch_id, None)
            for account in accounts:
                if (batch_id, account) not in self._told and batch_id not in self.read_batches:
                    self._tell(batch_id, account, usd)

    def held_by(self, batch_id: str, account: str) -> float:
        """The money of an account that a batch holds from its begin to its end."""
        return self._batches[account].get(batch_id, 0.0)

    def held_by_batches(self, account: str) -> float:
        """The money of an account that batches and bulk runs under way may still spend."""
        with self._lock:
            return sum(self._batches[account].values()) + self._held_elsewhere.get(account, 0.0)

    def spent_usd(self, account: str) -> float:
        """The money that is spent of an account, ended batches included."""
        with self._lock:
            return self._spent_by(account)

    # --- with the lock

    def _refusal(self, account: str, budget_usd: float | None) -> Refusal | None:
        if budget_usd is None:
            return None
        left_usd = budget_usd - self._spent_by(account)
        if left_usd <= 0:
            return "spent"
        return "held by a batch" if left_usd <= self.held_by_batches(account) else None

    def _spent_by(self, account: str) -> float:
        """With what older records say of a key's name alone."""
        elsewhere_usd = sum(self._elsewhere.get(account, {}).values())
        return elsewhere_usd + sum(
            self.read_usd.get(name, 0.0) + self._told_usd.get(name, 0.0) for name in _names(account)
        )

    def _tell(self, record_id: str, account: str, usd: float) -> None:
        self._told_usd[account] += usd
        self._told[record_id, account] = _Told(usd, self._monotonic())


def _add(by_day: ByDay, account: str, day: int, usd: float) -> None:
    days = by_day.setdefault(account, {})
    days[day] = days.get(day, 0.0) + usd


def _names(account: str) -> set[str]:
    """The names under which an account's spending is found.

    A key's older records have its name alone.
    """
    return {account} if "=" in account else {account, account.partition(" ")[0]}


def accounts_of(key_account: str, tags: str, *, is_batch: bool) -> tuple[str, ...]:
    """All accounts in which a request or a batch counts.

    >>> accounts_of("alice", '{"team": "search"}', is_batch=True)
    ('alice', 'team=search', '*')
    """
    return (key_account, *tag_accounts(tags), *([ENDPOINT_ACCOUNT] if is_batch else []))


def account_of(request: RequestUsage) -> str:
    """The account of a request: its key's, or its name in an older record.

    There were no accounts before.
    """
    return request.account or request.key
