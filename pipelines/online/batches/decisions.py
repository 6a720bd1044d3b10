"""Pure functions of the scheduler: which batch is next, how it runs, and how it ends."""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from peagle.economics.tags import tags_to_text
from peagle.economics.usage import UnitUsage
from pipelines.online.batches.lent import EndpointLender
from pipelines.online.batches.records import Batch, BatchProgress, BatchRequest, Status
from pipelines.online.batches.settings import BatchSettings
from pipelines.online.batches.store import BatchStore, output_id
from pipelines.online.batches.validation import Rules
from pipelines.online.batches.work import BUDGET, KEY_REVOKED, MODEL_WITHDRAWN, UNEXECUTED, Reason, Result, Task
from pipelines.online.gateway.admission import default_max_tokens

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
"""These reasons also become errors of the batch itself, since the client did not ask for its end."""


def fault(code: str, message: str) -> Errors:
    """Return OpenAI's error object for a whole batch."""
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
    """Return the final progress of a batch.

    Args:
        reason: why it ended early, or None.
        result: None if nothing was run.
        files: ids of the output and error files.
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
    """Return OpenAI's usage object of a batch."""
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }


_TEMPERATURE = 1.0  # OpenAI's default


def make_rules(request: BatchRequest, settings: BatchSettings) -> Rules:
    """Return the rules for the requests of a batch."""
    return Rules(
        endpoint=request.endpoint,
        key=request.key,
        models=tuple(batch_model.model for batch_model in settings.models.values()),
        max_output_tokens=settings.max_output_tokens,
        max_line_bytes=settings.max_line_bytes,
    )


def make_task(batch: Batch, settings: BatchSettings, store: BatchStore, *, budget_usd: float | None = None) -> Task:
    """Return the task for a validated batch."""
    request, model = batch.request, batch.progress.model
    assert model is not None, "its input was validated"
    batch_model = settings.models.get(model)
    return Task(
        batch_id=request.id,
        owner=request.key.name,
        account=request.key.account,
        model=model,
        input=str(store.input_path(request)),
        run=str(store.run_path(request.id)),
        errors=str(store.root / "files" / f"{output_id(batch, 'errors')}.jsonl"),
        config={} if batch_model is None else _run_config(request, settings, model),
        neighbours=None if batch_model is None else batch_model.neighbours,
        lender=None if batch_model is None or not batch_model.lent_slots else _lender(batch, settings, model),
        commits={} if batch_model is None else batch_model.commits,
        budget_usd=budget_usd,
    )


def _lender(batch: Batch, settings: BatchSettings, model: str) -> EndpointLender:
    key = batch.request.key
    return EndpointLender(
        deployment=settings.deployments[model],
        application=settings.application,
        batch_id=batch.id,
        key=key.name,
        account=key.account,
        tags=tags_to_text(settings.tags(model, key)),
        cache_salt=settings.cache_salt(key),
        num_slots=settings.models[model].lent_slots,
    )


def _run_config(request: BatchRequest, settings: BatchSettings, model: str) -> dict[str, Any]:
    """Return the bulk run's configuration, without input, output and budget."""
    config = settings.models[model].config
    return {**config, **_sampling(request, settings, model), "tags": settings.tags(model, request.key)}


def _sampling(request: BatchRequest, settings: BatchSettings, model: str) -> dict[str, Any]:
    """Return the sampling defaults of requests, the same as those of the routes."""
    served = settings.models[model].model
    return {
        "input_format": "openai-batch",
        "temperature": _TEMPERATURE,
        "max_tokens": default_max_tokens(request.endpoint, request.key, served, settings.max_output_tokens),
    }


def in_turn(batches: Sequence[Batch], running: Container[str], began: Mapping[str, int]) -> list[Batch]:
    """Return the batches in the order in which the scheduler handles them.

    Running ones first, since they may free capacity. Then batches of the keys with the fewest running ones, of the key
    that has waited longest, and the oldest.

    Args:
        batches: unfinished ones, oldest first.
        running: ids of batches with running work.
        began: sequence number of each key's latest start.
    """
    ahead = Counter(batch.request.key.name for batch in batches if batch.id in running)
    ranks: dict[str, int] = {}
    for batch in batches:
        owner = batch.request.key.name
        ranks[batch.id] = ahead[owner]
        if batch.id not in running:
            ahead[owner] += 1
    return sorted(
        batches,
        key=lambda batch: (batch.id not in running, ranks[batch.id], began.get(batch.request.key.name, 0)),
    )
