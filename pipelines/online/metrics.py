"""What the ledger learns, as Prometheus metrics through Ray's exporter; vLLM's own come beside them from Ray Serve LLM.

Counters of one engine's process. No key is named: Ray's exporter asks for none. It knows Ray's metrics and the ledger's
records; `docs/online.md` lists the names.
"""

import threading
from typing import Any

from peagle.economics.usage import EngineSession, RequestUsage
from pipelines.online.account import Engine


class EngineMetrics:
    """A listener of an `EngineAccount`."""

    def __init__(self, engine: Engine) -> None:
        from ray.util.metrics import Counter

        def counter(name: str, description: str, *more: str) -> Any:
            counted = Counter(f"peagle_{name}", description=description, tag_keys=("model", "drafter", *more))
            return counted.set_default_tags({"model": engine.model, "drafter": engine.drafter or ""})

        self._usd_per_s = engine.num_devices * engine.usd_per_device_s
        self._lock = threading.Lock()  # heartbeats come from a thread, and once more from whoever ends the account
        self._paid_s = dict.fromkeys(("start", "busy", "idle"), 0.0)
        self._requests = counter("requests_total", "Requests that left the engine, by outcome.", "outcome")
        self._usd = counter("request_usd_total", "Price of requests' shares of the engine's busy seconds.")
        self._engine_usd = counter("engine_usd_total", "Price of the engine's seconds, by what it did.", "state")
        self._tokens = {
            "num_prompt_tokens": counter("prompt_tokens_total", "Tokens of prompts."),
            "num_cached_tokens": counter("cached_tokens_total", "Tokens of prompts that the prefix cache had."),
            "num_output_tokens": counter("output_tokens_total", "Tokens of answers."),
        }
        self._speculation = {
            "num_drafts": counter("drafts_total", "Steps that verified a draft."),
            "num_draft_tokens": counter("draft_tokens_total", "Tokens drafted."),
            "num_accepted_tokens": counter("accepted_tokens_total", "Drafted tokens that were accepted."),
        }

    def request(self, record: RequestUsage) -> None:
        """A request has ended."""
        self._requests.inc(1, {"outcome": record.outcome})
        _add(self._usd, record.usd)
        for name, counter in self._tokens.items():
            _add(counter, getattr(record.usage, name))
        for name, counter in self._speculation.items():
            _add(counter, getattr(record.usage.speculation, name))

    def heartbeat(self, session: EngineSession) -> None:
        """Where the engine's seconds went until now."""
        seconds = {"start": session.load_s + session.compile_s, "busy": session.busy_s, "idle": session.idle_s}
        with self._lock:
            for state, until_now_s in seconds.items():
                _add(self._engine_usd, (until_now_s - self._paid_s[state]) * self._usd_per_s, state=state)
            self._paid_s = seconds


def _add(counter: Any, value: float, **tags: str) -> None:
    if value > 0:  # Ray refuses to add nothing
        counter.inc(value, tags)
