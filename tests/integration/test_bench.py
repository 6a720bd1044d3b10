"""`peagle bench` in the real engine: no speculation against the head that ships."""

import pytest

from peagle.bench.config import BenchConfig
from peagle.bench.run import bench
from peagle.measurement.engine_up import Listener


@pytest.fixture(scope="module")
def result(embedded_target, tmp_path_factory):
    """Report and folder of two engines, each with two passes over four prompts."""
    config = BenchConfig(
        methods="none,peagle",
        num_speculative_tokens="3",
        concurrency="1",
        repeats=2,
        rounds=1,
        limit=4,
        max_tokens=24,
        max_model_len=512,
        enforce_eager=True,
        usd_per_hour=1.0,
        output=tmp_path_factory.mktemp("bench") / "out",
    )
    return config, *bench(config, Listener())


def test_both_methods_have_every_figure(result):
    _, report, _ = result
    none, drafted = report["cells"]
    for cell in (none, drafted):
        assert cell["num_responses"] == 8
        assert cell["num_refused"] == 0
        assert cell["num_output_tokens"] == none["num_output_tokens"]  # greedy: the drafter does not change the text
        assert 0 < cell["ttft_s"]["p50"] <= cell["ttft_s"]["p95"] <= cell["ttft_s"]["p99"]
        assert 0 < cell["tpot_s"]["p50"] < cell["step_s"] * 1.5
        assert cell["tokens_per_usd"] == pytest.approx(cell["output_tokens_per_s"] * 3600)
        assert cell["peak_memory_gib"] > 0.5
        assert cell["user_tokens_per_s"] == pytest.approx(cell["output_tokens_per_s"], rel=0.5)
    assert (none["acceptance_length"], none["num_drafts"]) == (None, 0)
    assert 1 < drafted["acceptance_length"] <= 4
    assert len(drafted["acceptance_rates"]) == 3


def test_the_same_command_starts_no_engine(result):
    config, report, _ = result

    def start(*_):
        raise AssertionError("an engine was started")

    again, _ = bench(config, Listener(), start=start)
    assert again["cells"] == report["cells"]
