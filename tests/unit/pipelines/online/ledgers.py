"""Ledger records for tests."""

from dataclasses import replace

from peagle.economics.usage import RequestUsage, UnitUsage
from peagle.speculation import SpeculationStats

_USAGE = UnitUsage(
    session_id="s", num_rows=1, num_failed_rows=0, num_prompt_tokens=100, num_cached_tokens=0, num_output_tokens=41,
    busy_s=2.2, speculation=SpeculationStats.empty(), started_at=1000.0, finished_at=1002.2,
)  # fmt: skip


def make_request_usage(request_id="r", *, session_id="s", key="alice", model="m", usd=0.022, **changes):
    """Return a request on an otherwise idle engine that costs one cent per second.

    The engine needed 0.2 s for the prompt and the first token, and 2 s for 40 more tokens.
    """
    usage_changes = {name: changes.pop(name) for name in list(changes) if hasattr(_USAGE, name)}
    request = RequestUsage(
        request_id=request_id, key=key, model=model, drafter=None, outcome="ok", ttft_s=0.2, usd=usd,
        usage=replace(_USAGE, session_id=session_id, **usage_changes),
    )  # fmt: skip
    return replace(request, **changes)
