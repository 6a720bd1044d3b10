import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from peagle.bench.acceptance import length_plot, make_cell, markdown_report, position_plot, text_report
from peagle.bench.plan import make_setup
from peagle.bench.record import CategoryResult
from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.speculation import SpeculationStats

from .conftest import record

SVG = "{http://www.w3.org/2000/svg}"


def cell(k: int, stats: SpeculationStats, drafter: str = "mine", **changes: Any) -> dict[str, Any]:
    """A cell of two seconds and 21 tokens."""
    spec = DrafterSpec(method="peagle", model="head", num_speculative_tokens=k)
    setup = make_setup(EngineSpec(model="target"), spec, head=drafter, fingerprint="f")
    return make_cell(setup, record(k=k, speculation=stats, **changes))


def at_k(k: int, drafter: str = "mine") -> dict[str, Any]:
    """A cell whose drafts are accepted by half at each position."""
    accepted = tuple(16 >> (i + 1) for i in range(k))
    stats = SpeculationStats(num_drafts=16, num_draft_tokens=16 * k, accepted_per_position=accepted)
    code = CategoryResult(num_responses=2, num_output_tokens=20, speculation=stats)
    return cell(k, stats, drafter, by_category={"code": code})


@pytest.fixture
def report() -> dict[str, Any]:
    return {
        "model": "tiny", "hardware": "CPU, 2 CPUs, 24.0 GiB", "versions": {"vllm": "0.29.0"}, "precision": "bf16",
        "compiled": True, "concurrency": 1, "sampling": {"temperature": 0.0, "max_tokens": 256},
        "dataset": {"name": "humaneval", "num_prompts": 164, "rejected": {}},
        "cells": [at_k(1), at_k(3), at_k(3, "other")], "notes": [],
    }  # fmt: skip


def test_the_table_holds_each_cell_with_blanks_beyond_its_k(report: dict[str, Any]) -> None:
    lines = text_report(report).splitlines()
    head, one, three = (line.split() for line in lines[2:5])
    assert head[5:] == ["1", "2", "3", "drafted/s", "accepted/s", "output/s"]
    assert one == ["mine", "1", "1.50", "16", "50%", "8.0", "4.0", "10.5"]
    assert three == ["mine", "3", "1.88", "16", "50%", "25%", "12%", "24.0", "7.0", "10.5"]
    assert len({len(line) for line in lines[2:6]}) == 1
    assert lines[0].startswith("tiny; 164 prompts of humaneval; greedy; at most 256 tokens; concurrency 1; bf16")


def test_markdown_tables_are_rectangular_and_state_their_conditions(report: dict[str, Any]) -> None:
    text = markdown_report(report)
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert [len({line.count("|") for line in table.splitlines()}) for table in tables] == [1, 1]
    assert "| code | mine | 3 | 1.88 | 16 | 2 | 50% | 25% | 12% |" in tables[1]
    assert "vllm 0.29.0" in text
    assert "2026-11-21" in text


def test_without_categories_there_is_one_table(report: dict[str, Any]) -> None:
    for found in report["cells"]:
        found["by_category"] = {}
    assert "category" not in text_report(report)
    assert markdown_report(report).count("\n|---|") == 1


def test_the_length_plot_has_a_line_a_drafter_and_a_point_a_cell(report: dict[str, Any]) -> None:
    root = ElementTree.fromstring(length_plot(report))
    titles = [node.text for circle in root.iter(f"{SVG}circle") for node in circle.iter(f"{SVG}title")]
    assert titles == ["mine, K=1: 1.50", "mine, K=3: 1.88", "other, K=3: 1.88"]
    lines = [line.attrib["points"].split() for line in root.iter(f"{SVG}polyline")]
    assert [len(points) for points in lines] == [2, 1]
    assert lines[0][1] == lines[1][0]
    assert float(lines[0][0].split(",")[1]) > float(lines[0][1].split(",")[1])  # longer is higher


def test_the_position_plot_takes_the_largest_k_and_names_it(report: dict[str, Any]) -> None:
    root = ElementTree.fromstring(position_plot(report))
    assert len(list(root.iter(f"{SVG}path"))) == 6
    texts = [node.text for node in root.iter(f"{SVG}text")]
    assert {"mine, K=3", "other, K=3", "Acceptance by position, tiny, humaneval"} <= set(texts)


def test_plots_stand_where_nothing_was_accepted(report: dict[str, Any]) -> None:
    stats = SpeculationStats(num_drafts=4, num_draft_tokens=8, accepted_per_position=(0, 0))
    report["cells"] = [cell(2, stats)]
    for plot in (length_plot, position_plot):
        assert "nan" not in plot(report)
        ElementTree.fromstring(plot(report))


def test_more_drafters_than_colours_are_left_out_of_the_plots_alone(report: dict[str, Any]) -> None:
    report["cells"] = [at_k(2, f"head-{n}") for n in range(8)]
    assert length_plot(report).count("<circle") == 6
    assert text_report(report).count("head-7") == 2


def test_the_values_of_many_drafters_stand_apart(report: dict[str, Any]) -> None:
    report["cells"] = [at_k(k, f"head-{n}") for n in range(4) for k in (3, 5)]  # all alike
    root = ElementTree.fromstring(length_plot(report))
    values = [node for node in root.iter(f"{SVG}text") if node.attrib["class"] == "value"][1:]  # the heading is one
    heights = sorted(float(node.attrib["y"]) for node in values)
    assert len(values) == 4
    assert min(below - above for above, below in pairwise(heights)) >= 11.9


def test_axes_are_named_with_their_units(report: dict[str, Any]) -> None:
    assert {">tokens per verification step<", ">draft tokens per step (K)<"} <= set(
        re.findall(">[^<>]+<", length_plot(report))
    )
    assert {">share of drafts<", ">position in the draft<"} <= set(re.findall(">[^<>]+<", position_plot(report)))
