import json
from pathlib import Path

import pytest
from usage_records import engine_session

from peagle.catalog.cards import load_catalog
from peagle.errors import ConfigError
from peagle.profiles.baselines import baseline_of_cells, baseline_of_table, break_evens, read_benchmark

BENCHMARK_FILE = Path(__file__).parents[3] / "benchmarks" / "speculation" / "2026-11-24-smollm2-135m-cpu.json"


def session(drafter="smollm2-135m-eagle3", k=3, model="smollm2-135m"):
    return engine_session(num_devices=2, model=model, drafter=drafter, num_speculative_tokens=k)


def test_baseline_of_cells_has_steps_by_concurrency(cells):
    assert baseline_of_cells(cells, "peagle", 3, "here") is None, "no step times"
    cells_with_times = [
        cell.model_copy(update={"step_s": 0.01 * cell.concurrency * (2 if cell.has_drafter else 1), "spread": 0.04})
        for cell in cells
        if (cell.method, cell.concurrency) != ("none", 1)
    ]
    baseline = baseline_of_cells(cells_with_times, "peagle", 3, "here")
    assert baseline is not None
    assert [step.concurrency for step in baseline.steps] == [4, 16]
    assert [step.break_even for step in baseline.steps] == [2.0, 2.0]
    assert [step.error for step in baseline.steps] == pytest.approx([0.04, 0.04])
    assert baseline_of_cells(cells_with_times, "eagle3", 3, "here") is None


def test_baseline_of_a_table_equals_its_benchmark():
    (table,) = load_catalog().get("smollm2-135m").steps
    baseline, measured = baseline_of_table(table, "eagle3", 3), read_benchmark(BENCHMARK_FILE).baseline(session())
    assert baseline is not None
    assert measured is not None
    assert {step.concurrency: step.break_even for step in baseline.steps} == pytest.approx(
        table.break_even("eagle3", 3)
    )
    for step, reference in zip(baseline.steps, measured.steps, strict=True):
        assert (step.step_s, step.plain_step_s) == pytest.approx((reference.step_s, reference.plain_step_s), abs=1e-4)
        assert step.error == pytest.approx(reference.error, abs=1e-3)
    assert baseline_of_table(table, "eagle3", 64) is None
    interpolated = baseline_of_table(table, "eagle3", 4)  # between two measured K
    assert interpolated is not None
    assert interpolated.steps[0].error == pytest.approx((0.123 + 0.028) / 2), "the larger error of the two K"


def test_benchmark_is_the_baseline_only_of_its_heads_and_model():
    benchmark = read_benchmark(BENCHMARK_FILE)
    assert benchmark.baseline(session(k=0)) is None, "K is not recorded, and the head was measured at several"
    assert benchmark.baseline(session(k=9)) is None
    assert benchmark.baseline(session("another head")) is None
    plain = benchmark.baseline(session(None, 0))
    assert plain is not None
    assert [step.break_even for step in plain.steps] == [1.0] * 4
    assert benchmark.baseline(session(None, 0, "another model")) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"), ("{", "not JSON"), ("[]", "no step time"), ("{}", "no step time"),
        (json.dumps({"cells": [{"method": "none", "k": 0, "concurrency": 1, "output_tokens_per_s": 9.0}]}), "no step"),
        (
            json.dumps(
                {"cells": [{"method": "none", "k": 0, "concurrency": 1, "output_tokens_per_s": 9.0, "step_s": 0.1}]}
            ),
            "incomplete benchmark report",
        ),
    ],
)  # fmt: skip
def test_benchmarks_without_a_baseline_are_refused(tmp_path, content, message):
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_benchmark(path)


def test_break_evens_are_computed_from_cells(cell, cells):
    assert break_evens(cells[0], cells) == pytest.approx({4: 1.28, 1: 1.2, 16: 2.0})  # 1.28 = 1.6 * 40 / 50
    assert break_evens(cells[1], cells) == pytest.approx({4: 1.75 * 40 / 48})
    assert break_evens(cells[2], cells) == {}
    ngram = cell("ngram", 3, 4, 50.0, 1.6)
    assert break_evens(ngram, [*cells, ngram]) == {}
