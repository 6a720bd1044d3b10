"""From a batch to the run that does it: which rules its requests keep to, and with which keys it runs. Pure."""

from typing import Any

from pipelines.online.batches.records import Batch, Order
from pipelines.online.batches.settings import BatchSettings
from pipelines.online.batches.store import BatchStore, output_id
from pipelines.online.batches.validation import Rules
from pipelines.online.batches.work import Task
from pipelines.online.requests import default_tokens

_TEMPERATURE = 1.0  # what OpenAI's API gives a request that names none


def make_rules(order: Order, settings: BatchSettings) -> Rules:
    """What the requests of a batch are held against."""
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
        config={} if recipe is None else {**recipe.config, **_sampling(order, settings, model)},
        neighbours=None if recipe is None else recipe.neighbours,
        commits={} if recipe is None else recipe.commits,
        budget_usd=budget_usd,
    )


def _sampling(order: Order, settings: BatchSettings, model: str) -> dict[str, Any]:
    """What a request gets that does not say: what the routes themselves would give it."""
    served = settings.recipes[model].model
    return {
        "input_format": "openai-batch",
        "temperature": _TEMPERATURE,
        "max_tokens": default_tokens(order.endpoint, order.key, served, settings.max_output_tokens),
    }
