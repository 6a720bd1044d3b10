from typing import Any

import pytest
from config_only import skip_waiting, write_head, write_target
from usage_records import drafts

from peagle.bench.plan import make_setup
from peagle.bench.record import PassRecord, RequestTimes
from peagle.engine.spec import DRAFT_METHODS, DrafterSpec, EngineSpec
from peagle.speculation import SpeculationStats


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch, tmp_path):
    """Do not wait for an engine's counters, and use an empty PEAGLE_HOME."""
    skip_waiting(monkeypatch)
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))


@pytest.fixture
def target(tmp_path):
    return write_target(tmp_path / "target")


@pytest.fixture
def write_head_folder(tmp_path):
    def write(method="peagle", **changes):
        return write_head(tmp_path / "heads" / method, method, **changes)

    return write


def engine_setup(method="peagle", k=3):
    model = "head" if method in DRAFT_METHODS else ""
    values: dict[str, Any] = {"method": method, "model": model, "num_speculative_tokens": k}
    return make_setup(EngineSpec(model="target"), None if method == "none" else DrafterSpec(**values))


ONE_REQUEST = (RequestTimes(num_output_tokens=21, elapsed_s=2.0, decode_s=1.5),)


def make_pass_record(
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
    """Return the record of a pass with one request, of 21 tokens in 2 s.

    By default it has 10 drafts, of which 6, 3 and 1 were accepted at the three positions.
    """
    values: dict[str, Any] = {
        "start_s": 20.0, "num_refused": 0, "peak_memory_gib": 1.5, "measured_at": "2026-11-21T10:00:00Z",
    }  # fmt: skip
    default_stats = drafts(10, 6, 3, 1) if method != "none" else SpeculationStats.empty()
    return PassRecord(
        method=method,
        k=0 if method == "none" else k,
        concurrency=concurrency,
        repeat=repeat,
        wall_s=wall_s,
        requests=requests,
        speculation=default_stats if speculation is None else speculation,
        **(values | changes),
    )
