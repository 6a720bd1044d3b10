"""A plan's prediction compared with the folder of a real run."""

import json

import pytest

from benchmarks.plan.validate import compare
from jobs import cli
from peagle.profiles.measurements import Cell

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def run(write_jsonl, tmp_path):
    corpus = write_jsonl([{"prompt": f"say {n}"} for n in range(20)])
    flags = ["--engine", "fake", "--num-speculative-tokens", "3", "--max-num-seqs", "8"]
    assert cli.run(["generate", "--input", str(corpus), "--output", str(tmp_path / "first"), *flags]) == 0
    return tmp_path / "first"


def cell(method, k, concurrency, speed):
    return Cell(method=method, k=k, concurrency=concurrency, output_tokens_per_s=speed, start_s=2.0)


def test_prediction_uses_the_nearest_cell(run):
    report = json.loads((run / "report.json").read_bytes())
    account, num_engines = report["account"], report["run"]["num_engines"]
    tokens, wall_s, speed = (account[name] for name in ("num_output_tokens", "wall_s", "output_tokens_per_s"))
    cells = [cell("none", 0, 8, 1.0), cell("peagle", 3, 1, 1.0), cell("peagle", 3, 6, speed), cell("peagle", 5, 8, 1.0)]
    result = dict(zip(("run", "method", "at once", "tokens", "wall", "predicted"), compare(run, cells), strict=False))
    predicted_s = 2 + tokens / speed / num_engines
    assert result == {
        "run": "first", "method": "peagle K=3", "at once": "8 (6)", "tokens": f"{tokens:,}", "wall": f"{wall_s:.1f}",
        "predicted": f"{predicted_s:.1f} ({predicted_s / wall_s - 1:+.0%})",
    }  # fmt: skip
    usd, predicted_usd, busy_speed, start = compare(run, cells)[6:]
    assert usd == f"{account['usd']['total']:.5f}"
    devices = account["device_s"]["busy"] / account["busy_s"] * num_engines
    predicted = predicted_s * devices * account["price"]["usd_per_device_s"]
    assert float(predicted_usd.split()[0]) == pytest.approx(predicted, abs=1e-5)
    assert busy_speed == f"{speed:.1f} (+0%)"
    assert start.startswith("2.0 (+")


def test_benchmark_without_the_runs_method_is_refused(run):
    with pytest.raises(SystemExit, match="the benchmark has no peagle K=3"):
        compare(run, [cell("none", 0, 8, 100.0)])
