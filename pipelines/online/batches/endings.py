"""How a batch ends: the last word on its progress. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from peagle.economics.usage import UnitUsage
from pipelines.online.batches.records import Batch, Progress, Status
from pipelines.online.batches.work import BUDGET, KEY_REVOKED, MODEL_WITHDRAWN, UNEXECUTED, Reason, Result

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
    """What went wrong with a whole batch, as OpenAI's error object."""
    return ({"code": code, "message": message, "param": None, "line": None},)


def ended(
    batch: Batch,
    reason: Reason | None,
    now: float,
    *,
    result: Result | None = None,
    files: tuple[str | None, str | None] = (None, None),
    errors: Errors = (),
) -> Progress:
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
        usage=None if result.record is None else _usage(result.record.usage),
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
