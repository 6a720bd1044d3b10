"""A target and a head of which only `config.json` is read, and cells as a tuning leaves them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peagle.tuning.profile import MeasuredCell, Profile, Tuned

TARGET = {
    "hidden_size": 8, "num_hidden_layers": 4, "vocab_size": 300, "max_position_embeddings": 512,
    "num_attention_heads": 2,
}  # fmt: skip
HEAD = {
    "speculators_model_type": "peagle",
    "transformer_layer_config": {"hidden_size": 8, "vocab_size": 300},
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "mask_token_id": 0,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No waiting for counters; a home of each test's own."""
    monkeypatch.setattr("peagle.measurement.closed_loop._COUNTERS_SETTLE_S", 0.0)
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # set by a run; put back afterwards


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str, dict[str, Any]], Path]:
    """Make a model of its configuration alone."""

    def make(name: str, config: dict[str, Any]) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        return tmp_path / name

    return make


@pytest.fixture
def cell() -> Callable[..., MeasuredCell]:
    """Make a cell of a method, a K, a concurrency and a speed."""

    def make(method: str, k: int, concurrency: int, speed: float, length: float | None = None) -> MeasuredCell:
        return MeasuredCell(
            method=method, k=k, concurrency=concurrency, output_tokens_per_s=speed, acceptance_length=length,
            drafter=method, max_num_batched_tokens=2048,
        )  # fmt: skip

    return make


@pytest.fixture
def cells(cell: Any) -> list[MeasuredCell]:
    """The worked example of ranges.py, K=5 beside it, and no speculation ahead at 16 at once."""
    return [
        cell("peagle", 3, 4, 50.0, 1.6), cell("peagle", 5, 4, 48.0, 1.75), cell("none", 0, 4, 40.0),
        cell("peagle", 3, 1, 20.0, 1.6), cell("none", 0, 1, 15.0),
        cell("none", 0, 16, 100.0), cell("peagle", 3, 16, 80.0, 1.6),
    ]  # fmt: skip


@pytest.fixture
def profile(cells: list[MeasuredCell]) -> Profile:
    """P-EAGLE K=3 with 4 at once."""
    return Profile(
        peagle_profile=1,
        decision="P-EAGLE K=3: 50.0 output tokens/s, 4 at once.",
        objective={"objective": "throughput", "max_tpot_ms": None, "max_ttft_ms": None},
        engine={
            "model": "smollm2-135m", "drafter": "peagle", "num_speculative_tokens": 3, "precision": "auto",
            "max_num_seqs": 4, "max_num_batched_tokens": 2048, "max_model_len": 1024,
        },
        tuned=Tuned.of(cells[0], cells),
        target={"name": "smollm2-135m", "revision": "abc"},
        hardware="a machine",
        versions={"vllm": "0.29.0"},
        dataset={"name": "humaneval", "num_prompts": 164},
        price=None,
        made_at="2026-11-21T22:00:00Z",
        engine_minutes=12.0,
        measurements=cells,
    )  # fmt: skip
