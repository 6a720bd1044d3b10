import importlib.util
from pathlib import Path
from typing import Any

import pytest

from peagle.bench.config import BenchConfig
from peagle.bench.plan import Plan, make_plan
from peagle.bench.setups import make_setups
from peagle.catalog.targets import resolve_model
from peagle.engine.arguments import engine_args
from peagle.engine.spec import DrafterSpec
from peagle.errors import ConfigError, DrafterError, PriceError
from peagle.hardware import Hardware

CPU = Hardware(platform="cpu", memory_gib=24, free_memory_gib=20, num_cpus=2, core_ids=(0, 1))
GPU = Hardware(
    platform="cuda", accelerator="H100", num_accelerators=2, compute_capability=(9, 0), memory_gib=80,
    free_memory_gib=80, num_cpus=16,
)  # fmt: skip


def plan(target: Path, hardware: Hardware = CPU, **keys: Any) -> Plan:
    config = BenchConfig(**{"model": str(target), "methods": "none", **keys})
    return make_plan(config, hardware, resolve_model(str(target)))


def test_a_method_is_an_engine_for_each_k_and_none_is_one(target: Path, head: Any) -> None:
    drafters = [f"peagle={head()}", f"eagle3={head('eagle3')}"]
    found = plan(target, methods="none,peagle,eagle3,ngram", drafter=drafters, num_speculative_tokens="2,4").setups
    assert [setup.label for setup in found] == [
        "no speculation", "P-EAGLE K=2", "P-EAGLE K=4", "EAGLE-3 K=2", "EAGLE-3 K=4", "n-gram K=2", "n-gram K=4",
    ]  # fmt: skip
    assert found[2].drafter == DrafterSpec(method="peagle", model=str(head()), num_speculative_tokens=4)
    assert found[5].drafter == DrafterSpec(method="ngram", model="", num_speculative_tokens=2)
    assert (found[1].fingerprint, found[1].head) == (found[2].fingerprint, "peagle")


def test_a_method_without_a_head_says_how_to_name_one(target: Path) -> None:
    with pytest.raises(DrafterError, match=r"no eagle3 head is known(.|\n)*--drafter eagle3=HEAD"):
        plan(target, methods="none,eagle3")


def test_a_head_of_another_method_is_refused(target: Path, head: Any) -> None:
    with pytest.raises(DrafterError, match="it is a head of peagle"):
        plan(target, methods="eagle3", drafter=f"eagle3={head()}")


def test_suffixes_need_their_package(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install arctic-inference"):
        plan(target, methods="suffix")


def test_acceptance_by_lot_reaches_every_drafter(target: Path, head: Any) -> None:
    keys = {"methods": "none,peagle,ngram", "drafter": f"peagle={head()}", "num_speculative_tokens": "2"}
    found = plan(target, GPU, **keys, synthetic_acceptance=["peagle=2.5", "ngram=0.5,0.1"]).setups
    assert [setup.drafter.synthetic_rates for setup in found if setup.drafter] == [(1.0, 0.5), (0.5, 0.1)]
    with pytest.raises(ConfigError, match="says nothing for n-gram K=2"):
        plan(target, GPU, **keys, synthetic_acceptance="peagle=2.5")
    with pytest.raises(ConfigError, match="cannot accept drafts by lot on a CPU"):
        plan(target, CPU, **keys, synthetic_acceptance="2.5")


def test_the_engine_is_sized_for_the_largest_concurrency_and_never_reuses_a_prompt(target: Path) -> None:
    spec = plan(target, concurrency="1,16", load_format="dummy").spec
    assert (spec.max_num_seqs, spec.enable_prefix_caching, spec.load_format) == (16, False, "dummy")
    assert plan(target, concurrency="1", max_num_seqs=8).spec.max_num_seqs == 8


def test_token_slots_can_be_named_and_leave_room_for_prompts(target: Path, head: Any) -> None:
    keys = {"methods": "none,peagle", "drafter": f"peagle={head()}", "num_speculative_tokens": "2", "concurrency": "8"}
    found = plan(target, **keys, max_num_batched_tokens=512)
    specs = [found.engine_spec(setup) for setup in found.setups]
    assert [engine_args(spec, CPU)["max_num_batched_tokens"] for spec in specs] == [512, 512]
    with pytest.raises(ConfigError, match="max_num_batched_tokens 32 leaves no room for prompts"):
        plan(target, **keys, max_num_batched_tokens=32)


def test_cuda_graphs_can_reach_larger_steps(target: Path) -> None:
    found = plan(target, GPU, concurrency="128", max_cudagraph_capture_size=3072)
    assert engine_args(found.spec, GPU)["max_cudagraph_capture_size"] == 3072
    assert "max_cudagraph_capture_size" not in engine_args(plan(target, GPU).spec, GPU)


def test_price_is_of_the_devices_that_one_engine_holds(target: Path) -> None:
    assert plan(target, usd_per_hour=3.6).usd_per_s == pytest.approx(0.001)  # both CPUs
    assert plan(target, GPU, usd_per_hour=7.2).usd_per_s == pytest.approx(0.001)  # one of two GPUs
    assert plan(target, GPU, usd_per_hour=7.2, tensor_parallel_size=2).usd_per_s == pytest.approx(0.002)


def test_an_unknown_price_is_left_out_but_one_that_was_asked_for_is_an_error(target: Path) -> None:
    unpriced = plan(target, GPU)
    assert unpriced.usd_per_s is None
    assert "tokens per dollar are left out" in unpriced.notes[-1]
    with pytest.raises(PriceError, match="no price is known for the instance type"):
        plan(target, instance_type="c7a.larg")
    with pytest.raises(PriceError, match="is per vcpu, and engines here are paid for by the accelerator"):
        plan(target, GPU, instance_type="c7a.large")


def test_none_alone_needs_no_head(target: Path) -> None:
    setups, notes = make_setups(BenchConfig(methods="none"), resolve_model(str(target)), CPU)
    assert ([setup.drafter for setup in setups], notes) == ([None], [])
