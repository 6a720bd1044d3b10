"""A run and two ledgers of an earlier version: the run can still be resumed, and the computed costs are unchanged.

The files in tests/golden were written on 2026-11-27 at commit c8525b2. The run is from `peagle generate --engine fake
--fake '{"token_s": 0.3}' --rows-per-unit 3 --max-num-seqs 3 --engines 1 ...` and was stopped after two of four units.
The endpoint is from `peagle serve --engine fake` and answered three requests.
"""

import json
import shutil
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from jobs import cli

GOLDEN = Path(__file__).parents[1] / "golden"
FLAGS = {
    "model": "smollm2-135m",
    "drafter": "none",
    "input": "prompts.jsonl",
    "output": "run",
    "max-tokens": "16",
    "rows-per-unit": "3",
    "max-num-seqs": "3",
    "engines": "1",
    "usd-per-hour": "1",
    "tag": "team=search",
}
RESUME = ["generate", "--engine", "fake", *(part for name, value in FLAGS.items() for part in (f"--{name}", value))]


@pytest.fixture
def golden(tmp_path, monkeypatch):
    shutil.copytree(GOLDEN, tmp_path / "golden")
    monkeypatch.chdir(tmp_path / "golden")
    return tmp_path / "golden"


def cost():
    assert cli.run(["cost", "run", "serve", "--by", "model", "--json", "cost-now.json"]) == 0
    return json.loads(Path("cost-now.json").read_text())["total"]


def test_cost_of_old_ledgers_is_unchanged(golden):
    current, recorded = cost(), json.loads((golden / "cost.json").read_text())
    assert {name: current[name] for name in recorded} == recorded


@pytest.mark.usefixtures("ray_cluster")
def test_old_run_can_be_resumed(golden):
    before = {path.name: path.read_bytes() for path in golden.glob("run/data/*")}
    spent_usd = cost()["usd"]["total"]
    assert len(before) == 2
    assert cli.run(RESUME) == 0
    assert {name: (golden / "run/data" / name).read_bytes() for name in before} == before
    rows = ds.dataset(golden / "run/data", format="parquet").to_table().sort_by("id").to_pylist()
    assert [row["id"] for row in rows] == [f"{number:09d}" for number in range(12)]
    assert cost()["usd"]["total"] > spent_usd
    assert cli.run(["audit", "run"]) == 0
