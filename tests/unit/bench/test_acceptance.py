"""`peagle evaluate` with fake engines."""

import json
import re
from xml.etree import ElementTree

import pytest
from config_only import write_head
from usage_records import drafts

from peagle.bench.acceptance import evaluate, length_plot, make_cell, markdown_report, position_plot, text_report
from peagle.bench.config import EvaluateConfig
from peagle.bench.engine import MeasurementListener
from peagle.bench.plan import make_setup
from peagle.bench.record import CategoryResult
from peagle.engine.fake import ByteTokenizer, FakeEngine
from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.errors import ConfigError, DrafterError, EngineError

from .conftest import make_pass_record

ROWS = [{"prompt": f"prompt {i}", "category": "even" if i % 2 == 0 else "odd"} for i in range(6)]


class EngineStarter:
    """Starts fake engines and records them."""

    def __init__(self):
        self.specs: list[EngineSpec] = []
        self.engines: list[RecordingEngine] = []

    def __call__(self, spec, hardware):
        assert all(engine.is_shut_down for engine in self.engines), "one engine at a time"
        assert spec.drafter is not None
        self.specs.append(spec)
        self.engines.append(RecordingEngine(num_speculative_tokens=spec.drafter.num_speculative_tokens))
        return self.engines[-1]


class RecordingEngine(FakeEngine):
    """Records its number of concurrent requests and its shutdown."""

    is_shut_down = False
    num_running = max_running = 0

    async def generate(self, *args):
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            return await super().generate(*args)
        finally:
            self.num_running -= 1

    def shutdown(self):
        self.is_shut_down = True


@pytest.fixture
def write_head_folder(tmp_path):
    def write(path="heads/mine/head", method="peagle", **changes):
        return write_head(tmp_path / path, method, path=path, **changes)

    return write


@pytest.fixture
def run(target, tmp_path, write_jsonl):
    """Return a function that runs `peagle evaluate` and returns the report."""

    def run(starter, **options):
        values = {"dataset": str(write_jsonl(ROWS)), "output": tmp_path / "out", "max_tokens": 40} | options
        config = EvaluateConfig(model=str(target), **values)
        report, folder = evaluate(config, MeasurementListener(), start=starter, tokenizer_of=lambda *_: ByteTokenizer())
        assert json.loads((folder / "report.json").read_bytes()) == report
        return report

    return run


def test_every_drafter_and_k_is_measured(run, write_head_folder, tmp_path):
    starter = EngineStarter()
    peagle, eagle3 = write_head_folder("a/head"), write_head_folder("b/head", method="eagle3")
    report = run(starter, drafter=[str(peagle), str(eagle3)], num_speculative_tokens="2,4", concurrency=3)
    drafters = [spec.drafter for spec in starter.specs if spec.drafter]
    assert [(d.method, d.model, d.num_speculative_tokens) for d in drafters] == [
        ("peagle", str(peagle), 2), ("peagle", str(peagle), 4), ("eagle3", str(eagle3), 2), ("eagle3", str(eagle3), 4),
    ]  # fmt: skip
    assert all(engine.is_shut_down and engine.max_running == 3 for engine in starter.engines)
    assert {spec.max_num_seqs for spec in starter.specs} == {3}
    # The fake engine accepts only the first token of each draft.
    assert [(c["drafter"], c["k"], c["acceptance_length"]) for c in report["cells"]] == [
        ("a/head", 2, 2.0), ("a/head", 4, 2.0), ("b/head", 2, 2.0), ("b/head", 4, 2.0),
    ]  # fmt: skip
    cell = report["cells"][1]
    assert cell["acceptance_rates"] == [1.0, 0.0, 0.0, 0.0]
    assert (cell["num_responses"], cell["num_refused"]) == (6, 0)
    assert cell["drafted_tokens_per_s"] == pytest.approx(4 * cell["accepted_tokens_per_s"])
    assert {name: result["num_responses"] for name, result in cell["by_category"].items()} == {"even": 3, "odd": 3}
    assert sum(result["num_drafts"] for result in cell["by_category"].values()) == cell["num_drafts"]


def test_only_missing_cells_are_measured(run, write_head_folder):
    first, second, third = EngineStarter(), EngineStarter(), EngineStarter()
    head_a, head_b = str(write_head_folder("a/head")), str(write_head_folder("b/head"))
    report = run(first, drafter=head_a, num_speculative_tokens=2)
    assert run(second, drafter=head_a, num_speculative_tokens=2) == report
    assert second.specs == []
    extended_report = run(third, drafter=[head_a, head_b], num_speculative_tokens="2,3")
    assert [(spec.drafter.model, spec.drafter.num_speculative_tokens) for spec in third.specs] == [
        (head_a, 3), (head_b, 2), (head_b, 3),
    ]  # fmt: skip
    # With two drafters of the same name, the report adds the parent folder.
    assert extended_report["cells"][0] == {**report["cells"][0], "drafter": "a/head"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"concurrency": 2}, "concurrency: was 1, now 2"),
        ({"category_column": "level"}, "dataset.category_column: was 'category', now 'level'"),
    ],
)
def test_output_folder_with_another_fingerprint_is_refused(change, message, run, write_head_folder):
    starter = EngineStarter()
    run(EngineStarter(), drafter=str(write_head_folder()), num_speculative_tokens=2)
    with pytest.raises(ConfigError, match=message):
        run(starter, drafter=str(write_head_folder()), num_speculative_tokens=2, **change)
    assert starter.specs == []


def test_engine_without_drafts_is_an_error(run, write_head_folder, tmp_path):
    with pytest.raises(EngineError, match="produced no drafts") as error:
        run(lambda *_: FakeEngine(num_speculative_tokens=0), drafter=str(write_head_folder()), num_speculative_tokens=2)
    assert "--max-tokens" in error.value.hint
    assert list((tmp_path / "out" / "cells").iterdir()) == []


def test_cell_has_acceptance_length_and_speeds():
    drafter = DrafterSpec(method="peagle", model="head", num_speculative_tokens=3)
    setup = make_setup(EngineSpec(model="target"), drafter, head="mine", fingerprint="f")
    code_result = CategoryResult(num_responses=1, num_output_tokens=4, speculation=drafts(3, 2, 1, 0))
    cell = make_cell(
        setup, make_pass_record(wall_s=2.0, speculation=drafts(10, 7, 3, 1), by_category={"code": code_result})
    )
    assert (cell["drafter"], cell["method"], cell["fingerprint"], cell["k"]) == ("mine", "peagle", "f", 3)
    assert cell["acceptance_length"] == pytest.approx(1 + 11 / 10)
    assert [cell[f"{name}_tokens_per_s"] for name in ("drafted", "accepted", "output")] == [15, 5.5, 10.5]
    assert cell["by_category"]["code"]["acceptance_length"] == 2.0


class SecondEngineFails(EngineStarter):
    """Starts engines of which the second one fails in its first request."""

    def __init__(self, error):
        super().__init__()
        self._error = error

    def __call__(self, spec, hardware):
        async def fail(*_):
            raise self._error

        engine = super().__call__(spec, hardware)
        if len(self.engines) == 2:
            engine.generate = fail  # type: ignore[method-assign]
        return engine


def test_crashed_engine_is_skipped_and_reported(run, write_head_folder, tmp_path):
    failing, retry = SecondEngineFails(EngineError("the vLLM engine process died")), EngineStarter()
    report = run(failing, drafter=str(write_head_folder()), num_speculative_tokens="2,3,4")
    assert all(engine.is_shut_down for engine in failing.engines)
    assert [cell["k"] for cell in report["cells"]] == [2, 4]
    assert report["failed"] == {"head K=3": "the vLLM engine process died"}
    note = "Not measured: head K=3, because its engine failed: the vLLM engine process died"
    assert report["notes"] == [note]
    assert note in (tmp_path / "out" / "report.md").read_text()
    retry_report = run(retry, drafter=str(write_head_folder()), num_speculative_tokens="2,3,4")
    assert [spec.drafter.num_speculative_tokens for spec in retry.specs if spec.drafter] == [3]
    assert (retry_report["failed"], retry_report["notes"]) == ({}, [])


def test_report_is_written_after_an_interrupt(run, write_head_folder, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(SecondEngineFails(KeyboardInterrupt()), drafter=str(write_head_folder()), num_speculative_tokens="2,3")
    report = json.loads((tmp_path / "out" / "report.json").read_bytes())
    assert [cell["k"] for cell in report["cells"]] == [2]
    assert report["notes"] == ["Not finished: 1 of 2 cells remain."]


def test_acceptance_is_measured_without_drafts_per_request(run, write_head_folder):
    class WithoutRequestDrafts(FakeEngine):
        """An engine like vLLM 0.24, which counts drafts, but not per request."""

        async def generate(self, *args):
            from dataclasses import replace

            return replace(await super().generate(*args), speculation=None)

    starter = EngineStarter()
    report = run(starter, drafter=str(write_head_folder()), num_speculative_tokens=3)
    report_without = run(
        lambda *_: WithoutRequestDrafts(num_speculative_tokens=3),
        drafter=str(write_head_folder("older")),
        num_speculative_tokens=3,
    )
    for name in ("num_drafts", "num_draft_tokens", "accepted_per_position", "num_output_tokens"):
        assert report_without["cells"][0][name] == report["cells"][0][name]
    assert report_without["cells"][0]["by_category"] == {}
    assert "acceptance by category is unknown" in report_without["notes"][0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"drafter": "no/such/head"}, DrafterError, "no such drafter"),
        ({"drafter": "auto"}, DrafterError, "resolves to no drafter"),
        ({"max_model_len": 9999}, ConfigError, "the context of target has 512 tokens"),
    ],
)
def test_invalid_options_are_refused_before_an_engine_starts(options, error, message, run, tmp_path, write_head_folder):
    starter = EngineStarter()
    with pytest.raises(error, match=message):
        run(starter, **{"drafter": str(write_head_folder()), **options})
    assert starter.specs == []
    assert not (tmp_path / "out").exists()


def test_engine_options_are_passed_to_the_engines(run, write_head_folder):
    starter = EngineStarter()
    engine_options = {"engine_args": "block_size=32", "draft_attention_backend": "triton_attn"}
    report = run(starter, drafter=str(write_head_folder()), num_speculative_tokens="2", **engine_options)
    assert starter.specs[0].extra["block_size"] == 32
    assert starter.specs[0].drafter is not None
    assert starter.specs[0].drafter.attention_backend == "TRITON_ATTN"
    assert report["fingerprint"]["engine_args"] == {"block_size": 32}


SVG = "{http://www.w3.org/2000/svg}"


def cell_of(k, stats, drafter="mine", **changes):
    spec = DrafterSpec(method="peagle", model="head", num_speculative_tokens=k)
    setup = make_setup(EngineSpec(model="target"), spec, head=drafter, fingerprint="f")
    return make_cell(setup, make_pass_record(k=k, speculation=stats, **changes))


def halving_cell(k, drafter="mine"):
    """Return a cell with 16 drafts; each position has half as many accepted tokens as the previous position."""
    accepted = tuple(16 >> (i + 1) for i in range(k))
    stats = drafts(16, *accepted)
    code = CategoryResult(num_responses=2, num_output_tokens=20, speculation=stats)
    return cell_of(k, stats, drafter, by_category={"code": code})


@pytest.fixture
def report():
    return {
        "model": "tiny", "hardware": "CPU, 2 CPUs, 24.0 GiB", "versions": {"vllm": "0.29.0"}, "precision": "bf16",
        "compiled": True, "concurrency": 1, "sampling": {"temperature": 0.0, "max_tokens": 256},
        "dataset": {"name": "humaneval", "num_prompts": 164, "rejected": {}},
        "cells": [halving_cell(1), halving_cell(3), halving_cell(3, "other")], "notes": [],
    }  # fmt: skip


def test_text_report_is_a_table_with_a_row_per_setup(report):
    lines = text_report(report).splitlines()
    header, k1, k3 = (line.split() for line in lines[2:5])
    assert header[5:] == ["1", "2", "3", "drafted/s", "accepted/s", "output/s"]
    assert k1 == ["mine", "1", "1.50", "16", "50%", "8.0", "4.0", "10.5"]
    assert k3 == ["mine", "3", "1.88", "16", "50%", "25%", "12%", "24.0", "7.0", "10.5"]
    assert len({len(line) for line in lines[2:6]}) == 1
    assert lines[0].startswith("tiny; 164 prompts of humaneval; greedy; at most 256 tokens; concurrency 1; bf16")


def test_markdown_tables_are_rectangular_and_name_their_conditions(report):
    text = markdown_report(report)
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert [len({line.count("|") for line in table.splitlines()}) for table in tables] == [1, 1]
    assert "| code | mine | 3 | 1.88 | 16 | 2 | 50% | 25% | 12% |" in tables[1]
    assert "vllm 0.29.0" in text
    assert "2026-11-21" in text  # the date of `make_pass_record`


def test_length_plot_has_a_line_per_drafter(report):
    root = ElementTree.fromstring(length_plot(report))
    titles = [node.text for circle in root.iter(f"{SVG}circle") for node in circle.iter(f"{SVG}title")]
    assert titles == ["mine, K=1: 1.50", "mine, K=3: 1.88", "other, K=3: 1.88"]
    lines = [line.attrib["points"].split() for line in root.iter(f"{SVG}polyline")]
    assert [len(points) for points in lines] == [2, 1]
    assert lines[0][1] == lines[1][0]
    # A longer acceptance length is higher in the plot, so its y coordinate is smaller.
    assert float(lines[0][0].split(",")[1]) > float(lines[0][1].split(",")[1])


def test_position_plot_uses_the_largest_k(report):
    root = ElementTree.fromstring(position_plot(report))
    assert len(list(root.iter(f"{SVG}path"))) == 6
    texts = [node.text for node in root.iter(f"{SVG}text")]
    assert {"mine, K=3", "other, K=3", "Acceptance by position, tiny, humaneval"} <= set(texts)
