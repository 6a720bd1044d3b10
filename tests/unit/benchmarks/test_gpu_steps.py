"""The floor of a step, against a shape reckoned by hand; what is made of timed steps; and engines that fail."""

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from config_only import write_target

from benchmarks.gpu import step_profile
from benchmarks.gpu.shapes import head_config, head_shapes, target_config
from benchmarks.gpu.step_floor import experts_met, median_step, step_bytes
from benchmarks.gpu.step_profile import drafter_plot, table
from benchmarks.gpu.step_profile import head_config as head_config_of
from benchmarks.gpu.step_timer import _Marks
from peagle.bench.config import BenchConfig
from peagle.bench.plan import Setup, make_setup
from peagle.engine.fake import ByteTokenizer
from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.errors import DrafterError, EngineError

DENSE: dict[str, Any] = {
    "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 10,
}  # fmt: skip
SVG = "{http://www.w3.org/2000/svg}"
HEAD = {"speculators_model_type": "eagle3", "transformer_layer_config": {"hidden_size": 4}}


def test_a_dense_target_reads_its_weights_and_every_request_s_cache() -> None:
    read = step_bytes(DENSE, None, k=0, concurrency=3, context_tokens=5, weight_bytes=1, kv_bytes=2)
    layer = 4 * (4 + 2 * 2) + 4 * 4 + 3 * 4 * 8  # q, k and v of heads of 2; o; gate, up and down
    assert read.target_weights == 2 * layer + 10 * 4 * 2
    assert read.target_kv == 2 * (2 * 1 * 2) * 3 * 5 * 2
    assert read.drafter == 0


def test_a_mixture_reads_the_experts_that_its_tokens_meet() -> None:
    target = target_config(tiny=False)
    one, all_of_them = (
        step_bytes(target, None, k=0, concurrency=c, context_tokens=0, weight_bytes=1, kv_bytes=1).target_weights
        for c in (1, 10_000)
    )
    # 3.3B parameters active and 30.5B in all, less the embedding, which is looked up; the lm_head is in bf16.
    assert one == pytest.approx(3.35e9, rel=0.01)
    assert all_of_them == pytest.approx(30.5e9, rel=0.01)
    assert experts_met(8, 8, 1) == 8


def test_eagle3_reads_its_head_k_times_and_p_eagle_once() -> None:
    target = target_config(tiny=False)

    def drafter(method: str, k: int) -> float:
        head = head_config(method, target, tiny=False)
        return step_bytes(target, head, k=k, concurrency=1, context_tokens=300, weight_bytes=2, kv_bytes=2).drafter

    assert drafter("peagle", 11) == drafter("peagle", 3)
    assert drafter("eagle3", 11) - drafter("eagle3", 7) == pytest.approx(drafter("eagle3", 7) - drafter("eagle3", 3))


def test_one_pass_of_a_head_reads_all_its_matrices() -> None:
    target = target_config(tiny=False)
    head = head_config("eagle3", target, tiny=False)
    read = step_bytes(target, head, k=1, concurrency=1, context_tokens=0, weight_bytes=2, kv_bytes=2)
    matrices = [shape for _, shape in head_shapes(head) if len(shape) == 2]
    assert read.drafter_weights == 2 * sum(rows * columns for rows, columns in matrices)


def steps(*num_requests: int) -> list[dict[str, float]]:
    return [
        {"began_s": 0.01 * i, "num_requests": n, "forward": 4.0 + i, "draft": 2.0, "preprocess": 0.5}
        for i, n in enumerate(num_requests)
    ]


def test_a_step_s_parts_are_medians_of_steps_with_all_requests() -> None:
    found = median_step(steps(1, 2, 2, 2, 2, 2, 2, 1), 2)
    # From the second step on the requests are two; three are skipped, two are left: their forward is 8 and 9.
    assert found == pytest.approx(
        {"step": 10.0, "target": 8.5, "logits": 0.0, "sampling": 0.0, "drafter": 2.0, "host": -0.5, "num_steps": 2}
    )
    assert median_step(steps(2, 2, 2), 2) is None


def test_the_table_says_how_far_a_step_is_from_its_floor() -> None:
    parts = {"step": 6.0, "target": 3.0, "logits": 0.5, "sampling": 0.5, "drafter": 1.5, "host": 0.5}
    timed = {"concurrency": 32, "ms": parts, "kernels_ms": 5.0, "floor_ms": {"target": 1.5, "drafter": 0.5}}
    untimed = timed | {"concurrency": 64, "ms": None}
    rows = table([({"method": "peagle", "k": 7}, timed), ({"method": "none", "k": 0}, untimed)])
    assert rows[1][:5] == ["P-EAGLE", "7", "32", "6.00", "3.00"]
    assert rows[1][-4:] == ["5.00", "1.50", "0.50", "3.0x"]
    assert rows[2][:5] == ["no speculation", "-", "64", "-", "-"]
    assert {len(row) for row in rows} == {len(rows[0])}


def profiled(method: str, k: int, *drafter_ms: float | None) -> dict[str, Any]:
    cells = [
        {"concurrency": 4**place, "ms": None if ms is None else {"step": 9.0, "drafter": ms}}
        for place, ms in enumerate(drafter_ms)
    ]
    return {"method": method, "k": k, "cells": cells}


def test_the_drafter_s_part_by_k_is_plotted_without_the_rest_of_the_step() -> None:
    engines = [profiled("none", 0, 0.0, 0.0), profiled("ngram", 7, 0.1, 0.1), profiled("eagle3", 7, 3.5, 8.0)]
    engines += [profiled("eagle3", 3, 1.5, 4.0), profiled("peagle", 3, 0.8, 1.0), profiled("peagle", 7, 0.75, 1.0)]
    plot = drafter_plot("tiny", engines)
    assert plot is not None
    marks = [node.text for circle in ElementTree.fromstring(plot).iter(f"{SVG}circle") for node in circle]
    assert marks == ["EAGLE-3, K=3: 1.50", "EAGLE-3, K=7: 3.50", "P-EAGLE, K=3: 0.80", "P-EAGLE, K=7: 0.75"]
    assert "Drafting alone, concurrency 1, tiny" in plot


def test_without_a_timed_step_of_a_head_there_is_no_plot() -> None:
    assert drafter_plot("tiny", []) is None
    assert drafter_plot("tiny", [profiled("none", 0, 0.0), profiled("peagle", 3, None)]) is None


def setup(method: Any, model: str = "") -> Setup:
    drafter = DrafterSpec(method=method, model=model, num_speculative_tokens=3) if method != "none" else None
    return make_setup(EngineSpec(model="target"), drafter)


@pytest.mark.parametrize("method", ["none", "ngram", "suffix"])
def test_a_setup_without_a_head_has_none_to_read(method: str) -> None:
    assert head_config_of(setup(method)) is None


def test_a_head_is_read_in_its_folder_or_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profile, "hub_config", lambda name, revision: HEAD | {"of": name})
    assert head_config_of(setup("eagle3", "org/head")) == HEAD | {"of": "org/head"}
    (tmp_path / "config.json").write_text(json.dumps(HEAD))
    assert head_config_of(setup("eagle3", str(tmp_path))) == HEAD


def test_a_head_whose_bytes_are_not_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    with pytest.raises(DrafterError, match="not in the layout of speculators"):
        head_config_of(setup("eagle3", str(tmp_path)))


def test_marks_become_steps_by_their_first_part() -> None:
    runner = SimpleNamespace(device=torch.device("cpu"), input_batch=SimpleNamespace(num_reqs=4))
    marks = _Marks(runner)
    for name in ("forward", "preprocess", "forward", "draft", "draft", "preprocess"):
        with marks.scope(f"gpu_model_runner: {name}"):
            pass
    first, second = marks.steps()
    assert set(first) == {"began_s", "num_requests", "preprocess", "forward", "draft"}  # what came before is no step
    assert set(second) == {"began_s", "num_requests", "preprocess"}
    assert first["num_requests"] == 4
    assert first["began_s"] < second["began_s"]


def test_vllm_has_the_scopes_that_are_timed() -> None:
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    source = (Path(found.origin).parent / "v1" / "worker" / "gpu_model_runner.py").read_text()  # importing it is slow
    for part in ("preprocess", "forward", "postprocess", "sample", "draft"):
        assert f'record_function_or_nullcontext("gpu_model_runner: {part}")' in source


PROFILE = {
    "copy_bytes_per_s": 2e9,
    "cells": [{"concurrency": 1, "ms": None, "kernels_ms": 5.0, "floor_ms": {"target": 1.5, "drafter": 0.5}}],
}


@pytest.fixture
def profile(
    tmp_path: Path, write_jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, list[str]]]:
    """Profile three engines: the exit code, and those that were started. The ones of methods that fail do so."""
    target, data = write_target(tmp_path / "target"), write_jsonl([{"prompt": "p"}])
    monkeypatch.setattr(step_profile, "load_tokenizer", lambda *_: ByteTokenizer())

    def profile(*failing: str, of: BaseException | None = None) -> tuple[int, list[str]]:
        started = []

        def profile_engine(plan: Any, setup: Setup, dataset: Any, log: Path) -> dict[str, Any]:
            started.append(setup.label)
            if setup.method in failing:
                raise of or EngineError("no room for the KV cache")
            return PROFILE | {"method": setup.method, "k": setup.k}

        monkeypatch.setattr(step_profile, "profile_engine", profile_engine)
        keys = {"methods": "none,ngram", "num_speculative_tokens": "3,5", "concurrency": "1", "max_tokens": 8}
        config = BenchConfig(model=str(target), dataset=str(data), output=tmp_path / "out", **keys)
        return step_profile.profile(config), started

    return profile


def test_an_engine_that_fails_is_named_and_the_others_are_profiled(
    profile: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile("none") == (1, ["no speculation", "n-gram K=3", "n-gram K=5"])
    assert "no speculation is left out: no room for the KV cache" in capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "report.json").read_bytes())
    assert [engine["k"] for engine in report["engines"]] == [3, 5]
    assert report["failed"] == {"no speculation": "no room for the KV cache"}
    note = "Not complete: no speculation, whose engine failed: no room for the KV cache"
    assert note in (tmp_path / "out" / "report.md").read_text()
    assert profile() == (0, ["no speculation"]), "the same command tries it again, and no other"


def test_there_is_a_report_where_no_engine_starts(profile: Any, tmp_path: Path) -> None:
    assert profile("none", "ngram")[0] == 1
    assert (tmp_path / "out" / "report.md").read_text().count("no room for the KV cache") == 3


def test_an_interrupt_leaves_the_report_of_the_engines_that_are_done(profile: Any, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        profile("ngram", of=KeyboardInterrupt())
    report = json.loads((tmp_path / "out" / "report.json").read_bytes())
    assert [engine["method"] for engine in report["engines"]] == ["none"]


def test_an_engine_that_fails_is_told_by_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**arguments: Any) -> None:
        os.write(2, b"(EngineCore pid=7) ERROR 11-21 11:36:04 [core.py:1374] ValueError: no room for the KV cache\n")
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=start))
    monkeypatch.setattr(step_profile, "environment", lambda *_: {})
    monkeypatch.setattr(step_profile, "engine_args", lambda *_, **__: {})
    plan = SimpleNamespace(engine_spec=lambda setup: None, hardware=None)
    log = tmp_path / "none.log"
    log.write_text("(EngineCore pid=6) ERROR 11-20 10:00:00 [core.py:1374] ValueError: of an earlier start\n")
    with pytest.raises(EngineError) as raised:
        step_profile.profile_engine(plan, setup("none"), None, log)
    assert raised.value.message == "ValueError: no room for the KV cache"
    assert "no room for the KV cache" in log.read_text()
