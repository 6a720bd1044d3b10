"""What is read out of vLLM, without a running one. The engine itself is tested in tests/integration."""

from types import SimpleNamespace
from typing import Any

from peagle.engine.vllm_engine import _totals, has_request_metrics, with_root_cause
from peagle.errors import EngineError
from peagle.speculation import SpeculationStats


def counter(name: str, value: int) -> Any:
    return SimpleNamespace(name=f"vllm:spec_decode_{name}", value=value)


def by_position(*values: int) -> Any:
    return SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=list(values))


def test_counters_of_all_ranks_add_up() -> None:
    rank = [counter("num_drafts", 10), counter("num_draft_tokens", 30), counter("num_accepted_tokens", 7)]
    others = [SimpleNamespace(name="vllm:num_requests_running", value=1.0)]
    found = _totals([*rank, by_position(5, 2, 0), *others, *rank, by_position(4, 2, 1)])
    assert found == SpeculationStats(num_drafts=20, num_draft_tokens=60, accepted_per_position=(9, 4, 1))


def test_an_engine_that_counts_no_drafts_says_so() -> None:
    assert _totals([SimpleNamespace(name="vllm:num_requests_running", value=1.0)]) is None


def test_the_counters_names_are_those_of_the_installed_vllm() -> None:
    from prometheus_client import REGISTRY
    from vllm.v1.metrics.reader import get_metrics_snapshot
    from vllm.v1.spec_decode.metrics import SpecDecodingProm, SpecDecodingStats

    config = SimpleNamespace(num_speculative_tokens=2)
    collectors = set(REGISTRY._collector_to_names)
    counters = SpecDecodingProm(config, ["engine"], {0: ["0"]})
    stats = SpecDecodingStats.new(2)
    stats.observe_draft(num_draft_tokens=2, num_accepted_tokens=1)
    counters.observe(stats)
    try:
        assert _totals(get_metrics_snapshot()) == SpeculationStats(
            num_drafts=1, num_draft_tokens=2, accepted_per_position=(1, 0)
        )
    finally:
        for collector in set(REGISTRY._collector_to_names) - collectors:
            REGISTRY.unregister(collector)


def test_the_pinned_vllm_states_acceptance_by_request() -> None:
    assert has_request_metrics()


def test_a_failure_is_told_by_its_cause_where_the_log_names_one() -> None:
    error = EngineError("vLLM did not start: see above")
    log = "(EngineCore pid=7) ERROR 11-21 11:36:04 [core.py:1374] ValueError: the KV cache is too small"
    assert with_root_cause(error, log).message == "vLLM did not start: ValueError: the KV cache is too small"
    assert with_root_cause(error, "nothing") is error
