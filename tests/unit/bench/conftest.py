"""Records and reports as a benchmark leaves them, and a target with heads of which only `config.json` is read."""

from typing import Any

import pytest
from config_only import measure_at_once, write_head, write_target

from peagle.bench.plan import make_setup
from peagle.bench.record import PassRecord, RequestTimes
from peagle.engine.spec import DRAFT_METHODS, DrafterSpec, EngineSpec
from peagle.speculation import SpeculationStats


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """No waiting for counters; a home of each test's own."""
    measure_at_once(monkeypatch)
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))


@pytest.fixture
def target(tmp_path):
    return write_target(tmp_path / "target")


@pytest.fixture
def head(tmp_path):
    """Make a head of a kind."""

    def make(kind="peagle", **changes):
        return write_head(tmp_path / "heads" / kind, kind, **changes)

    return make


def setup(method="peagle", k=3):
    model = "head" if method in DRAFT_METHODS else ""
    values: dict[str, Any] = {"method": method, "model": model, "num_speculative_tokens": k}
    return make_setup(EngineSpec(model="target"), None if method == "none" else DrafterSpec(**values))


def drafts(num_drafts, *accepted):
    return SpeculationStats(
        num_drafts=num_drafts, num_draft_tokens=num_drafts * len(accepted), accepted_per_position=accepted
    )


ONE_REQUEST = (RequestTimes(num_output_tokens=21, elapsed_s=2.0, decode_s=1.5),)


def record(
    method="peagle",
    k=3,
    concurrency=1,
    repeat=0,
    *,
    wall_s=2.0,
    requests=ONE_REQUEST,
    speculation=None,
    **changes,
):
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
