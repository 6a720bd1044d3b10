"""The whole evaluation with fakes in the place of engines: what runs, what is kept, what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from config_only import write_head

from peagle.bench.acceptance import evaluate, make_cell
from peagle.bench.config import EvaluateConfig
from peagle.bench.engine import MeasurementListener
from peagle.bench.plan import make_setup
from peagle.bench.record import CategoryResult
from peagle.engine.fake import ByteTokenizer, FakeEngine
from peagle.engine.interface import Generation, RequestRefused
from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.errors import ConfigError, DrafterError, EngineError
from peagle.hardware import Hardware

from .conftest import drafts, record

ROWS = [{"prompt": f"prompt {i}", "category": "even" if i % 2 == 0 else "odd"} for i in range(6)]


class Starter:
    """Starts fakes and remembers what it was asked for, and which of them are still up."""

    def __init__(self) -> None:
        self.specs: list[EngineSpec] = []
        self.engines: list[RecordingEngine] = []

    def __call__(self, spec: EngineSpec, hardware: Hardware) -> "RecordingEngine":
        assert all(engine.is_down for engine in self.engines), "one engine at a time"
        assert spec.drafter is not None
        self.specs.append(spec)
        self.engines.append(RecordingEngine(num_speculative_tokens=spec.drafter.num_speculative_tokens))
        return self.engines[-1]


class RecordingEngine(FakeEngine):
    """Counts how many requests are in it at once, and notes that it was shut down."""

    is_down = False
    num_running = most_running = 0

    async def generate(self, *args: Any) -> Any:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            return await super().generate(*args)
        finally:
            self.num_running -= 1

    def shutdown(self) -> None:
        self.is_down = True


@pytest.fixture
def head(tmp_path: Path) -> Callable[..., Path]:
    """Make a head: its path below the test's folder, its kind, and what sets it apart from others."""

    def make(path: str = "heads/mine/head", kind: str = "peagle", **changes: Any) -> Path:
        return write_head(tmp_path / path, kind, path=path, **changes)

    return make


@pytest.fixture
def run(target: Path, tmp_path: Path, write_jsonl: Callable[..., Path]) -> Callable[..., dict[str, Any]]:
    def run(start: Callable[[EngineSpec, Hardware], Any], **keys: Any) -> dict[str, Any]:
        values = {"dataset": str(write_jsonl(ROWS)), "output": tmp_path / "out", "max_tokens": 40} | keys
        config = EvaluateConfig(model=str(target), **values)
        report, folder = evaluate(config, MeasurementListener(), start=start, tokenizer_of=lambda *_: ByteTokenizer())
        assert json.loads((folder / "report.json").read_bytes()) == report
        return report

    return run


def test_one_engine_for_each_drafter_and_k_and_every_figure_of_it(run: Any, head: Any, tmp_path: Path) -> None:
    start = Starter()
    peagle, eagle3 = head("a/head"), head("b/head", kind="eagle3")
    report = run(start, drafter=[str(peagle), str(eagle3)], num_speculative_tokens="2,4", concurrency=3)
    drafters = [spec.drafter for spec in start.specs if spec.drafter]
    assert [(d.method, d.model, d.num_speculative_tokens) for d in drafters] == [
        ("peagle", str(peagle), 2), ("peagle", str(peagle), 4), ("eagle3", str(eagle3), 2), ("eagle3", str(eagle3), 4),
    ]  # fmt: skip
    assert all(engine.is_down and engine.most_running == 3 for engine in start.engines)
    assert {spec.max_num_seqs for spec in start.specs} == {3}
    # The fake has the first token of every draft accepted and no other.
    assert [(c["drafter"], c["k"], c["acceptance_length"]) for c in report["cells"]] == [
        ("a/head", 2, 2.0), ("a/head", 4, 2.0), ("b/head", 2, 2.0), ("b/head", 4, 2.0),
    ]  # fmt: skip
    cell = report["cells"][1]
    assert cell["acceptance_rates"] == [1.0, 0.0, 0.0, 0.0]
    assert (cell["num_responses"], cell["num_refused"]) == (6, 0)
    assert cell["drafted_tokens_per_s"] == pytest.approx(4 * cell["accepted_tokens_per_s"])
    assert {name: found["num_responses"] for name, found in cell["by_category"].items()} == {"even": 3, "odd": 3}
    assert sum(found["num_drafts"] for found in cell["by_category"].values()) == cell["num_drafts"]


def test_results_lie_in_the_folder(run: Any, head: Any, tmp_path: Path) -> None:
    run(Starter(), drafter=str(head()), num_speculative_tokens=2)
    assert "| drafter | K | acceptance length |" in (tmp_path / "out" / "report.md").read_text()
    for name in ("acceptance-length.svg", "acceptance-by-position.svg"):
        assert ElementTree.parse(tmp_path / "out" / name).getroot().tag.endswith("svg")


def test_finished_cells_are_not_done_again_and_others_can_be_added(run: Any, head: Any) -> None:
    first, second, third = Starter(), Starter(), Starter()
    mine = str(head("a/head"))
    before = run(first, drafter=mine, num_speculative_tokens=2)
    assert run(second, drafter=mine, num_speculative_tokens=2) == before
    assert second.specs == []
    after = run(third, drafter=[mine, str(head("b/head"))], num_speculative_tokens="2,3")
    assert [(spec.drafter.model, spec.drafter.num_speculative_tokens) for spec in third.specs] == [
        (mine, 3), (mine.replace("/a/", "/b/"), 2), (mine.replace("/a/", "/b/"), 3),
    ]  # fmt: skip
    assert after["cells"][0] == {**before["cells"][0], "drafter": "a/head"}


def test_a_head_that_was_trained_again_is_measured_again(run: Any, head: Any) -> None:
    again = Starter()
    run(Starter(), drafter=str(head()), num_speculative_tokens=2)
    run(again, drafter=str(head(note="trained again")), num_speculative_tokens=2)
    assert len(again.specs) == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"concurrency": 2}, "concurrency: it was 1, now it is 2"),
        ({"category_column": "level"}, "dataset.category_column: it was 'category', now it is 'level'"),
    ],
)
def test_another_fingerprint_is_refused_with_the_difference_named(
    change: dict[str, Any], named: str, run: Any, head: Any
) -> None:
    refused = Starter()
    run(Starter(), drafter=str(head()), num_speculative_tokens=2)
    with pytest.raises(ConfigError, match=named):
        run(refused, drafter=str(head()), num_speculative_tokens=2, **change)
    assert refused.specs == []


def test_without_a_folder_the_same_command_finds_its_own(
    run: Any, head: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    again, other = Starter(), Starter()
    keys = {"drafter": str(head()), "num_speculative_tokens": 2, "output": None}
    run(Starter(), **keys)
    run(again, **keys)
    run(other, **keys, temperature=0.5)
    assert (len(again.specs), len(other.specs)) == (0, 1)
    assert len(list((tmp_path / "runs" / "evaluate").iterdir())) == 2


def test_a_damaged_cell_is_told_by_name(run: Any, head: Any, tmp_path: Path) -> None:
    run(Starter(), drafter=str(head()), num_speculative_tokens=2)
    (file,) = (tmp_path / "out" / "cells").iterdir()
    file.write_text('{"k": 2}')
    with pytest.raises(ConfigError, match=f"{file.name} is damaged"):
        run(Starter(), drafter=str(head()), num_speculative_tokens=2)


def test_an_engine_that_drafts_nothing_is_left_out_and_kept_in_no_cell(run: Any, head: Any, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="produced no drafts") as failed:
        run(lambda *_: FakeEngine(num_speculative_tokens=0), drafter=str(head()), num_speculative_tokens=2)
    assert "--max-tokens" in failed.value.hint
    assert list((tmp_path / "out" / "cells").iterdir()) == []


def test_figures_of_a_cell_by_hand() -> None:
    drafter = DrafterSpec(method="peagle", model="head", num_speculative_tokens=3)
    setup = make_setup(EngineSpec(model="target"), drafter, head="mine", fingerprint="f")
    code = CategoryResult(num_responses=1, num_output_tokens=4, speculation=drafts(3, 2, 1, 0))
    cell = make_cell(setup, record(wall_s=2.0, speculation=drafts(10, 7, 3, 1), by_category={"code": code}))
    assert (cell["drafter"], cell["method"], cell["fingerprint"], cell["k"]) == ("mine", "peagle", "f", 3)
    assert cell["acceptance_length"] == pytest.approx(1 + 11 / 10)
    assert [cell[f"{name}_tokens_per_s"] for name in ("drafted", "accepted", "output")] == [15, 5.5, 10.5]
    assert cell["by_category"]["code"]["acceptance_length"] == 2.0


class Dying(Starter):
    """The second engine ends with an error."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def __call__(self, spec: EngineSpec, hardware: Hardware) -> Any:
        async def dies(*_: Any) -> Generation:
            raise self._error

        engine = super().__call__(spec, hardware)
        if len(self.engines) == 2:
            engine.generate = dies  # type: ignore[method-assign]
        return engine


def test_an_engine_that_dies_is_shut_down_and_named_and_the_others_are_measured(
    run: Any, head: Any, tmp_path: Path
) -> None:
    dying, again = Dying(EngineError("the vLLM engine process died")), Starter()
    report = run(dying, drafter=str(head()), num_speculative_tokens="2,3,4")
    assert all(engine.is_down for engine in dying.engines)
    assert [cell["k"] for cell in report["cells"]] == [2, 4]
    assert report["failed"] == {"head K=3": "the vLLM engine process died"}
    words = "Not measured: head K=3, because its engine failed: the vLLM engine process died"
    assert report["notes"] == [words]
    assert words in (tmp_path / "out" / "report.md").read_text()
    after = run(again, drafter=str(head()), num_speculative_tokens="2,3,4")
    assert [spec.drafter.num_speculative_tokens for spec in again.specs if spec.drafter] == [3]
    assert (after["failed"], after["notes"]) == ({}, [])


def test_an_interrupt_leaves_a_report_of_what_was_finished(run: Any, head: Any, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(Dying(KeyboardInterrupt()), drafter=str(head()), num_speculative_tokens="2,3")
    left = json.loads((tmp_path / "out" / "report.json").read_bytes())
    assert [cell["k"] for cell in left["cells"]] == [2]
    assert left["notes"] == ["Not finished: 1 cells remain."]


def test_refused_requests_are_counted_and_the_others_measured(run: Any, head: Any) -> None:
    class Picky(FakeEngine):
        async def generate(self, request_id: str, *args: Any) -> Generation:
            if request_id == "1":
                raise RequestRefused("not this one")
            return await super().generate(request_id, *args)

    report = run(lambda *_: Picky(num_speculative_tokens=2), drafter=str(head()), num_speculative_tokens=2)
    assert (report["cells"][0]["num_responses"], report["cells"][0]["num_refused"]) == (5, 1)


def test_an_engine_that_cannot_tell_requests_apart_still_gives_the_length(run: Any, head: Any) -> None:
    class Older(FakeEngine):
        """As vLLM 0.24: drafts are counted, but not by request."""

        async def generate(self, *args: Any) -> Generation:
            from dataclasses import replace

            return replace(await super().generate(*args), speculation=None)

    start = Starter()
    by_request = run(start, drafter=str(head()), num_speculative_tokens=3)
    by_engine = run(lambda *_: Older(num_speculative_tokens=3), drafter=str(head("older")), num_speculative_tokens=3)
    for name in ("num_drafts", "num_draft_tokens", "accepted_per_position", "num_output_tokens"):
        assert by_engine["cells"][0][name] == by_request["cells"][0][name]
    assert by_engine["cells"][0]["by_category"] == {}
    assert "acceptance by category is unknown" in by_engine["notes"][0]


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"drafter": "no/such/head"}, DrafterError, "no such drafter"),
        ({"drafter": "auto"}, DrafterError, "resolves to no drafter"),
        ({"max_model_len": 9999}, ConfigError, "the context of target has 512 tokens"),
    ],
)
def test_what_cannot_be_is_refused_before_an_engine_starts(
    keys: dict[str, Any], error: type[Exception], message: str, run: Any, tmp_path: Path, head: Any
) -> None:
    start = Starter()
    with pytest.raises(error, match=message):
        run(start, **{"drafter": str(head()), **keys})
    assert start.specs == []
    assert not (tmp_path / "out").exists()


def test_the_same_head_twice_is_refused(run: Any, head: Any) -> None:
    with pytest.raises(ConfigError, match="occurs twice"):
        run(Starter(), drafter=[str(head()), str(head())])


def test_finer_points_reach_its_engines(run: Any, head: Any) -> None:
    start = Starter()
    finer = {"engine_args": "block_size=32", "draft_attention_backend": "triton_attn"}
    report = run(start, drafter=str(head()), num_speculative_tokens="2", **finer)
    assert start.specs[0].extra["block_size"] == 32
    assert start.specs[0].drafter is not None
    assert start.specs[0].drafter.attention_backend == "TRITON_ATTN"
    assert report["fingerprint"]["engine_args"] == {"block_size": 32}
