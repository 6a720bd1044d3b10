"""All metrics, and the listeners that feed Ray's exporter.

Label names follow vLLM (`model_name`, `position`). Durations and sizes of requests have OpenTelemetry's names and
buckets for generative AI, with `_` for `.` and the unit at the end (semantic conventions, status Development, read
2026-11-26). Ray adds the prefix `ray_` and its own labels, and computes a histogram's sum from the middles of buckets.

Ray's exporter has no authentication. To reveal little, the exporter names only API keys that have a budget.
"""

import threading
from dataclasses import dataclass
from typing import Any, Literal

from peagle.economics.usage import EngineSession, RequestUsage, UnitUsage

PREFIX = "ray_"
_MODEL_LABELS = ("model_name", "drafter")
_RUN_LABELS = (*_MODEL_LABELS, "run")
_DURATION_BUCKETS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TPOT_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKEN_BUCKETS = tuple(float(4**power) for power in range(14))


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. `boundaries` are the bucket boundaries of a histogram."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    description: str
    labels: tuple[str, ...] = _MODEL_LABELS
    boundaries: tuple[float, ...] = ()


METRICS = {
    metric.name: metric
    for metric in (
        Metric(
            "peagle_requests_total",
            "counter",
            "requests",
            "requests that left an engine; `outcome` is ok, cut (the client disconnected) or failed",
            (*_MODEL_LABELS, "outcome"),
        ),
        Metric(
            "gen_ai_server_request_duration_seconds",
            "histogram",
            "s",
            "from a request's start in an engine to its end; `error_type` is empty, cut or failed",
            (*_MODEL_LABELS, "error_type"),
            _DURATION_BUCKETS_S,
        ),
        Metric(
            "gen_ai_server_time_to_first_token_seconds",
            "histogram",
            "s",
            "from a request's start in an engine to its first token; only requests whose outcome is ok",
            boundaries=_TTFT_BUCKETS_S,
        ),
        Metric(
            "gen_ai_server_time_per_output_token_seconds",
            "histogram",
            "s",
            "mean time per token of a choice after the first token; only requests whose outcome is ok",
            boundaries=_TPOT_BUCKETS_S,
        ),
        Metric(
            "gen_ai_client_token_usage",
            "histogram",
            "tokens",
            "tokens of one request; `gen_ai_token_type` is input or output",
            (*_MODEL_LABELS, "gen_ai_token_type"),
            _TOKEN_BUCKETS,
        ),
        Metric("peagle_prompt_tokens_total", "counter", "tokens", "tokens of prompts"),
        Metric("peagle_cached_tokens_total", "counter", "tokens", "tokens of prompts that were in the prefix cache"),
        Metric("peagle_output_tokens_total", "counter", "tokens", "tokens of answers"),
        Metric("peagle_drafts_total", "counter", "steps", "steps that verified a draft"),
        Metric("peagle_draft_tokens_total", "counter", "tokens", "drafted tokens that were verified"),
        Metric("peagle_dropped_draft_tokens_total", "counter", "tokens", "drafted tokens not worth verifying"),
        Metric("peagle_accepted_tokens_total", "counter", "tokens", "drafted tokens that were accepted"),
        Metric(
            "peagle_draft_tokens_per_pos_total",
            "counter",
            "tokens",
            "verified draft tokens by `position` in their draft, from 0 on",
            (*_MODEL_LABELS, "position"),
        ),
        Metric(
            "peagle_accepted_tokens_per_pos_total",
            "counter",
            "tokens",
            "accepted tokens by `position` in their draft, from 0 on",
            (*_MODEL_LABELS, "position"),
        ),
        Metric("peagle_accepted_lookup_tokens_total", "counter", "tokens", "accepted tokens from prompt lookup"),
        Metric(
            "peagle_break_even_acceptance_length",
            "gauge",
            "tokens",
            "acceptance length at which the drafter breaks even at the current concurrency, if measured",
        ),
        Metric(
            "peagle_engine_usd_total",
            "counter",
            "USD",
            "cost of all engine time; `state` is start, busy or idle",
            (*_MODEL_LABELS, "state"),
        ),
        Metric("peagle_request_usd_total", "counter", "USD", "cost of the busy time that is charged to requests"),
        Metric(
            "peagle_engine_crashes_total",
            "counter",
            "crashes",
            "engines that crashed while they ran requests; the log names the request and the key",
            ("model_name",),
        ),
        Metric(
            "peagle_budget_used_ratio",
            "gauge",
            "ratio",
            "used fraction of a budget in this period; `key` is a key's name, a tag (`team=search`) or `*` (endpoint)",
            ("key",),
        ),
        Metric(
            "peagle_rows_total",
            "counter",
            "rows",
            "rows of bulk runs and batches as they are committed; `outcome` is ok, or failed for a dead letter",
            (*_MODEL_LABELS, "outcome"),
        ),
        Metric(
            "peagle_run_rows",
            "gauge",
            "rows",
            "rows of a run by `state`: done, failed (dead letters) or left",
            (*_RUN_LABELS, "state"),
        ),
        Metric("peagle_run_engines", "gauge", "engines", "engines of a run that have loaded", _RUN_LABELS),
        Metric("peagle_run_usd", "gauge", "USD", "cost of all attempts of a run", _RUN_LABELS),
        Metric("peagle_run_budget_usd", "gauge", "USD", "`--budget-usd` of a run that has one", _RUN_LABELS),
        Metric(
            "peagle_run_deadline_timestamp_seconds",
            "gauge",
            "Unix s",
            "`--deadline` of a run that has one",
            _RUN_LABELS,
        ),
        Metric(
            "peagle_run_expected_end_timestamp_seconds",
            "gauge",
            "Unix s",
            "when a run will end at its current speed; exported once a unit is committed",
            _RUN_LABELS,
        ),
    )
}


def create_metric(name: str, **labels: str) -> Any:
    """Create a metric in Ray's exporter, with default values for these labels."""
    from ray.util.metrics import Counter, Gauge, Histogram

    metric = METRICS[name]
    if metric.kind == "histogram":
        created = Histogram(name, metric.description, boundaries=list(metric.boundaries), tag_keys=metric.labels)
    else:
        created = (Counter if metric.kind == "counter" else Gauge)(name, metric.description, tag_keys=metric.labels)
    return created.set_default_tags(labels)


class UsageMetrics:
    """The metrics of one model. Called by an `EngineAccount`, and in a bulk run by the driver."""

    def __init__(self, model_name: str, drafter: str | None) -> None:
        def metric(name: str) -> Any:
            return create_metric(name, model_name=model_name, drafter=drafter or "")

        # A background thread records heartbeats; the thread that ends the account records the last one.
        self._lock = threading.Lock()
        self._reported_usd: dict[tuple[str, str], float] = {}  # (session, state) -> USD
        self._engine_usd = metric("peagle_engine_usd_total")
        self._requests, self._request_usd = metric("peagle_requests_total"), metric("peagle_request_usd_total")
        self._duration = metric("gen_ai_server_request_duration_seconds")
        self._ttft = metric("gen_ai_server_time_to_first_token_seconds")
        self._tpot = metric("gen_ai_server_time_per_output_token_seconds")
        self._request_tokens = metric("gen_ai_client_token_usage")
        self._prompt, self._cached = metric("peagle_prompt_tokens_total"), metric("peagle_cached_tokens_total")
        self._output, self._drafts = metric("peagle_output_tokens_total"), metric("peagle_drafts_total")
        self._drafted, self._accepted = metric("peagle_draft_tokens_total"), metric("peagle_accepted_tokens_total")
        self._accepted_per_position = metric("peagle_accepted_tokens_per_pos_total")
        self._verified_per_position = metric("peagle_draft_tokens_per_pos_total")
        self._lookup = metric("peagle_accepted_lookup_tokens_total")
        self._dropped = metric("peagle_dropped_draft_tokens_total")

    def record_request(self, record: RequestUsage) -> None:
        """Record a finished request."""
        usage, is_ok = record.usage, record.outcome == "ok"
        self._requests.inc(1, {"outcome": record.outcome})
        _add(self._request_usd, record.usd)
        duration_s = usage.finished_at - usage.started_at
        self._duration.observe(duration_s, {"error_type": "" if is_ok else record.outcome})
        if record.outcome != "failed":
            self._request_tokens.observe(usage.num_prompt_tokens, {"gen_ai_token_type": "input"})
            self._request_tokens.observe(usage.num_output_tokens, {"gen_ai_token_type": "output"})
        if is_ok and record.ttft_s is not None:
            self._ttft.observe(record.ttft_s)
            num_later_tokens = usage.num_output_tokens / record.num_choices - 1
            if num_later_tokens > 0:
                self._tpot.observe(max(duration_s - record.ttft_s, 0.0) / num_later_tokens)
        self.record_work(usage)

    def record_work(self, usage: UnitUsage) -> None:
        """Record the tokens and acceptance of a request or a committed unit."""
        stats = usage.speculation
        _add(self._prompt, usage.num_prompt_tokens)
        _add(self._cached, usage.num_cached_tokens)
        _add(self._output, usage.num_output_tokens)
        _add(self._drafts, stats.num_drafts)
        _add(self._drafted, stats.num_draft_tokens)
        _add(self._accepted, stats.num_accepted_tokens)
        _add(self._lookup, stats.num_lookup_tokens)
        _add(self._dropped, stats.num_dropped_tokens)
        counts = zip(stats.accepted_per_position, stats.verified_counts, strict=True)
        for position, (num_accepted, num_verified) in enumerate(counts):
            _add(self._accepted_per_position, num_accepted, position=str(position))
            _add(self._verified_per_position, num_verified, position=str(position))

    def record_heartbeat(self, session: EngineSession) -> None:
        """Record the cost of an engine by state. An old heartbeat has no effect."""
        seconds = {"start": session.load_s + session.compile_s, "busy": session.busy_s, "idle": session.idle_s}
        with self._lock:
            for state, total_s in seconds.items():
                usd = total_s * session.num_devices * session.usd_per_device_s
                reported_usd = self._reported_usd.get((session.session_id, state), 0.0)
                _add(self._engine_usd, usd - reported_usd, state=state)
                self._reported_usd[session.session_id, state] = max(usd, reported_usd)


def _add(counter: Any, value: float, **labels: str) -> None:
    if value > 0:  # Ray refuses to add 0
        counter.inc(value, labels)
