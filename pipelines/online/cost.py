"""What the endpoint delivered and what that cost: by key, by model and in all, from its ledger.

Of a request, the cost is that of its share of an engine's busy seconds. What engines cost while they loaded or idled
belongs to nobody's request; it stands in the account of the whole. It knows records and prices, no HTTP.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from peagle.economics.cost import account
from peagle.economics.ledger import RequestReader, read_sessions
from peagle.economics.prices import Price
from peagle.economics.usage import RequestUsage
from peagle.speculation import SpeculationStats


class CostView:
    """The ledger, read as it grows."""

    def __init__(self, folder: Path, price: Price) -> None:
        self._folder = folder
        self._price = price
        self._reader = RequestReader(folder)
        self._requests: list[RequestUsage] = []

    def report(self, key: str | None = None, window_s: float | None = None) -> dict[str, Any]:
        """Figures ready for JSON.

        Args:
            key: only this one's requests, and nothing of the whole; None is everybody's.
            window_s: only requests that ended in the last so many seconds; the account of the whole is of all time.

        Raises:
            PeagleError: the ledger cannot be read.
        """
        self._requests += self._reader.new()
        since = time.time() - window_s if window_s is not None else 0.0
        chosen = [r for r in self._requests if r.usage.finished_at >= since and key in (None, r.key)]
        report: dict[str, Any] = {
            "window_s": window_s,
            "total": totals(chosen),
            "by_model": _grouped(chosen, lambda request: request.model),
        }
        if key is not None:
            return report
        whole = account((r.usage for r in self._requests), read_sessions(self._folder), self._price).to_dict()
        return report | {"by_key": _grouped(chosen, lambda request: request.key), "account": whole}


def totals(requests: Iterable[RequestUsage]) -> dict[str, Any]:
    """Sums over requests. Tokens per dollar are of busy time: no request pays for an idle engine."""
    requests = list(requests)
    tokens, usd = sum(r.usage.num_output_tokens for r in requests), sum(r.usd for r in requests)
    drafts = sum((r.usage.speculation for r in requests), SpeculationStats.empty())
    return {
        "num_requests": len(requests),
        "num_cut": sum(r.outcome == "cut" for r in requests),
        "num_failed": sum(r.outcome == "failed" for r in requests),
        "num_prompt_tokens": sum(r.usage.num_prompt_tokens for r in requests),
        "num_cached_tokens": sum(r.usage.num_cached_tokens for r in requests),
        "num_output_tokens": tokens,
        "num_draft_tokens": drafts.num_draft_tokens,
        "num_accepted_tokens": drafts.num_accepted_tokens,
        "acceptance_length": drafts.acceptance_length,
        "usd": usd,
        "tokens_per_busy_usd": tokens / usd if usd and tokens else None,
        "busy_usd_per_million_tokens": 1e6 * usd / tokens if usd and tokens else None,
    }


def _grouped(requests: list[RequestUsage], name_of: Callable[[RequestUsage], str]) -> dict[str, Any]:
    groups: defaultdict[str, list[RequestUsage]] = defaultdict(list)
    for request in requests:
        groups[name_of(request)].append(request)
    return {name: totals(group) for name, group in sorted(groups.items())}
