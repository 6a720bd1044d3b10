import json
import re
from dataclasses import replace
from pathlib import Path

import devices
import pytest

import peagle
from peagle.engine.memory import (
    check_capacity,
    default_kv_cache_gib,
    footprint_from_config,
    gpu_need,
    read_footprint,
)
from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.errors import CapacityError

GIB = 1024**3
BLOCKS_GIB = 0.1  # added to the default cache, because vLLM keeps whole blocks
HEADS = Path(peagle.__file__).parent / "catalog" / "heads"
SHIPPED = {method: HEADS / f"smollm2-135m-{method}" for method in ("peagle", "eagle3")}
# 30 layers x 2 x 3 KV heads x 64 = 11,520 cached elements per token, 23,040 bytes in bf16.
SMALL_LLAMA = {
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}


def make_model(folder, *, weights_gib=0.25, **changes):
    """Write a model folder with a sparse weight file of any size, and return its path."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL_LLAMA | changes))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(int(weights_gib * GIB))
    return str(folder)


def cpu(free_gib=20):
    return devices.cpu(free_memory_gib=free_gib)


def gpu(memory_gib=80, num=1):
    return devices.gpu(memory_gib=memory_gib, num_accelerators=num)


def test_footprint_of_a_folder(tmp_path):
    footprint = read_footprint(make_model(tmp_path / "m"))
    assert footprint is not None
    assert (footprint.weights_bytes, footprint.context_tokens) == (GIB // 4, 8192)
    assert footprint_from_config({"text_config": SMALL_LLAMA}, GIB // 4) == footprint


# Each layer caches 384 elements per token.
SLIDING = {"layer_types": ["sliding_attention"] * 30, "sliding_window": 128}
HALF_SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 15, "sliding_window": 128}
GLOBAL = {"layer_types": ["full_attention"] * 30, "num_global_key_value_heads": 1, "global_head_dim": 128}


@pytest.mark.parametrize(
    ("config", "num_tokens", "options", "expected"),
    [
        ({}, 1, {"dtype_bytes": 2}, 23_040),
        ({}, 8192, {"dtype_bytes": 1}, 8192 * 11_520),
        ({}, 1, {"dtype_bytes": 2, "ranks": 3}, 23_040),
        ({}, 1, {"dtype_bytes": 2, "ranks": 6}, 2 * 23_040),  # more ranks than KV heads
        (HALF_SLIDING, 1000, {"dtype_bytes": 1}, 15 * (1000 + 128) * 384),
        (SLIDING, 9000, {"dtype_bytes": 1, "in_flight_tokens": 872}, 30 * (128 + 872) * 384),
        (GLOBAL, 1, {"dtype_bytes": 1}, 30 * 2 * 128),
    ],
)
def test_kv_cache_of_a_request(config, num_tokens, options, expected):
    footprint = footprint_from_config(SMALL_LLAMA | config, 0)
    assert footprint is not None
    assert footprint.kv_cache_bytes(num_tokens, **options) == expected


@pytest.mark.parametrize("config", [{"hidden_size": 8}, SMALL_LLAMA | {"kv_lora_rank": 512}])
def test_kv_cache_of_other_architectures_is_unknown(config):
    assert footprint_from_config(config, 0) is None


@pytest.mark.parametrize("content", [None, "{"])
def test_footprint_without_a_valid_config_is_unknown(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert read_footprint(str(tmp_path)) is None


def test_default_cache_fits_the_requests(tmp_path):
    spec = EngineSpec(model=make_model(tmp_path / "m"), max_num_seqs=1)
    assert default_kv_cache_gib(spec, cpu()) == pytest.approx(8192 * 23_040 / GIB + BLOCKS_GIB, abs=0.01)


@pytest.mark.parametrize("layers", [1, 4])
def test_default_cache_includes_the_drafter(tmp_path, layers):
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text(json.dumps({"transformer_layer_config": {"num_hidden_layers": layers}}))
    drafter = DrafterSpec(method="peagle", model=str(head), num_speculative_tokens=3)
    spec = EngineSpec(model=make_model(tmp_path / "m"), max_num_seqs=1, drafter=drafter)
    needed = 8192 * 23_040 * (30 + layers) / 30 / GIB
    assert default_kv_cache_gib(spec, cpu()) == pytest.approx(needed + BLOCKS_GIB, abs=0.01)


@pytest.mark.parametrize("method", SHIPPED)
def test_default_cache_in_float32(tmp_path, method):
    """The drafters' layers have 9 KV heads, the target's have 3: vLLM needs 17,280 elements per token for P-EAGLE."""
    drafter = DrafterSpec(method="peagle", model=str(SHIPPED[method]), num_speculative_tokens=3)
    spec = EngineSpec(model=make_model(tmp_path / "m"), max_num_seqs=1, precision="float32", drafter=drafter)
    layer = json.loads((SHIPPED[method] / "config.json").read_text())["transformer_layer_config"]
    per_token = 30 * 384 + layer["num_hidden_layers"] * 2 * layer["num_key_value_heads"] * layer["head_dim"]
    assert default_kv_cache_gib(spec, cpu()) == pytest.approx(8192 * 4 * per_token / GIB + BLOCKS_GIB, abs=0.01)


def test_kv_cache_without_room_for_the_drafters_layers_is_refused(tmp_path):
    drafter = DrafterSpec(method="peagle", model=str(SHIPPED["peagle"]), num_speculative_tokens=3)
    spec = EngineSpec(model=make_model(tmp_path / "m"), max_num_seqs=1, drafter=drafter, kv_cache_gib=0.2)
    with pytest.raises(CapacityError, match=r"cannot hold one request of 8,192 tokens, which needs 0\.26 GiB"):
        check_capacity(spec, cpu())
    check_capacity(replace(spec, drafter=None), cpu())


def test_default_cache_is_at_most_a_quarter_of_free_memory(tmp_path):
    spec = EngineSpec(model=make_model(tmp_path / "m"), max_num_seqs=500)
    assert default_kv_cache_gib(spec, cpu(free_gib=20)) == 5.0
    assert default_kv_cache_gib(spec, cpu(free_gib=20), num_engines_on_node=2) == 2.5
    assert default_kv_cache_gib(EngineSpec(model="org/m"), cpu(free_gib=8)) == 2.0


def test_model_of_unknown_size_passes():
    check_capacity(EngineSpec(model="org/m"), cpu(free_gib=0.1))


def test_too_little_memory_on_cpu_is_refused(tmp_path):
    spec = EngineSpec(model=make_model(tmp_path / "m", weights_gib=30), kv_cache_gib=1)
    with pytest.raises(CapacityError, match=r"weights 30\.0, KV cache 1\.0.*20\.0 GiB") as caught:
        check_capacity(spec, cpu(free_gib=20))
    assert "kv_cache_gib" in caught.value.hint


def test_engines_share_cpu_memory(tmp_path):
    spec = EngineSpec(model=make_model(tmp_path / "m", weights_gib=6), kv_cache_gib=1)
    check_capacity(spec, cpu(free_gib=20), num_engines_on_node=2)
    with pytest.raises(CapacityError, match="3 engine"):
        check_capacity(spec, cpu(free_gib=20), num_engines_on_node=3)


def test_fp8_halves_the_weights_and_parallelism_divides_them(tmp_path):
    model = make_model(tmp_path / "m", weights_gib=100)
    check_capacity(EngineSpec(model=model, precision="fp8"), gpu())
    check_capacity(EngineSpec(model=model, precision="bf16", tensor_parallel_size=2), gpu(num=2))
    with pytest.raises(CapacityError, match=r"weights 100\.0"):
        check_capacity(EngineSpec(model=model, precision="bf16"), gpu())


def test_float32_doubles_bf16_weights_and_native_weights_keep_their_size(tmp_path):
    model = make_model(tmp_path / "m", weights_gib=65)
    with pytest.raises(CapacityError, match=r"weights 130\.0"):
        check_capacity(EngineSpec(model=model, precision="float32"), gpu())
    check_capacity(EngineSpec(model=model, native_quantization="mxfp4"), gpu())


def test_cache_below_one_request_is_refused(tmp_path):
    spec = EngineSpec(model=make_model(tmp_path / "m"), kv_cache_gib=0.1)
    with pytest.raises(CapacityError, match=r"8,192 tokens, which needs 0\.18 GiB") as caught:
        check_capacity(spec, cpu())
    assert "max_model_len" in caught.value.hint
    check_capacity(EngineSpec(model=spec.model, kv_cache_gib=0.1, max_model_len=1024), cpu())


def test_too_many_accelerators_are_refused():
    spec = EngineSpec(model="org/m", tensor_parallel_size=4)
    check_capacity(spec, gpu(num=8), num_engines_on_node=2)
    with pytest.raises(CapacityError, match="need 12; this node has 8"):
        check_capacity(spec, gpu(num=8), num_engines_on_node=3)


def test_node_of_a_larger_engine_needs_only_its_share(tmp_path):
    two_nodes = EngineSpec(model="org/model", tensor_parallel_size=16, num_nodes=2)
    check_capacity(two_nodes, gpu(num=8))
    with pytest.raises(CapacityError, match=r"of 8 accelerator\(s\) need 8; this node has 4(.|\n)*uses 2 node\(s\)"):
        check_capacity(two_nodes, gpu(num=4))
    large = EngineSpec(model=make_model(tmp_path / "m", weights_gib=20), tensor_parallel_size=2, max_model_len=64)
    with pytest.raises(CapacityError, match=r"weights 20\.0"):
        check_capacity(large, cpu(16))
    check_capacity(replace(large, num_nodes=2), cpu(16))


def test_gpu_kv_cache_has_whole_blocks(tmp_path):
    """Otherwise vLLM refuses the recommended context for lack of one block."""
    spec = EngineSpec(model=make_model(tmp_path / "m"), precision="bf16", max_model_len=1000)
    needed_gib = gpu_need(spec, gpu(), read_footprint(spec.model)).kv_cache_gib
    assert needed_gib * GIB == pytest.approx((63 + 1) * 16 * 23_040)  # 63 blocks of 16 tokens, and an empty one
    check_capacity(replace(spec, kv_cache_gib=needed_gib), gpu())
    with pytest.raises(CapacityError):
        check_capacity(replace(spec, kv_cache_gib=needed_gib - 16 * 23_040 / GIB), gpu())


def test_error_for_a_small_gpu_lists_options_that_fit(tmp_path):
    config = {"num_hidden_layers": 48, "max_position_embeddings": 262_144}
    spec = EngineSpec(model=make_model(tmp_path / "m", weights_gib=30, **config), precision="bf16", max_num_seqs=8)
    with pytest.raises(CapacityError, match=r"KV cache 9\.0, a step 2\.0, CUDA graphs 0\.1") as caught:
        check_capacity(spec, gpu(40, num=8))
    assert re.fullmatch(r"use --max-model-len \d+, or --tensor-parallel-size 2, or --precision fp8", caught.value.hint)
    context = int(caught.value.hint.split()[2].rstrip(","))
    check_capacity(replace(spec, max_model_len=context), gpu(40, num=8))
    with pytest.raises(CapacityError):
        check_capacity(replace(spec, max_model_len=context + 1024), gpu(40, num=8))
    check_capacity(replace(spec, tensor_parallel_size=2), gpu(40, num=8))
    check_capacity(replace(spec, precision="fp8"), gpu(40, num=8))
    ampere = replace(gpu(40, num=8), compute_capability=(8, 0))
    with pytest.raises(CapacityError) as caught:
        check_capacity(spec, ampere)
    assert caught.value.hint.endswith("or --precision int8")
    check_capacity(replace(spec, precision="int8"), ampere)
    with pytest.raises(CapacityError, match="weights 30"):
        check_capacity(spec, gpu(16, num=1))
