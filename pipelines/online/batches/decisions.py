"""The scheduler's decisions: whose batch is next, its run, how it ends.

Pure.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from peagle.economics.tags import tags_to_text
from peagle.economics.usage import UnitUsage
from pipelines.online.batches.lent import EndpointLender
from pipelines.online.batches.records import Batch, BatchProgress, Order, Status
from pipelines.online.batches.settings import BatchSettings
from pipelines.online.batches.store import BatchStore, output_id
from pipelines.online.batches.validation import Rules
from pipelines.online.batches.work import BUDGET, KEY_REVOKED, MODEL_WITHDRAWN, UNEXECUTED, Reason, Result, Task
from pipelines.online.gateway.admission import default_tokens

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
_OF_THE_KEY = (BUDGET, KEY_REVOKED, MODEL_WITHDRAWN)
"""Of what ends a batch because of its key the batch itself says so too: nobody asked for it here."""


def fault(code: str, message: str) -> Errors:
    """A whole batch's fault, as OpenAI's error object."""
    return ({"code": code, "message": message, "param": None, "line": None},)


def ended(
    batch: Batch,
    reason: Reason | None,
    now: float,
    *,
    result: Result | None = None,
    files: tuple[str | None, str | None] = (None, None),
    errors: Errors = (),
) -> BatchProgress:
    """The progress of a batch that has ended.

    Args:
        reason: why it ended early.
        result: what came of it; None if nothing was ever begun.
        files: ids of its output and of its errors.
    """
    before, status = batch.progress, _STATUS[reason]
    at: dict[str, Any] = {f"{status}_at": now}
    if reason in _OF_THE_KEY:
        errors = fault(reason, UNEXECUTED[reason])
    progress = replace(before, status=status, output_file_id=files[0], error_file_id=files[1], errors=errors, **at)
    if result is None:
        return progress
    return replace(
        progress,
        num_completed=result.num_completed,
        num_failed=result.num_failed,
        finalizing_at=before.finalizing_at or now,
        usage=None if result.usage is None else _usage(result.usage),
    )


def _usage(usage: UnitUsage) -> dict[str, Any]:
    """OpenAI's usage object of a batch."""
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }


_TEMPERATURE = 1.0  # what OpenAI's API gives a request that names none


def make_rules(order: Order, settings: BatchSettings) -> Rules:
    """The rules that the requests of a batch must keep."""
    return Rules(
        endpoint=order.endpoint,
        key=order.key,
        models=tuple(recipe.model for recipe in settings.recipes.values()),
        max_output_tokens=settings.max_output_tokens,
        max_line_bytes=settings.max_line_bytes,
    )


def make_task(batch: Batch, settings: BatchSettings, store: BatchStore, *, budget_usd: float | None = None) -> Task:
    """The work on a batch whose model is known."""
    order, model = batch.order, batch.progress.model
    assert model is not None, "its input was checked"
    recipe = settings.recipes.get(model)
    return Task(
        batch_id=order.id,
        owner=order.key.name,
        account=order.key.account,
        model=model,
        input=str(store.input_place(order)),
        run=str(store.run_place(order.id)),
        errors=str(store.root / "files" / f"{output_id(batch, 'errors')}.jsonl"),
        config={} if recipe is None else _run_config(order, settings, model),
        neighbours=None if recipe is None else recipe.neighbours,
        lender=None if recipe is None or not recipe.lent_slots else _lender(batch, settings, model),
        commits={} if recipe is None else recipe.commits,
        budget_usd=budget_usd,
    )


def _lender(batch: Batch, settings: BatchSettings, model: str) -> EndpointLender:
    key = batch.order.key
    return EndpointLender(
        deployment=settings.deployments[model],
        application=settings.application,
        batch_id=batch.id,
        key=key.name,
        account=key.account,
        tags=tags_to_text(settings.tags(model, key)),
        cache_salt=settings.cache_salt(key),
        num_slots=settings.recipes[model].lent_slots,
    )


def _run_config(order: Order, settings: BatchSettings, model: str) -> dict[str, Any]:
    """The keys of a batch's run, its input, output and budget aside."""
    config = settings.recipes[model].config
    return {**config, **_sampling(order, settings, model), "tags": settings.tags(model, order.key)}


def _sampling(order: Order, settings: BatchSettings, model: str) -> dict[str, Any]:
    """Sampling parameters for a silent request, as the routes would give it."""
    served = settings.recipes[model].model
    return {
        "input_format": "openai-batch",
        "temperature": _TEMPERATURE,
        "max_tokens": default_tokens(order.endpoint, order.key, served, settings.max_output_tokens),
    }


def in_turn(batches: Sequence[Batch], under_way: Container[str], began: Mapping[str, int]) -> list[Batch]:
    """The batches in the order in which they are looked at.

    First those under way, which may make room; then those of keys that have the least under way, then of the key that
    has waited longest for its turn, then the oldest.

    Args:
        batches: that have not ended, the oldest first.
        under_way: ids of those that are being worked on.
        began: by key, when its work began last, as a number that grows.
    """
    ahead = Counter(batch.order.key.name for batch in batches if batch.id in under_way)
    ranks: dict[str, int] = {}
    for batch in batches:
        owner = batch.order.key.name
        ranks[batch.id] = ahead[owner]
        if batch.id not in under_way:
            ahead[owner] += 1
    return sorted(
        batches,
        key=lambda batch: (batch.id not in under_way, ranks[batch.id], began.get(batch.order.key.name, 0)),
    )
