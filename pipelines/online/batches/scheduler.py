"""The life of a batch: checked, run, collected; cancelled, expired, restarted.

    validating -> in_progress -> finalizing -> completed
              \\-> failed      \\-> failed, expired, cancelled

It looks at the store and at work that is being done elsewhere, and writes down what it sees; one `tick` does all that
can be done at the moment. It knows neither Ray nor HTTP. Every step can be repeated: whoever schedules next begins
with what is written down.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from peagle.economics.ledger import SessionReader, write_batch
from peagle.errors import ConfigError, PeagleError, RunInUse
from peagle.runs.directory import RunDirectory
from pipelines.online.batches.actors import Handle, Runner
from pipelines.online.batches.decisions import Errors, ended, fault, in_turn, make_rules, make_task
from pipelines.online.batches.estimate import BatchEstimate, estimate
from pipelines.online.batches.money import BatchMoney
from pipelines.online.batches.records import Batch
from pipelines.online.batches.settings import BatchSettings
from pipelines.online.batches.store import BatchStore
from pipelines.online.batches.validation import Checked
from pipelines.online.batches.work import BUDGET, KEY_REVOKED, MODEL_WITHDRAWN, Reason, Result
from pipelines.online.gateway.keys import KeyRecord
from pipelines.online.gateway.shared import Payer
from pipelines.online.totals import totals_of

_LIGHT_AT_ONCE = 2  # processes that check or collect
_ATTEMPTS = 3
_COLLECT_ATTEMPTS = 10  # with longer and longer waits seven and a half minutes: what was made is there to be collected
_AGAIN_S = 10.0
_SWEEP_S = 60.0
_log = logging.getLogger("ray.serve")


@dataclass(slots=True)
class _Work:
    """The work under way for a batch.

    Attributes:
        has_engines: it counts among those that may be at work at once.
        estimate: of a run that holds no more than it may cost of its key's budget.
        reason: why it was asked to stop, or is only collected.
        errors: what the batch will say went wrong.
    """

    handle: Handle[Any]
    has_engines: bool = False
    estimate: BatchEstimate | None = None
    reason: Reason | None = None
    errors: Errors = ()


class Scheduler:
    """Drives all batches of a store.

    Args:
        spent_usd: as `BatchMoney` takes it.
        present_key: what the key of an order may do now; None if it was revoked. Without it keys stay as they were.
        now: Unix time, for what is only shown; things expire by the store's clock.
        monotonic: seconds; waits go by it.
    """

    def __init__(
        self,
        store: BatchStore,
        runner: Runner,
        settings: BatchSettings,
        *,
        spent_usd: Callable[[str], float | None],
        present_key: Callable[[KeyRecord], KeyRecord | None] | None = None,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._runner, self._settings = store, runner, settings
        self._now, self._monotonic = now, monotonic
        self._present_key = present_key or (lambda key: key)
        self._totals = totals_of(settings.ledger)
        self._money = BatchMoney(settings, spent_usd)
        self._sessions = SessionReader(settings.ledger)
        self._unfinished: list[Batch] = []
        self._works: dict[str, _Work] = {}
        self._attempts: Counter[str] = Counter()  # of the run, or of collecting once that is all that is left
        self._not_before: dict[str, float] = {}
        self._ends: dict[str, tuple[Reason, Errors]] = {}
        """Of batches that are only to be collected: an end that finds no room, or fails, comes again."""
        self._next_sweep = -math.inf
        self._began: Counter[str] = Counter()
        """When a key's work began last, as a number that grows."""

    def tick(self) -> None:
        """Do everything that can be done now; failures are tried by the next tick."""
        try:
            self._unfinished = self._store.unfinished()
            for batch in in_turn(self._unfinished, self._works, self._began):
                self._try_to_advance(batch)
            if self._monotonic() >= self._next_sweep:
                self._next_sweep = self._monotonic() + _SWEEP_S
                self._store.sweep()
        except (PeagleError, OSError) as error:
            _log.error("batches: the store does not answer: %s", error)

    def abandon(self) -> None:
        """Leave all of it as it is: somebody else goes on, or nobody for now."""
        for work in self._works.values():
            work.handle.kill()
        self._works.clear()
        self._ends.clear()
        self._attempts.clear()

    def _try_to_advance(self, batch: Batch) -> None:
        try:
            self._advance(batch)
        except (PeagleError, OSError) as error:
            _log.error("batch %s cannot go on: %s", batch.id, error)

    def _advance(self, batch: Batch) -> None:
        if key := self._present_key(batch.order.key):
            batch = replace(batch, order=replace(batch.order, key=key))
        work = self._works.get(batch.id)
        if work is not None:
            self._watch(batch, work)
        elif self._not_before.get(batch.id, -math.inf) <= self._monotonic():
            self._begin(batch)
            if batch.id in self._works:
                self._began[batch.order.key.name] = 1 + max(self._began.values(), default=0)

    # --- beginning

    def _begin(self, batch: Batch) -> None:
        if batch.id in self._ends:
            self._collect(batch, *self._ends[batch.id])
            return
        reason = self._reason_to_end(batch)
        is_checked = batch.progress.in_progress_at is not None
        if reason and is_checked:
            self._collect(batch, reason)
        elif reason:
            self._store.save(batch.id, ended(batch, reason, self._now()))
        elif is_checked:
            self._begin_run(batch)
        elif self._has_room():
            rules = make_rules(batch.order, self._settings)
            self._works[batch.id] = _Work(self._runner.check(str(self._store.input_place(batch.order)), rules))

    def _begin_run(self, batch: Batch) -> None:
        if sum(work.has_engines for work in self._works.values()) >= self._settings.at_once:
            return
        if batch.progress.model not in self._settings.recipes:
            message = f"the model {batch.progress.model!r} is not served any more"
            self._collect(batch, "batch_failed", fault("model_not_found", message))
            return
        budget_usd, estimated = None, None
        if payers := self._money.payers(batch):
            budget_usd, estimated = self._hold(batch, payers)
            if not budget_usd:
                return
        task = make_task(batch, self._settings, self._store, budget_usd=budget_usd)
        self._works[batch.id] = _Work(self._runner.run(task), has_engines=True, estimate=estimated)

    def _hold(self, batch: Batch, payers: Sequence[Payer]) -> tuple[float, BatchEstimate | None]:
        """Hold what a batch may cost of its budgets until its end; 0 if it must wait.

        That is the rest of them where there is no estimate.
        """
        if not self._is_its_turn(batch, payers) or (left_usd := self._money.left_usd(payers)) is None:
            return 0.0, None
        if min(left_usd) <= 0:
            self._collect(batch, BUDGET)
            return 0.0, None
        estimated = self._estimate(batch)
        wanted_usd = estimated.wanted_usd(0.0) if estimated else math.inf
        return self._money.hold(batch.id, payers, left_usd, wanted_usd), estimated

    def _estimate(self, batch: Batch) -> BatchEstimate | None:
        """The estimate of a batch that begins.

        None of one that goes on: nobody here knows what it has cost.
        """
        model = batch.progress.model
        if model is None or RunDirectory(self._store.run_place(batch.id)).exists:
            return None
        price = self._totals.prices.get(model)
        return estimate(batch.progress, self._settings.recipes[model], price, self._sessions.all())

    def _let_it_cost_more(self, batch: Batch, work: _Work, spent_usd: float) -> None:
        """Let a run's hold of its budgets grow with what it spends, while any is left.

        What lent engines took is spent already, by the ledger, so it is held no longer.
        """
        if work.estimate is None or not (payers := self._money.payers(batch)):
            return
        billed_usd = spent_usd if self._settings.lends else 0.0
        wanted_usd, held_usd = work.estimate.wanted_usd(spent_usd) - billed_usd, self._money.held_by(batch.id, payers)
        if (wanted_usd <= held_usd and not billed_usd) or (left_usd := self._money.left_usd(payers)) is None:
            return
        if now_usd := self._money.hold(batch.id, payers, left_usd, wanted_usd):
            work.handle.allow(billed_usd + now_usd)

    def _collect(self, batch: Batch, reason: Reason, errors: Errors = ()) -> None:
        if batch.id not in self._ends:
            self._ends[batch.id] = reason, errors
            self._attempts.pop(batch.id, None)
        if self._has_room():
            task = make_task(batch, self._settings, self._store)
            self._works[batch.id] = _Work(self._runner.collect(task, reason), reason=reason, errors=errors)

    def _has_room(self) -> bool:
        """For work without engines; what finds none comes again with the next tick."""
        return sum(not work.has_engines for work in self._works.values()) < _LIGHT_AT_ONCE

    def _is_its_turn(self, batch: Batch, payers: Sequence[Payer]) -> bool:
        """Whether no other batch of its budgets has begun.

        A batch's spending is known when it has ended, and two at once could each spend the rest.
        """
        # One at a time, the oldest first: often that is all, and a look can be remote.
        begun = (other.id for other in self._unfinished if self._has_begun(other, payers))
        return next(begun, batch.id) == batch.id

    def _has_begun(self, batch: Batch, payers: Sequence[Payer]) -> bool:
        """Whether it shares a budget and has begun.

        Also where it waits to be tried again, or another process began it.
        """
        own = self._money.payers(batch)
        names = {batch.order.key.name, *(payer.name for payer in own)}
        if names.isdisjoint(payer.name for payer in payers):
            return False
        return self._money.held_by(batch.id, own) > 0 or RunDirectory(self._store.run_place(batch.id)).exists

    def _reason_to_end(self, batch: Batch) -> Reason | None:
        if batch.cancelling_at is not None:
            return "batch_cancelled"
        if (key := self._present_key(batch.order.key)) is None:
            return KEY_REVOKED
        if key.models is not None and batch.progress.model not in (None, *key.models):
            return MODEL_WITHDRAWN
        return "batch_expired" if self._store.clock() >= batch.order.expires_at else None

    # --- going on

    def _watch(self, batch: Batch, work: _Work) -> None:
        if work.has_engines and work.reason is None and (reason := self._reason_to_end(batch)):
            work.reason = reason
            work.handle.stop(reason)
        try:
            answer = work.handle.poll()
        except PeagleError as error:
            self._break_off(batch, work, error)
            return
        if answer is None:
            self._note_counts(batch, work)
            return
        if isinstance(answer, Checked):
            self._note_check(batch, answer)
        else:
            self._finish(batch, work, answer)
        del self._works[batch.id]

    def _note_counts(self, batch: Batch, work: _Work) -> None:
        counts = work.handle.counts() if work.has_engines else None
        if counts is None:
            return
        num_completed, num_failed, usd = counts
        self._let_it_cost_more(batch, work, usd)
        before = batch.progress
        if num_completed + num_failed <= before.num_completed + before.num_failed:
            return  # nothing new, or a run that has just begun and has not looked at what is committed
        self._attempts.pop(batch.id, None)
        progress = replace(before, num_completed=num_completed, num_failed=num_failed)
        if num_completed + num_failed == before.num_requests and before.status == "in_progress":
            progress = replace(progress, status="finalizing", finalizing_at=self._now())
        self._store.save(batch.id, progress)

    def _note_check(self, batch: Batch, checked: Checked) -> None:
        progress = replace(
            batch.progress,
            num_requests=checked.num_requests,
            model=checked.model,
            prompt_tokens=checked.prompt_tokens,
            output_tokens=checked.output_tokens,
        )
        if checked.errors:
            progress = replace(progress, status="failed", failed_at=self._now(), errors=checked.errors)
        else:
            progress = replace(progress, status="in_progress", in_progress_at=self._now())
        self._store.save(batch.id, progress)

    def _finish(self, batch: Batch, work: _Work, result: Result) -> None:
        """Publish the files, write the account, and mark the batch last.

        Whoever is killed in between does it again.
        """
        now = self._now()
        if result.record is not None:
            write_batch(self._settings.ledger, result.record)
        self._money.settle(batch.id, result.record)
        files = self._store.add_outputs(batch, result.output, result.errors, now)
        self._store.save(batch.id, ended(batch, result.reason, now, result=result, files=files, errors=work.errors))
        self._ends.pop(batch.id, None)

    def _break_off(self, batch: Batch, work: _Work, error: PeagleError) -> None:
        """Handle work that ended with an error: try again later, a few times.

        Not where it would end in the same way.
        """
        del self._works[batch.id]
        if isinstance(error, RunInUse):
            self._not_before[batch.id] = self._monotonic() + _AGAIN_S
            return
        _log.error("batch %s: %s", batch.id, error)
        self._attempts[batch.id] += 1
        most = _COLLECT_ATTEMPTS if batch.id in self._ends else _ATTEMPTS
        if self._attempts[batch.id] < most and not isinstance(error, ConfigError):
            self._not_before[batch.id] = self._monotonic() + _AGAIN_S * self._attempts[batch.id]
            return
        errors = fault("internal_error", "the server failed while it worked on this batch")
        if work.has_engines:
            self._collect(batch, "batch_failed", errors)
        else:
            self._store.save(batch.id, ended(batch, "batch_failed", self._now(), errors=errors))
            # Last, and only now: until it has ended nobody else gets what it holds.
            self._money.settle(batch.id, None)
            self._ends.pop(batch.id, None)
