import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from config_only import skip_waiting, write_head, write_target

from peagle.bench.config import BenchConfig
from peagle.bench.engine import MeasurementListener
from peagle.bench.plan import make_plan
from peagle.catalog.targets import resolve_model
from peagle.engine.fake import ByteTokenizer, FakeEngine, FakeTraits
from peagle.hardware import Hardware

FOLDER = Path(__file__).parents[3] / "benchmarks" / "gpu"
sys.path.insert(0, str(FOLDER))  # where the scripts import each other from

import best_k  # noqa: E402
import block  # noqa: E402
import embedded  # noqa: E402
import headline  # noqa: E402
import steps  # noqa: E402
import train_heads  # noqa: E402
import variants  # noqa: E402

H200 = Hardware(
    platform="cuda", accelerator="H200", num_accelerators=1, compute_capability=(9, 0), memory_gib=140,
    free_memory_gib=140, num_cpus=16,
)  # fmt: skip


def passes(keys):
    """Engine and concurrency of each pass, in order."""
    config = BenchConfig(**keys)
    plan = make_plan(config, H200, resolve_model(config.model))
    return [(planned.setup.label, planned.concurrency) for planned in plan.passes]


@pytest.mark.parametrize(("module", "k"), [(headline, 7), (best_k, 11)])
def test_items_1_and_2_measure_peagle_first(shapes, module, k):
    ((folder, keys),) = module.benches(shapes, tiny=False)
    engines = [f"P-EAGLE K={k}", f"EAGLE-3 K={k}", "no speculation"]
    assert folder == ""
    assert passes(keys) == [(engine, concurrency) for engine in engines for concurrency in (1, 8, 32, 128)]
    assert keys["load_format"] == "dummy"
    assert keys["precision"] == "fp8"


def test_other_items_measure_peagle_first(shapes):
    (_, first), (_, others) = embedded.benches(shapes, tiny=False)
    assert (first["methods"], first["num_speculative_tokens"]) == ("peagle,eagle3,none", [7])
    assert others["num_speculative_tokens"] == [3, 5, 7]
    measured = variants.benches(shapes, tiny=False)
    assert [name for name, _ in measured][:2] == ["fp8", "bf16"]
    assert all(passes(keys) == [("P-EAGLE K=7", c) for c in (1, 8, 32, 128)] for _, keys in measured)
    assert passes(steps.keys_of(shapes, tiny=False))[0] == ("P-EAGLE K=7", 1)


def test_trainings_fit_the_block():
    commands = train_heads.commands(Path("runs/heads"), 480.0, tiny=False)
    assert list(commands) == ["peagle-5", "peagle-3", "eagle3-1"]
    for words in commands.values():
        assert words[words.index("--time-budget-s") + 1] == "480"
        assert sum(word == "--prompts" for word in words) == 5


@pytest.fixture
def bench(tmp_path, write_jsonl, monkeypatch):
    skip_waiting(monkeypatch)
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))

    def bench(**keys):
        values = {
            "model": str(write_target(tmp_path / "target")), "output": tmp_path / "out", "max_tokens": 20,
            "dataset": str(write_jsonl([{"prompt": f"p{number}"} for number in range(6)])), "methods": "peagle,none",
            "drafter": f"peagle={write_head(tmp_path / 'head', 'peagle')}", "num_speculative_tokens": "2",
            "concurrency": "1,3", "repeats": 1, "rounds": 1, "requests_per_slot": 2,
        } | keys  # fmt: skip
        engines: list[RecordingEngine] = []

        def start(*_):
            engines.append(RecordingEngine())
            return engines[-1]

        config = BenchConfig(**values)
        return block.BlockBench.prepare(config, MeasurementListener(), start, lambda *_: ByteTokenizer()), engines

    return bench


class RecordingEngine(FakeEngine):
    def __init__(self):
        super().__init__(FakeTraits(token_s=0.0005), num_speculative_tokens=2)
        self.lengths: list[int] = []

    async def generate(self, request_id, token_ids, sampling):
        self.lengths.append(sampling["max_tokens"])
        return await super().generate(request_id, token_ids, sampling)


def test_each_engine_is_warmed_up_once_at_all_concurrencies(bench):
    running, engines = bench()
    running.run()
    assert len(engines) == 2
    for engine in engines:
        assert engine.lengths[:4] == [block._WARM_UP_TOKENS] * (1 + 3)
        assert engine.lengths[4:] == [20] * (2 * 1 + 2 * 3)


def test_an_interrupted_block_has_a_report(bench, tmp_path):
    running, _ = bench()
    seen: list[int] = []

    def after_pass():  # what a kill -9 would leave
        report = json.loads((tmp_path / "out" / "report.json").read_bytes())
        seen.append(len(report["cells"]))
        assert (tmp_path / "out" / "report.md").exists()

    running.after_pass = after_pass
    running.run()
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize("module", [headline, best_k])
def test_items_1_and_2_compare_after_every_pass(module, tmp_path, monkeypatch, capsys):
    cells = [row for k in (7, 11) for method in ("peagle", "eagle3") for row in cell(method, k, 300)]
    (tmp_path / "report.json").write_text(json.dumps({"cells": [*cells, *cell("none", 0, 100)]}))

    def run_block(args, benches, then):
        then()
        return 0

    monkeypatch.setattr(module, "run_block", run_block)
    monkeypatch.setattr(module, "shapes_folder", lambda *, tiny: Path("shapes"))
    assert module.run(SimpleNamespace(output=tmp_path, headline=tmp_path, tiny=True)) == 0
    assert "DRY RUN" in (tmp_path / "comparison.md").read_text()
    capsys.readouterr()


def cell(method, k, tokens_per_s):
    return [{"method": method, "k": k, "concurrency": c, "output_tokens_per_s": tokens_per_s} for c in (1, 8, 32, 128)]


def test_speed_ups_are_next_to_the_published_ones(tmp_path, capsys):
    first = {"cells": [*cell("peagle", 7, 300), *cell("eagle3", 7, 200), *cell("none", 0, 100)]}
    block.write_comparison(tmp_path / "a.md", [first], lambda method, concurrency: 7, tiny=False)
    text = (tmp_path / "a.md").read_text()
    assert "| P-EAGLE over no speculation, here | 3.00 | 3.00 | 3.00 | 3.00 |" in text
    assert "| P-EAGLE over no speculation, published | 2.82 | 2.92 | 2.39 | 2.13 |" in text
    assert "| P-EAGLE over EAGLE-3, here | 1.50 | 1.50 | 1.50 | 1.50 |" in text
    assert "DUMMY weights, SYNTHETIC acceptance" in text

    # Another block on a machine that is twice as fast: each folder is compared with its own baseline.
    second = {"cells": [*cell("peagle", 11, 800), *cell("eagle3", 11, 440), *cell("none", 0, 200)]}
    block.write_comparison(tmp_path / "b.md", [second, first], block.published_k, tiny=False)
    text = (tmp_path / "b.md").read_text()
    assert "| P-EAGLE over no speculation, here | 4.00 | 4.00 | 4.00 | 3.00 |" in text
    assert "| EAGLE-3 over no speculation, here | 2.00 | 2.00 | 2.20 | 2.00 |" in text
    assert "| P-EAGLE over EAGLE-3, here | 2.00 | 2.00 | 1.82 | 1.50 |" in text
    capsys.readouterr()


def test_vllm_has_the_timed_scopes():
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "v1" / "worker" / "gpu_model_runner.py").read_text()  # importing it is slow
    for part in ("preprocess", "forward", "postprocess", "sample", "draft"):
        assert f'record_function_or_nullcontext("gpu_model_runner: {part}")' in source
