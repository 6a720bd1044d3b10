"""Check which layers vLLM loads in INT8 for an INT8 target on a CPU, and what the kernels compute.

The tests run vLLM in a separate process, because its distributed state is global. They start no engine.
"""

import json
import subprocess
import sys

import pytest

from peagle.catalog.int8 import ensure_int8
from peagle.hardware import detect

PROBE = """
import json, sys, torch
from vllm import _custom_ops as ops
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

from peagle.ports import free_port

port = free_port()
outputs, schemes = [], []
for folder, quantization in zip(sys.argv[1:], (None, "compressed-tensors"), strict=True):
    config = EngineArgs(
        model=folder, dtype="bfloat16", enforce_eager=True, max_model_len=512, quantization=quantization,
        skip_tokenizer_init=True,
    ).create_engine_config()
    with set_current_vllm_config(config), torch.no_grad():
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
            initialize_model_parallel(1, 1)
        model = get_model(vllm_config=config)
        layer = model.model.layers[0]
        parts = (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
        schemes.append([type(getattr(part, "scheme", None)).__name__ for part in (*parts, model.lm_head)])
        states = torch.randn(8, config.model_config.get_hidden_size(), generator=torch.Generator().manual_seed(0))
        outputs.append(layer.mlp(states.bfloat16()).float())  # AMX supports only 16-bit floats
largest, scales = torch.full((32, 64), 127, dtype=torch.int8), torch.full((32, 1), 1 / 127)  # the handler keeps no copy
handler = ops.create_onednn_scaled_mm(largest.t(), scales, torch.float32, True, False, 32)
levels, scale, _ = ops.onednn_scaled_int8_quant(torch.ones(1, 64))
product = torch.empty(1, 32)
ops.onednn_scaled_mm(handler, levels, product, scale, None, None, None)
distance = ((outputs[1] - outputs[0]).norm() / outputs[0].norm()).item()
print(json.dumps({"schemes": schemes, "distance": distance, "product": product.mean().item()}))
"""


@pytest.fixture(scope="module")
def probe_result(target, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PEAGLE_HOME", str(tmp_path_factory.mktemp("home")))
        folders = [str(target), str(ensure_int8(str(target)))]
    result = subprocess.run([sys.executable, "-c", PROBE, *folders], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_only_linear_layers_are_loaded_in_int8(probe_result):
    assert probe_result["schemes"] == [["NoneType"] * 5, ["CompressedTensorsW8A8Int8"] * 4 + ["NoneType"]]


@pytest.mark.skipif(not detect().supports_int8, reason="the CPU has no VNNI (avx512_vnni, avx_vnni)")
def test_int8_outputs_are_close_to_the_target(probe_result):
    assert 0 < probe_result["distance"] < 0.05
    assert probe_result["product"] == pytest.approx(64)


@pytest.mark.skipif(detect().supports_int8, reason="the CPU has VNNI")
def test_int8_products_are_wrong_without_vnni(probe_result):
    """If this fails, CPUs without VNNI can be supported. See decision 0016."""
    assert probe_result["product"] != pytest.approx(64, rel=0.05)
