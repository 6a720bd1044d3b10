"""On a CPU, vLLM's drafter class loads an FP8 head in FP8 and computes with its values.

The test runs in a separate process, because vLLM's distributed state is global. It starts no engine.
"""

import json
import subprocess
import sys

from peagle.drafter.fp8_folder import dequantize_head, quantize_head

PROBE = """
import json, sys, torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

from peagle.ports import free_port

port = free_port()
target, *heads = sys.argv[1:]
logits, dtypes = [], []
for head in heads:
    drafter = {"method": "eagle3", "model": head, "num_speculative_tokens": 3, "parallel_drafting": True}
    config = EngineArgs(
        model=target, dtype="bfloat16", enforce_eager=True, max_model_len=512, speculative_config=drafter
    ).create_engine_config()
    with set_current_vllm_config(config), torch.no_grad():
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
            initialize_model_parallel(1, 1)
        model = get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
        matrices = [p for name, p in model.named_parameters() if name.endswith("weight") and p.dim() == 2]
        dtypes.append(sorted({str(p.dtype) for p in matrices}))
        states = torch.randn(8, model.model.fc_input_size, generator=torch.Generator().manual_seed(0)).bfloat16()
        combined = model.combine_hidden_states(states)
        head_logits = model.compute_logits(combined + model.model.layers[0].mlp(combined)).float()
        logits.append(head_logits[:, torch.isfinite(head_logits[0])])
distances = [((other - logits[0]).norm() / logits[0].norm()).item() for other in logits]
print(json.dumps({"dtypes": dtypes, "distances": distances}))
"""


def test_fp8_head_in_vllm_equals_its_bf16_conversion(tmp_path, embedded_target, shipped_head):
    quantize_head(shipped_head, tmp_path / "fp8")
    dequantize_head(tmp_path / "fp8", tmp_path / "values")
    folders = [str(folder) for folder in (embedded_target, tmp_path / "values", tmp_path / "fp8", shipped_head)]
    process = subprocess.run([sys.executable, "-c", PROBE, *folders], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    result = json.loads(process.stdout.splitlines()[-1])
    assert result["dtypes"] == [["torch.bfloat16"], ["torch.bfloat16", "torch.float8_e4m3fn"], ["torch.bfloat16"]]
    # Small distances are rounding: the FP8 head also rounds activations, the shipped head does not round weights.
    # Without its scales, a head would differ much more.
    _, fp8_distance, shipped_distance = result["distances"]
    assert 0 < fp8_distance < 0.1
    assert 0 < shipped_distance < 0.1
