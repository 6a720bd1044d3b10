"""A target and a head of which only `config.json` is read, and cells as a tuning leaves them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tuned_profiles import cell, cells, profile

__all__ = ["cell", "cells", "profile"]

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
    monkeypatch.setattr("peagle.bench.closed_loop._COUNTERS_SETTLE_S", 0.0)
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
