"""Records and reports as a benchmark leaves them, and a target with heads of which only `config.json` is read."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from peagle.bench.record import PassRecord, RequestTimes
from peagle.bench.setups import Setup
from peagle.engine.spec import DrafterSpec
from peagle.speculation import SpeculationStats

TARGET = {
    "hidden_size": 8, "num_hidden_layers": 4, "vocab_size": 300, "max_position_embeddings": 512,
    "num_attention_heads": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No waiting for counters; a home of each test's own."""
    monkeypatch.setattr("peagle.measurement.closed_loop._COUNTERS_SETTLE_S", 0.0)
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # set by a run; put back afterwards


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_config(tmp_path / "target", TARGET)


@pytest.fixture
def head(tmp_path: Path) -> Callable[..., Path]:
    """Make a head of a kind."""

    def make(kind: str = "peagle", **changes: Any) -> Path:
        config = {
            "speculators_model_type": kind,
            "transformer_layer_config": {"hidden_size": 8, "vocab_size": 300},
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
            "mask_token_id": 0,
        }
        return write_config(tmp_path / "heads" / kind, config | changes)

    return make


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def setup(method: str = "peagle", k: int = 3) -> Setup:
    if method == "none":
        return Setup(method="none", k=0, drafter=None)
    return Setup(method=method, k=k, drafter=DrafterSpec(method="peagle", model="head", num_speculative_tokens=k))


def drafts(num_drafts: int, *accepted: int) -> SpeculationStats:
    return SpeculationStats(
        num_drafts=num_drafts, num_draft_tokens=num_drafts * len(accepted), accepted_per_position=accepted
    )


def record(
    method: str = "peagle",
    k: int = 3,
    concurrency: int = 1,
    repeat: int = 0,
    *,
    wall_s: float = 2.0,
    requests: Sequence[RequestTimes] = (RequestTimes(num_output_tokens=21, elapsed_s=2.0, decode_s=1.5),),
    speculation: SpeculationStats | None = None,
    **changes: Any,
) -> PassRecord:
    """One request of 21 tokens in two seconds: 10 drafts, of which 6, 3 and 1 got past each position."""
    values: dict[str, Any] = {
        "start_s": 20.0, "num_refused": 0, "peak_memory_gib": 1.5, "measured_at": "2026-11-21T10:00:00Z",
    }  # fmt: skip
    known = drafts(10, 6, 3, 1) if method != "none" else SpeculationStats.empty()
    return PassRecord(
        method=method,
        k=0 if method == "none" else k,
        concurrency=concurrency,
        repeat=repeat,
        wall_s=wall_s,
        requests=requests,
        speculation=known if speculation is None else speculation,
        **(values | changes),
    )
