"""Published speeds in the place of a file; tests of files are in test_plan.py."""

from pathlib import Path

import pytest
import yaml

from peagle.catalog.cards import load_catalog
from peagle.errors import ConfigError
from peagle.planning.sweeps import read_sweep, read_sweeps

QWEN = "qwen3-coder-30b-a3b-instruct"
HUB_ID = "Qwen/Qwen3-Coder-30B-A3B-Instruct"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A folder without files, and a home without cards."""
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.mark.parametrize("name", [QWEN, HUB_ID])
def test_a_models_published_speeds_are_a_sweep_of_an_accelerator(name):
    (sweep,) = read_sweeps([Path(name)])
    assert (sweep.name, sweep.model) == (f"{QWEN} (published, one B200)", QWEN)
    assert (sweep.accelerator, sweep.devices_per_engine, sweep.precision) == ("B200", 1, "FP8")
    assert (sweep.is_published, sweep.instance_type, sweep.stated) == (True, None, None)
    speeds = {(cell.method, cell.k, cell.concurrency): cell.output_tokens_per_s for cell in sweep.cells}
    assert len(speeds) == 7 * 5, "SPEED-Bench: HumanEval ends at 8 requests at once"
    assert (speeds["peagle", 7, 128], speeds["none", 0, 1]) == (23_329, 294)
    assert {(cell.start_s, cell.acceptance_length) for cell in sweep.cells} == {(None, None)}
    (label,) = sweep.labels
    assert "published, one B200): SPEED-Bench, Code, FP8; AWS machine learning blog" in label
    assert "https://aws.amazon.com/" in label


def test_the_benchmark_elsewhere_has_the_same_cells_for_the_heads_that_there_are():
    assert read_sweep(Path(QWEN)).remeasure == (
        f"peagle bench --model {QWEN} --precision fp8 --methods none,peagle -k 3,7,11 --concurrency 1,4,8,32,128"
    )


def test_without_any_head_the_benchmark_is_of_no_speculation(home):
    card = load_catalog().get(QWEN).model_dump() | {"name": "bare", "heads": {}, "speculation": []}
    (home / "models").mkdir(parents=True)
    (home / "models" / "bare.yaml").write_text(yaml.safe_dump(card))
    assert read_sweep(Path("bare")).remeasure.endswith("--methods none --concurrency 1,4,8,32,128")


def test_a_file_of_that_name_wins(tmp_path):
    (tmp_path / QWEN).write_text("{}")
    with pytest.raises(ConfigError, match="neither a benchmark report nor a sweep"):
        read_sweep(Path(QWEN))


@pytest.mark.parametrize(
    ("name", "message"),
    [("nothing.json", "no such file or model"), ("gpt-oss-20b", "gpt-oss-20b has no published speeds")],
)
def test_what_is_neither_names_the_models_with_published_speeds(name, message):
    with pytest.raises(ConfigError, match=f"measured {name}: {message}") as refused:
        read_sweep(Path(name))
    assert refused.value.hint.endswith(f"one of these models with published speeds: {QWEN}")
