"""`peagle bench` with the real engine, without speculation and with the shipped head."""

import json

import pytest

pytestmark = pytest.mark.soak  # because it starts two engines

COMMAND = [
    "bench", "--methods", "none,peagle", "--num-speculative-tokens", "3", "--concurrency", "1", "--repeats", "2",
    "--rounds", "1", "--limit", "4", "--max-tokens", "24", "--max-model-len", "512", "--enforce-eager",
    "--usd-per-hour", "1",
]  # fmt: skip


def check_report(report):
    none, drafted = report["cells"]
    for cell in (none, drafted):
        assert cell["num_responses"] == 8
        assert cell["num_refused"] == 0
        assert cell["num_output_tokens"] == none["num_output_tokens"]  # greedy, so the drafter does not change the text
        assert 0 < cell["ttft_s"]["p50"] <= cell["ttft_s"]["p95"] <= cell["ttft_s"]["p99"]
        assert 0 < cell["tpot_s"]["p50"] < cell["step_s"] * 1.5
        assert cell["tokens_per_usd"] == pytest.approx(cell["output_tokens_per_s"] * 3600)
        assert cell["peak_memory_gib"] > 0.5
        assert cell["user_tokens_per_s"] == pytest.approx(cell["output_tokens_per_s"], rel=0.5)
    assert (none["acceptance_length"], none["num_drafts"]) == (None, 0)
    assert 1 < drafted["acceptance_length"] <= 4
    assert len(drafted["acceptance_rates"]) == 3


def test_bench_measures_all_cells_once(peagle, embedded_target, tmp_path):
    reports = []
    for _ in range(2):
        process = peagle(*COMMAND, "--output", tmp_path / "out")
        stdout, _ = process.communicate()
        assert process.returncode == 0, stdout
        reports.append((stdout, json.loads((tmp_path / "out" / "report.json").read_text())))
    (first_output, report), (second_output, second_report) = reports
    check_report(report)
    assert "starting the engine" in first_output
    assert "starting the engine" not in second_output
    assert second_report["cells"] == report["cells"]
