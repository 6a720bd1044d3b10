"""Refusal of GPUs that vLLM cannot use, each with a hint."""

from dataclasses import replace

import pytest
from devices import gpu

from peagle.engine.accelerators import require_usable
from peagle.errors import CapacityError

H100 = gpu(
    accelerator="H100 80GB HBM3", num_accelerators=8, accelerator_kinds={"H100 80GB HBM3": "0,1,2,3,4,5,6,7"},
    driver="580.65.06",
)  # fmt: skip


@pytest.fixture(autouse=True)
def without_cuda_variables(monkeypatch):
    for name in ("VLLM_ENABLE_CUDA_COMPATIBILITY", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("cuda", ["13.0", "12.8", "11.8", None])
def test_equal_gpus_with_a_new_driver_are_accepted(cuda):
    require_usable(H100, cuda=cuda)
    require_usable(replace(H100, driver="", accelerator_kinds={}), cuda=cuda)


def test_mixed_cards_are_refused():
    kinds = {"H100 80GB HBM3": "0,1", "L4": "2"}
    with pytest.raises(CapacityError, match="different models") as refused:
        require_usable(replace(H100, num_accelerators=3, accelerator_kinds=kinds))
    assert "2 x H100 80GB HBM3: CUDA_VISIBLE_DEVICES=0,1; 1 x L4: CUDA_VISIBLE_DEVICES=2" in refused.value.hint


def test_mig_slices_are_refused():
    with pytest.raises(CapacityError, match="has MIG slices") as refused:
        require_usable(replace(H100, has_mig=True))
    assert "-mig 0" in refused.value.hint


@pytest.mark.parametrize(("driver", "cuda"), [("570.172.08", "13.0"), ("470.256.02", "12.8")])
def test_old_driver_is_refused_with_the_minimum(driver, cuda, monkeypatch):
    old = replace(H100, driver=driver)
    with pytest.raises(CapacityError, match=f"driver {driver} is too old for CUDA {cuda}") as refused:
        require_usable(old, cuda=cuda)
    assert f"install driver {580 if cuda == '13.0' else 525} or newer" in refused.value.hint
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/cuda/compat:/lib")
    require_usable(old, cuda=cuda)


def test_old_card_is_refused():
    volta = replace(H100, accelerator="Tesla V100-SXM2-32GB", accelerator_kinds={}, compute_capability=(7, 0))
    with pytest.raises(CapacityError, match="V100-SXM2-32GB") as refused:
        require_usable(volta, cuda="13.0")
    assert "7.5 (Turing)" in refused.value.hint
    require_usable(volta, cuda="12.8")
    require_usable(replace(volta, compute_capability=(7, 5)), cuda="13.0")


def test_gpus_are_checked_before_the_model():
    from peagle.engine_options import EngineOptions, resolve_engine

    with pytest.raises(CapacityError, match="MIG"):
        resolve_engine(
            EngineOptions(model="nobody/has-this"), replace(H100, has_mig=True), num_engines_on_node=1, announce=print
        )
