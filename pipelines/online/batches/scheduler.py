"""The life cycle of a batch.

    validating -> in_progress -> finalizing -> completed
              \\-> failed      \\-> failed, expired, cancelled

`tick` compares the store with running work and does the next steps. Every step is idempotent: after a restart, the
next scheduler continues from the stored state.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from peagle.economics.ledger import SessionReader, write_batch
from peagle.economics.tags import tags_to_text
from peagle.economics.usage import EngineSession, RequestUsage
from peagle.errors import ConfigError, PeagleError, RunInUse
from peagle.runs.directory import RunDirectory
from peagle.runs.scaling import EngineRange
from pipelines.batch.config import GenerateConfig
from pipelines.batch.request import max_shutdown_s
from pipelines.online.batches.lent import EndpointLender
from pipelines.online.batches.records import Batch, BatchProgress, Status
from pipelines.online.batches.settings import BatchModel, BatchSettings
from pipelines.online.batches.store import BatchStore, output_id
from pipelines.online.batches.validation import BatchRules, CheckedInput
from pipelines.online.batches.work import (
    BUDGET,
    KEY_REVOKED,
    MODEL_WITHDRAWN,
    UNEXECUTED_MESSAGES,
    BatchResult,
    BatchTask,
    Handle,
    Reason,
    Runner,
)
from pipelines.online.budgets import account_of, accounts_of
from pipelines.online.gateway.admission import default_max_tokens
from pipelines.online.gateway.keys import KeyRecord, Payer, SharedBudgets
from pipelines.online.totals import TokenPrice, totals_of
from pipelines.online.wire import Context

Errors = tuple[Mapping[str, Any], ...]
_STATUS: Mapping[Reason | None, Status] = {
    None: "completed",
    "batch_cancelled": "cancelled",
    "batch_expired": "expired",
    "batch_failed": "failed",
    BUDGET: "failed",
    KEY_REVOKED: "cancelled",
    MODEL_WITHDRAWN: "failed",
}


def batch_error(code: str, message: str) -> Errors:
    """Return the errors of a batch that failed as a whole: a single error object of OpenAI's API."""
    return ({"code": code, "message": message, "param": None, "line": None},)


def final_progress(
    batch: Batch,
    reason: Reason | None,
    now: float,
    *,
    result: BatchResult | None = None,
    files: tuple[str | None, str | None] = (None, None),
    errors: Errors = (),
) -> BatchProgress:
    """Return the final progress of a batch with the ids of its output and error files."""
    old_progress, status = batch.progress, _STATUS[reason]
    time_of_end: dict[str, Any] = {f"{status}_at": now}
    if reason in (BUDGET, KEY_REVOKED, MODEL_WITHDRAWN):  # inform the client, because it did not cancel the batch
        errors = batch_error(reason, UNEXECUTED_MESSAGES[reason])
    progress = replace(
        old_progress, status=status, output_file_id=files[0], error_file_id=files[1], errors=errors, **time_of_end
    )
    if result is None:
        return progress
    usage = None
    if result.usage is not None:
        num_prompt, num_output = result.usage.num_prompt_tokens, result.usage.num_output_tokens
        usage = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": result.usage.num_cached_tokens},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_output,
        }
    return replace(
        progress,
        num_completed=result.num_completed,
        num_failed=result.num_failed,
        finalizing_at=old_progress.finalizing_at or now,
        usage=usage,
    )


def make_task(
    batch: Batch, settings: BatchSettings, store: BatchStore, *, budget_usd: float | None = None
) -> BatchTask:
    """Return the task of a batch whose input is valid."""
    request, model = batch.request, batch.progress.model
    assert model is not None, "its input was validated"
    key, batch_model = request.key, settings.models.get(model)
    config: dict[str, Any] = {}
    lender, tags = None, settings.tags(model, key)
    if batch_model is not None:
        # The process of the batch adds input, output and budget. Sampling defaults are the same as in the API's routes.
        config = {
            **batch_model.config,
            "input_format": "openai-batch",
            "temperature": 1.0,  # OpenAI's default
            "max_tokens": default_max_tokens(request.endpoint, key, batch_model.model, settings.max_output_tokens),
            "tags": tags,
        }
    if batch_model is not None and batch_model.lent_slots:
        lender = EndpointLender(
            deployment=settings.deployments[model],
            application=settings.application,
            context=Context(request_id=batch.id, key=key.name, account=key.account, tags=tags_to_text(tags)),
            cache_salt=settings.cache_salt(key),
            num_slots=batch_model.lent_slots,
        )
    return BatchTask(
        batch_id=request.id,
        owner=key.name,
        account=key.account,
        model=model,
        input=str(store.input_path(request)),
        run=str(store.run_path(request.id)),
        errors=str(store.root / "files" / f"{output_id(batch, 'errors')}.jsonl"),
        config=config,
        neighbours=None if batch_model is None else batch_model.neighbours,
        lender=lender,
        commits={} if batch_model is None else batch_model.commits,
        budget_usd=budget_usd,
    )


def scheduling_order(
    batches: Sequence[Batch], running: Container[str], start_numbers: Mapping[str, int]
) -> list[Batch]:
    """Return the batches in the order in which the scheduler handles them.

    Running batches come first, since they may free capacity. The others are sorted by how many batches of the same key
    come before them, then by when the key's latest batch started, then by age.

    Args:
        batches: the batches, oldest first.
        running: ids of the running batches.
        start_numbers: sequence number of the latest start, by key name.
    """
    num_ahead = Counter(batch.request.key.name for batch in batches if batch.id in running)
    ranks: dict[str, int] = {}
    for batch in batches:
        owner = batch.request.key.name
        ranks[batch.id] = num_ahead[owner]
        if batch.id not in running:
            num_ahead[owner] += 1
    return sorted(
        batches,
        key=lambda batch: (batch.id not in running, ranks[batch.id], start_numbers.get(batch.request.key.name, 0)),
    )


# --- costs
#
# A batch reserves the same amount in each budget that applies (key, tags, endpoint) until it ends, so it can cost at
# most what the smallest of them has left. Tokens are priced like recent requests of the same model, engine starts and
# shutdowns like the endpoint's. The estimate is not a limit: the reservation grows with the actual cost.


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEstimate:
    """The expected cost of a batch in US dollars: its tokens, and starting and stopping its engines."""

    tokens_usd: float
    overhead_usd: float

    def wanted_usd(self, spent_usd: float) -> float:
        """Return the amount to reserve after `spent_usd` were spent.

        A run stops when the unspent part of its reservation no longer covers its shutdown. Reserving at least twice the
        spend prevents that between two ticks.
        """
        return max(self.tokens_usd, 2 * spent_usd) + self.overhead_usd


def estimate(
    progress: BatchProgress, batch_model: BatchModel, price: TokenPrice | None, sessions: Iterable[EngineSession]
) -> BatchEstimate | None:
    """Return the expected cost of a validated batch.

    Returns None if the model has not answered requests yet, or none of its engines has started. `sessions` are those
    of the endpoint's engines.
    """
    tokens_usd = price and price.expected_usd(
        prompt_tokens=progress.prompt_tokens, output_tokens=progress.output_tokens
    )
    started_sessions = [
        session for session in sessions if session.model == progress.model and (session.busy_s or session.idle_s)
    ]
    if not tokens_usd or not started_sessions:
        return None
    shutdown_s = max_shutdown_s(GenerateConfig.model_fields["grace_s"].default)
    is_lent = bool(batch_model.lent_slots)  # then the endpoint's engines are already loaded
    usd_per_engine = max(
        ((0.0 if is_lent else session.load_s + session.compile_s) + shutdown_s)
        * session.num_devices
        * session.usd_per_device_s
        for session in started_sessions
    )
    return BatchEstimate(
        tokens_usd=tokens_usd, overhead_usd=EngineRange.parse(batch_model.config["engines"]).largest * usd_per_engine
    )


class BatchMoney:
    """Reserves and settles the cost of batches.

    `spent_usd` returns the current spend of an account including ended batches; None if unknown.
    """

    def __init__(self, settings: BatchSettings, spent_usd: Callable[[str], float | None]) -> None:
        self._settings, self._spent_usd = settings, spent_usd
        self._budgets = totals_of(settings.ledger).budgets
        self._shared = SharedBudgets(settings.ledger)

    def payers(self, batch: Batch) -> list[Payer]:
        """Return the budgets to which the batch is charged: those of its key, its tags and the endpoint."""
        key, tags = batch.request.key, tags_to_text(self._settings.tags(batch.progress.model, batch.request.key))
        key_payers: list[Payer] = [key] if key.budget_usd is not None else []
        return [*key_payers, *self._shared.of_tags(tags), *self._shared.of_endpoint()]

    def left_usd(self, payers: Sequence[Payer]) -> list[float] | None:
        """Return what is left of each budget, ignoring reservations. None if the spend is still unknown."""
        left_usd = []
        for payer in payers:
            limit_usd = self._budgets.spending_limit(payer.account, payer.budget_usd, payer.budget_every)
            if (spent_usd := self._spent_usd(payer.account)) is None:
                return None
            assert limit_usd is not None, "payers have a budget"
            left_usd.append(limit_usd - spent_usd)
        return left_usd

    def hold(self, batch_id: str, payers: Sequence[Payer], left_usd: Sequence[float], wanted_usd: float) -> float:
        """Reserve the same amount in all budgets, replacing the previous reservation. Returns the amount.

        If a budget has nothing left, the previous reservation stays and 0 is returned.
        """
        previous_usd = {payer.account: self._budgets.reserved_by_batch(batch_id, payer.account) for payer in payers}
        held_usd = wanted_usd
        for _ in range(2):  # the second pass reserves the smallest amount everywhere
            for payer, payer_left_usd in zip(payers, left_usd, strict=True):
                held_usd = min(held_usd, self._budgets.reserve_batch(batch_id, payer.account, payer_left_usd, held_usd))
            if held_usd <= 0:
                for account, usd in previous_usd.items():
                    self._budgets.restore_batch_reservation(batch_id, account, usd)
                return 0.0
        return held_usd

    def held_by(self, batch_id: str, payers: Sequence[Payer]) -> float:
        return min((self._budgets.reserved_by_batch(batch_id, payer.account) for payer in payers), default=0.0)

    def settle(self, batch_id: str, record: RequestUsage | None) -> None:
        """Replace the reservations of an ended batch with its cost; `record` is None if nothing ran."""
        accounts = accounts_of(account_of(record), record.tags, is_batch=True) if record else ()
        self._budgets.settle_batch(batch_id, accounts, record.usd if record else 0.0)


_MAX_WITHOUT_ENGINES = 2  # concurrent processes that validate inputs or collect results
_RUN_ATTEMPTS = 3
_COLLECT_ATTEMPTS = 10  # over 7.5 minutes; many, since the results already exist
_RETRY_S = 10.0
_SWEEP_S = 60.0
_log = logging.getLogger("ray.serve")


@dataclass(slots=True)
class _Work:
    """Running work for a batch."""

    handle: Handle[Any]
    has_engines: bool = False  # whether the work counts toward `max_concurrent`
    estimate: BatchEstimate | None = None  # set if the run reserves its expected cost rather than the rest of a budget
    reason: Reason | None = None  # why the run was stopped, or why its results are only collected
    errors: Errors = ()


class Scheduler:
    """Drives all batches of a store. Expiry uses the store's clock; `now` is only for display.

    `current_key` returns a key with its current limits, or None if it was revoked. By default keys never change.
    """

    def __init__(
        self,
        store: BatchStore,
        runner: Runner,
        settings: BatchSettings,
        *,
        spent_usd: Callable[[str], float | None],
        current_key: Callable[[KeyRecord], KeyRecord | None] | None = None,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._runner, self._settings = store, runner, settings
        self._now, self._monotonic = now, monotonic
        self._current_key = current_key or (lambda key: key)
        self._totals = totals_of(settings.ledger)
        self._money = BatchMoney(settings, spent_usd)
        self._sessions = SessionReader(settings.ledger)
        self._unfinished: list[Batch] = []
        self._running: dict[str, _Work] = {}
        self._attempts: Counter[str] = Counter()  # failed attempts to validate or run, and later to collect
        self._retry_at: dict[str, float] = {}
        self._to_collect: dict[str, tuple[Reason, Errors]] = {}
        """Batches whose results only need to be collected, until a collection succeeds."""
        self._next_sweep = -math.inf
        self._start_numbers: Counter[str] = Counter()
        """Sequence number of the latest start, by key name."""

    def tick(self) -> None:
        """Do all possible steps. Failed steps are retried by a later tick."""
        try:
            self._unfinished = self._store.unfinished()
            for batch in scheduling_order(self._unfinished, self._running, self._start_numbers):
                try:
                    self._advance(batch)
                except (PeagleError, OSError) as error:
                    _log.error("batch %s: %s; it will be retried", batch.id, error)
            if self._monotonic() >= self._next_sweep:
                self._next_sweep = self._monotonic() + _SWEEP_S
                self._store.sweep()
        except (PeagleError, OSError) as error:
            _log.error("batches: the store is unavailable: %s", error)

    def abandon(self) -> None:
        """Stop all work, so that another scheduler can continue it."""
        for work in self._running.values():
            work.handle.kill()
        self._running.clear()
        self._to_collect.clear()
        self._attempts.clear()

    def _advance(self, batch: Batch) -> None:
        if key := self._current_key(batch.request.key):
            batch = replace(batch, request=replace(batch.request, key=key))
        work = self._running.get(batch.id)
        if work is not None:
            self._watch(batch, work)
        elif self._retry_at.get(batch.id, -math.inf) <= self._monotonic():
            self._begin(batch)
            if batch.id in self._running:
                self._start_numbers[batch.request.key.name] = 1 + max(self._start_numbers.values(), default=0)

    # --- start

    def _begin(self, batch: Batch) -> None:
        if batch.id in self._to_collect:
            self._collect(batch, *self._to_collect[batch.id])
            return
        reason = self._reason_to_end(batch)
        is_validated = batch.progress.in_progress_at is not None
        if reason and is_validated:
            self._collect(batch, reason)
        elif reason:
            self._store.save(batch.id, final_progress(batch, reason, self._now()))
        elif is_validated:
            self._begin_run(batch)
        elif self._has_room():
            rules = BatchRules(
                endpoint=batch.request.endpoint,
                key=batch.request.key,
                models=tuple(batch_model.model for batch_model in self._settings.models.values()),
                max_output_tokens=self._settings.max_output_tokens,
                max_line_bytes=self._settings.max_line_bytes,
            )
            self._running[batch.id] = _Work(self._runner.check(str(self._store.input_path(batch.request)), rules))

    def _begin_run(self, batch: Batch) -> None:
        if sum(work.has_engines for work in self._running.values()) >= self._settings.max_concurrent:
            return
        if batch.progress.model not in self._settings.models:
            message = f"the model {batch.progress.model!r} is no longer served"
            self._collect(batch, "batch_failed", batch_error("model_not_found", message))
            return
        budget_usd, batch_estimate = None, None
        if payers := self._money.payers(batch):
            budget_usd, batch_estimate = self._reserve_expected_cost(batch, payers)
            if not budget_usd:
                return
        task = make_task(batch, self._settings, self._store, budget_usd=budget_usd)
        self._running[batch.id] = _Work(self._runner.run(task), has_engines=True, estimate=batch_estimate)

    def _reserve_expected_cost(self, batch: Batch, payers: Sequence[Payer]) -> tuple[float, BatchEstimate | None]:
        """Reserve the expected cost of a batch, or all that is left of its budgets if there is no estimate.

        Returns the reserved US dollars (0 if the batch must wait) and the estimate.
        """
        if not self._may_reserve(batch, payers) or (left_usd := self._money.left_usd(payers)) is None:
            return 0.0, None
        if min(left_usd) <= 0:
            self._collect(batch, BUDGET)
            return 0.0, None
        batch_estimate = self._estimate(batch)
        wanted_usd = batch_estimate.wanted_usd(0.0) if batch_estimate else math.inf
        return self._money.hold(batch.id, payers, left_usd, wanted_usd), batch_estimate

    def _estimate(self, batch: Batch) -> BatchEstimate | None:
        """Return the estimated cost of a new batch, or None for a resumed one, whose previous cost is unknown."""
        model = batch.progress.model
        if model is None or RunDirectory(self._store.run_path(batch.id)).exists:
            return None
        price = self._totals.prices.get(model)
        return estimate(batch.progress, self._settings.models[model], price, self._sessions.all())

    def _raise_reservation(self, batch: Batch, work: _Work, spent_usd: float) -> None:
        """Raise a run's reservation as the run spends, while budgets last."""
        if work.estimate is None or not (payers := self._money.payers(batch)):
            return
        # The ledger already includes the cost of borrowed engines.
        billed_usd = spent_usd if self._settings.uses_idle_slots else 0.0
        wanted_usd, held_usd = work.estimate.wanted_usd(spent_usd) - billed_usd, self._money.held_by(batch.id, payers)
        if (wanted_usd <= held_usd and not billed_usd) or (left_usd := self._money.left_usd(payers)) is None:
            return
        if new_held_usd := self._money.hold(batch.id, payers, left_usd, wanted_usd):
            work.handle.set_cost_limit(billed_usd + new_held_usd)

    def _collect(self, batch: Batch, reason: Reason, errors: Errors = ()) -> None:
        if batch.id not in self._to_collect:
            self._to_collect[batch.id] = reason, errors
            self._attempts.pop(batch.id, None)
        if self._has_room():
            task = make_task(batch, self._settings, self._store)
            self._running[batch.id] = _Work(self._runner.collect(task, reason), reason=reason, errors=errors)

    def _has_room(self) -> bool:
        """Return whether another process without engines may start."""
        return sum(not work.has_engines for work in self._running.values()) < _MAX_WITHOUT_ENGINES

    def _may_reserve(self, batch: Batch, payers: Sequence[Payer]) -> bool:
        """Return whether this batch is the oldest started one among those that share a budget, or none has started.

        The cost of a batch is only known at its end, so two batches could each spend the rest of the budget.
        """
        # Lazy, oldest first: usually the first batch decides, and each check may be a network request.
        begun_ids = (other.id for other in self._unfinished if self._has_begun(other, payers))
        return next(begun_ids, batch.id) == batch.id

    def _has_begun(self, batch: Batch, payers: Sequence[Payer]) -> bool:
        """Return whether a batch shares a budget with `payers` and has started, even if it waits for a retry."""
        own_payers = self._money.payers(batch)
        names = {batch.request.key.name, *(payer.name for payer in own_payers)}
        if names.isdisjoint(payer.name for payer in payers):
            return False
        return self._money.held_by(batch.id, own_payers) > 0 or RunDirectory(self._store.run_path(batch.id)).exists

    def _reason_to_end(self, batch: Batch) -> Reason | None:
        if batch.cancelling_at is not None:
            return "batch_cancelled"
        if (key := self._current_key(batch.request.key)) is None:
            return KEY_REVOKED
        if key.models is not None and batch.progress.model not in (None, *key.models):
            return MODEL_WITHDRAWN
        return "batch_expired" if self._store.clock() >= batch.request.expires_at else None

    # --- running and finished work

    def _watch(self, batch: Batch, work: _Work) -> None:
        if work.has_engines and work.reason is None and (reason := self._reason_to_end(batch)):
            work.reason = reason
            work.handle.stop(reason)
        try:
            result = work.handle.poll()
        except PeagleError as error:
            self._on_error(batch, work, error)
            return
        if result is None:
            self._save_counts(batch, work)
            return
        if isinstance(result, CheckedInput):
            self._save_check(batch, result)
        else:
            self._finish(batch, work, result)
        del self._running[batch.id]

    def _save_counts(self, batch: Batch, work: _Work) -> None:
        counts = work.handle.counts() if work.has_engines else None
        if counts is None:
            return
        num_completed, num_failed, usd = counts
        self._raise_reservation(batch, work, usd)
        old_progress = batch.progress
        if num_completed + num_failed <= old_progress.num_completed + old_progress.num_failed:
            return  # no progress, or a resumed run that has not counted its committed rows
        self._attempts.pop(batch.id, None)
        progress = replace(old_progress, num_completed=num_completed, num_failed=num_failed)
        if num_completed + num_failed == old_progress.num_requests and old_progress.status == "in_progress":
            progress = replace(progress, status="finalizing", finalizing_at=self._now())
        self._store.save(batch.id, progress)

    def _save_check(self, batch: Batch, checked: CheckedInput) -> None:
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

    def _finish(self, batch: Batch, work: _Work, result: BatchResult) -> None:
        """Publish the files, record the cost, and save the final status last: after a crash, everything is repeated."""
        now = self._now()
        if result.record is not None:
            write_batch(self._settings.ledger, result.record)
        self._money.settle(batch.id, result.record)
        files = self._store.add_outputs(batch, result.output, result.errors, now)
        progress = final_progress(batch, result.reason, now, result=result, files=files, errors=work.errors)
        self._store.save(batch.id, progress)
        self._to_collect.pop(batch.id, None)

    def _on_error(self, batch: Batch, work: _Work, error: PeagleError) -> None:
        del self._running[batch.id]
        if isinstance(error, RunInUse):
            self._retry_at[batch.id] = self._monotonic() + _RETRY_S
            return
        _log.error("batch %s: %s", batch.id, error)
        self._attempts[batch.id] += 1
        max_attempts = _COLLECT_ATTEMPTS if batch.id in self._to_collect else _RUN_ATTEMPTS
        if self._attempts[batch.id] < max_attempts and not isinstance(error, ConfigError):
            self._retry_at[batch.id] = self._monotonic() + _RETRY_S * self._attempts[batch.id]
            return
        errors = batch_error("internal_error", "the server failed while processing this batch")
        if work.has_engines:
            self._collect(batch, "batch_failed", errors)
        else:
            self._store.save(batch.id, final_progress(batch, "batch_failed", self._now(), errors=errors))
            # Last: the reservation must stay until the batch has ended.
            self._money.settle(batch.id, None)
            self._to_collect.pop(batch.id, None)
