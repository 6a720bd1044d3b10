from itertools import groupby
from typing import Any

import pytest
from devices import cpu, gpu

from peagle.bench import folder as module
from peagle.bench.config import BenchConfig
from peagle.bench.folder import MeasurementFolder, digest
from peagle.bench.plan import all_passes, make_plan, make_setup
from peagle.bench.prompts import Dataset
from peagle.bench.run import time_left_s
from peagle.catalog.targets import resolve_model
from peagle.engine.arguments import engine_args
from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.errors import ConfigError, DrafterError, PriceError
from peagle.files import write_json
from peagle.requests.prompts import PromptSpec

from .conftest import engine_setup, make_pass_record

NONE, EAGLE3, PEAGLE = engine_setup("none"), engine_setup("eagle3"), engine_setup("peagle")


def passes_by_engine(repeats, rounds):
    by_setup = groupby(all_passes([NONE, EAGLE3, PEAGLE], [1, 4], repeats, rounds), key=lambda planned: planned.setup)
    return [(setup.method, [(p.repeat, p.concurrency) for p in passes]) for setup, passes in by_setup]


def test_second_round_has_the_reverse_order():
    assert passes_by_engine(repeats=2, rounds=2) == [
        ("none", [(0, 1), (0, 4)]),
        ("eagle3", [(0, 1), (0, 4)]),
        ("peagle", [(0, 1), (0, 4), (1, 1), (1, 4)]),
        ("eagle3", [(1, 1), (1, 4)]),
        ("none", [(1, 1), (1, 4)]),
    ]


def test_two_rounds_have_the_same_mean_position_for_each_method():
    """So a steady drift of the machine's speed affects all methods equally."""
    passes = all_passes([NONE, EAGLE3, PEAGLE], [1], repeats=2, rounds=2)
    assert len(set(passes)) == len(passes) == 6
    positions = sorted((p.setup.method, i) for i, p in enumerate(passes))
    sums = {method: sum(i for _, i in group) for method, group in groupby(positions, key=lambda position: position[0])}
    assert len(set(sums.values())) == 1


def test_time_left_is_estimated_from_finished_passes():
    remaining = all_passes([NONE, EAGLE3], [1, 4], repeats=1, rounds=1)
    records = [
        make_pass_record(concurrency=1, wall_s=10.0),
        make_pass_record(concurrency=1, wall_s=12.0),
        make_pass_record(concurrency=4, wall_s=4.0),
    ]
    # Two engines start in 20 s each, and have a pass of each concurrency.
    assert time_left_s(records, remaining, is_running=False) == 2 * 20 + 2 * (11 + 4)
    assert time_left_s(records, remaining, is_running=True) == 20 + 2 * (11 + 4)
    # Concurrency 4 has not been measured yet: its passes are estimated from those of concurrency 1.
    assert time_left_s(records[:2], remaining, is_running=False) == 2 * 20 + 4 * 11
    assert time_left_s([], remaining, is_running=False) is None
    assert time_left_s(records, [], is_running=True) == 0


CPU, TWO_GPUS = cpu(), gpu(num_accelerators=2)


def make_bench_plan(target, hardware=CPU, **options):
    config = BenchConfig(**{"model": str(target), "methods": "none", **options})
    return make_plan(config, hardware, resolve_model(str(target)))


def test_every_method_and_k_has_an_engine(target, write_head_folder):
    drafters = [f"peagle={write_head_folder()}", f"eagle3={write_head_folder('eagle3')}"]
    setups = make_bench_plan(
        target, methods="none,peagle,eagle3,ngram", drafter=drafters, num_speculative_tokens="2,4"
    ).setups
    assert [setup.label for setup in setups] == [
        "no speculation", "P-EAGLE K=2", "P-EAGLE K=4", "EAGLE-3 K=2", "EAGLE-3 K=4", "n-gram K=2", "n-gram K=4",
    ]  # fmt: skip
    assert setups[2].drafter == DrafterSpec(method="peagle", model=str(write_head_folder()), num_speculative_tokens=4)
    assert setups[5].drafter == DrafterSpec(method="ngram", model="", num_speculative_tokens=2)
    assert (setups[1].fingerprint, setups[1].head) == (setups[2].fingerprint, "peagle")


@pytest.mark.parametrize(
    ("hardware", "options", "expected"),
    [
        (CPU, {}, [(3, "all"), (5, "all"), (7, "all")]),
        (CPU, {"verify": "auto"}, [(5, "auto")]),  # the head's own K
        (CPU, {"verify": "auto", "num_speculative_tokens": "2,4"}, [(2, "auto"), (4, "auto")]),
        (TWO_GPUS, {"verify": "auto"}, [(3, "all"), (5, "all"), (7, "all")]),
    ],
)
def test_default_k_is_the_heads_own_if_the_engine_chooses(hardware, options, expected, target, write_head_folder):
    setups = make_bench_plan(
        target, hardware, methods="peagle", drafter=f"peagle={write_head_folder()}", **options
    ).setups
    assert [(setup.k, setup.drafter.verify) for setup in setups] == expected


def test_head_of_another_method_is_refused(target, write_head_folder):
    with pytest.raises(DrafterError, match="is a head of method peagle"):
        make_bench_plan(target, methods="eagle3", drafter=f"eagle3={write_head_folder()}")


def test_synthetic_acceptance_must_cover_every_drafter(target, write_head_folder):
    options = {
        "methods": "none,peagle,ngram",
        "drafter": f"peagle={write_head_folder()}",
        "num_speculative_tokens": "2",
    }
    setups = make_bench_plan(target, TWO_GPUS, **options, synthetic_acceptance=["peagle=2.5", "ngram=0.5,0.1"]).setups
    assert [setup.drafter.synthetic_rates for setup in setups if setup.drafter] == [(1.0, 0.5), (0.5, 0.1)]
    with pytest.raises(ConfigError, match="has no value for n-gram K=2"):
        make_bench_plan(target, TWO_GPUS, **options, synthetic_acceptance="peagle=2.5")
    with pytest.raises(ConfigError, match="crashes on a CPU with --synthetic-acceptance"):
        make_bench_plan(target, CPU, **options, synthetic_acceptance="2.5")


def test_engine_has_room_for_the_largest_concurrency_and_no_prefix_cache(target):
    spec = make_bench_plan(target, concurrency="1,16", load_format="dummy").spec
    assert (spec.max_num_seqs, spec.enable_prefix_caching, spec.load_format) == (16, False, "dummy")
    assert make_bench_plan(target, concurrency="1", max_num_seqs=8).spec.max_num_seqs == 8


def test_token_slots_must_leave_room_for_prompts(target, write_head_folder):
    options = {
        "methods": "none,peagle",
        "drafter": f"peagle={write_head_folder()}",
        "num_speculative_tokens": "2",
        "concurrency": "8",
    }
    planned = make_bench_plan(target, **options, max_num_batched_tokens=512)
    assert [engine_args(setup.spec, CPU)["max_num_batched_tokens"] for setup in planned.setups] == [512, 512]
    with pytest.raises(ConfigError, match="max_num_batched_tokens 32 leaves no room for prompts"):
        make_bench_plan(target, **options, max_num_batched_tokens=32)


def test_price_is_for_the_devices_of_one_engine(target):
    assert make_bench_plan(target, usd_per_hour=3.6).usd_per_s == pytest.approx(0.001)  # both CPUs
    assert make_bench_plan(target, TWO_GPUS, usd_per_hour=7.2).usd_per_s == pytest.approx(0.001)  # one of two GPUs
    assert make_bench_plan(target, TWO_GPUS, usd_per_hour=7.2, tensor_parallel_size=2).usd_per_s == pytest.approx(0.002)


def test_unknown_price_is_a_note_unless_an_instance_type_is_given(target):
    without_price = make_bench_plan(target, TWO_GPUS)
    assert without_price.usd_per_s is None
    assert "tokens per dollar are unknown" in without_price.notes[-1]
    with pytest.raises(PriceError, match="no price for the instance type"):
        make_bench_plan(target, instance_type="c7a.larg")
    with pytest.raises(PriceError, match="is per vcpu, but engines here are billed by the accelerator"):
        make_bench_plan(target, TWO_GPUS, instance_type="c7a.large")


def test_setup_name_depends_on_method_head_synthetic_rates_and_k():
    spec = EngineSpec(model="target")
    drafter = DrafterSpec(method="peagle", model="head", num_speculative_tokens=2)
    synthetic = DrafterSpec(method="peagle", model="head", num_speculative_tokens=2, synthetic_rates=(0.5, 0.5))
    setups = [
        make_setup(spec, None),
        make_setup(spec, drafter, fingerprint="f"),
        make_setup(spec, synthetic, fingerprint="f"),
    ]
    assert [setup.name for setup in setups[:2]] == ["none-k0", f"peagle-{digest('f')}-k2"]
    assert setups[2].name == f"peagle-{digest('f')}-lot-{digest('(0.5, 0.5)')}-k2"
    assert (setups[1].spec.drafter, setups[1].spec.model) == (drafter, "target")


def test_engine_options_are_in_engine_arguments_and_fingerprint(target, write_head_folder):
    dataset = Dataset(name="d", fingerprint="f", spec=PromptSpec(chat=False), prompts=[], rejected={})
    options = {"methods": "none,peagle", "drafter": f"peagle={write_head_folder()}", "num_speculative_tokens": "2"}
    engine_options: dict[str, Any] = {"draft_attention_backend": "flash_attn", "draft_kv_cache_precision": "bf16"}
    engine_options |= {"engine_args": {"block_size": 32}}
    planned = make_bench_plan(target, TWO_GPUS, **options, **engine_options, kv_cache_precision="fp8")
    arguments = [engine_args(setup.spec, TWO_GPUS) for setup in planned.setups]
    assert [(values["block_size"], values["kv_cache_dtype"]) for values in arguments] == [(32, "fp8"), (32, "fp8")]
    assert planned.setups[1].drafter is not None
    assert planned.setups[1].drafter.attention_backend == "FLASH_ATTN"
    assert arguments[1]["speculative_config"]["kv_cache_dtype"] == "bfloat16"
    assert engine_options.items() <= planned.fingerprint(dataset).items()
    assert not engine_options.keys() & make_bench_plan(target, TWO_GPUS, **options).fingerprint(dataset).keys()


def test_conflicting_engine_args_are_refused(target):
    with pytest.raises(ConfigError, match=r"--engine-arg load_format conflicts(.|\n)*--load-format"):
        make_bench_plan(target, engine_args="load_format=dummy")


def test_folder_of_a_concurrent_command_with_another_fingerprint_is_refused(tmp_path, monkeypatch):
    original = module.make_folder

    def make_folder(path):
        original(path)
        if path.name != tmp_path.name:  # the other command writes its fingerprint first
            write_json(tmp_path / "run.json", {"schema": 1, "fingerprint": {"model": "other"}})

    monkeypatch.setattr(module, "make_folder", make_folder)
    with pytest.raises(ConfigError, match="other"):
        MeasurementFolder(tmp_path, name="run", fingerprint={"model": "own"})
