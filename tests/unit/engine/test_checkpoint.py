"""Quantised checkpoints: their KV-cache precision, and hardware that cannot run them."""

import pytest
from devices import cpu, gpu

from peagle.catalog.int8 import quantization_config as int8_config
from peagle.engine.checkpoint import VLLM_METHODS, checkpoint_kv_cache_dtype, checkpoint_quant_method, require_supported
from peagle.errors import PrecisionError

FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
FP8_LAYERS = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"input_activations": FP8}}}


def config(**quantization):
    return {"quantization_config": quantization}


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({}, None),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, None),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": FP8}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, None),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": FP8 | {"type": "int"}}, None),
    ],
)
def test_kv_cache_dtype_of_published_checkpoints(quantization, expected):
    assert checkpoint_kv_cache_dtype(config(**quantization)) == expected


def test_unquantised_checkpoint_runs_anywhere():
    assert checkpoint_kv_cache_dtype({}) is None
    for hardware in (gpu(7, 5), gpu(12, 0), cpu("avx2")):
        require_supported({}, hardware)


@pytest.mark.parametrize(
    ("quantization", "hardware", "reason"),
    [
        (int8_config([]), gpu(10, 0), "int8, which needs CUDA compute capability 7.5 to 9.0"),
        (int8_config([]), gpu(12, 0), "7.5 to 9.0"),
        (int8_config([]), cpu("avx2"), "int8, which needs a CPU with VNNI"),
        (FP8_LAYERS, cpu("avx512f", "avx512_vnni"), "fp8, which needs a CPU with AMX"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, cpu("avx512f"), "AMX"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, cpu("avx512f"), "AMX"),
    ],
)
def test_unsupported_checkpoints_are_refused(quantization, hardware, reason):
    with pytest.raises(PrecisionError, match=reason) as caught:
        require_supported(config(**quantization), hardware)
    assert "16 bits" in caught.value.hint


@pytest.mark.parametrize(
    ("quantization", "hardware"),
    [
        (int8_config([]), gpu(9, 0)),
        (int8_config([]), cpu("avx2", "avx_vnni")),
        (FP8_LAYERS, gpu(8, 0)),  # only weights are fp8, computed by Marlin
        (FP8_LAYERS, cpu("avx512f", "amx_tile")),
        ({"quant_method": "awq", "bits": 4}, cpu("avx2")),
        ({"quant_method": "gptq", "bits": 8}, gpu(10, 0)),
    ],
)
def test_supported_checkpoints_are_accepted(quantization, hardware):
    require_supported(config(**quantization), hardware)


@pytest.mark.parametrize(
    ("model_config", "method"),
    [
        ({}, None),
        (config(quant_method="awq"), "awq"),
        (config(quant_method="compressed_tensors"), "compressed-tensors"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"text_config": config(quant_method="FP8")}, "fp8"),
        ({"text_config": {}, "quantization_config": None}, None),
    ],
)
def test_method_is_read_from_every_field_that_vllm_reads(model_config, method):
    assert checkpoint_quant_method(model_config) == method


@pytest.mark.parametrize("method", ["bitsandbytes", "gguf", "hqq", "fbgemm_fp8", "later_method"])
def test_unknown_method_is_refused(method):
    with pytest.raises(PrecisionError, match=f"quantised by {method}, which vLLM does not support"):
        require_supported(config(quant_method=method), gpu(9, 0))


def test_methods_equal_those_of_vllm():
    from vllm.model_executor.layers.quantization import DEPRECATED_QUANTIZATION_METHODS, QUANTIZATION_METHODS

    assert set(QUANTIZATION_METHODS) - set(DEPRECATED_QUANTIZATION_METHODS) == VLLM_METHODS
