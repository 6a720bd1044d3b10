"""Fixtures with measured cells and a profile, as written by `peagle tune`."""

import pytest

from peagle.profiles.profile import MeasuredCell, Profile, Tuned


@pytest.fixture
def cell():
    """Return a function that makes a cell from a method, a K, a concurrency and a speed."""

    def make(method, k, concurrency, speed, length=None):
        return MeasuredCell(
            method=method, k=k, concurrency=concurrency, output_tokens_per_s=speed, acceptance_length=length,
            drafter=method, max_num_batched_tokens=2048,
        )  # fmt: skip

    return make


@pytest.fixture
def cells(cell):
    """Cells: with 1 and 4 concurrent requests, P-EAGLE is faster; with 16, no speculation is faster."""
    return [
        cell("peagle", 3, 4, 50.0, 1.6), cell("peagle", 5, 4, 48.0, 1.75), cell("none", 0, 4, 40.0),
        cell("peagle", 3, 1, 20.0, 1.6), cell("none", 0, 1, 15.0),
        cell("none", 0, 16, 100.0), cell("peagle", 3, 16, 80.0, 1.6),
    ]  # fmt: skip


@pytest.fixture
def profile(cells):
    """A profile that chooses P-EAGLE with K=3 and 4 concurrent requests."""
    return Profile(
        peagle_profile=1,
        decision="P-EAGLE K=3: 50.0 output tokens/s, 4 concurrent requests.",
        objective={"objective": "throughput", "max_tpot_ms": None, "max_ttft_ms": None},
        engine={
            "model": "smollm2-135m", "drafter": "peagle", "num_speculative_tokens": 3, "precision": "auto",
            "max_num_seqs": 4, "max_num_batched_tokens": 2048, "max_model_len": 1024,
        },
        tuned=Tuned(concurrency=4, acceptance_length=1.6),
        target={"name": "smollm2-135m", "revision": "abc"},
        hardware="a machine",
        versions={"vllm": "0.29.0"},
        dataset={"name": "humaneval", "num_prompts": 164},
        price=None,
        made_at="2026-11-21T22:00:00Z",
        engine_minutes=12.0,
        measurements=cells,
    )  # fmt: skip
