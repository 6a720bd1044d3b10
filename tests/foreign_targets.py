"""Tiny random targets of architectures other than Llama, with the sizes of the tiny target in conftest.py."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY, HIDDEN, AUX_LAYERS = 96, 32, (1, 2, 3)

_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# By model_type: options of the configuration in addition to the common sizes.
FOREIGN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": _MOE,
    "gpt_oss": {**_MOE, "sliding_window": 4},
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 32},
    "gemma4_text": {
        "sliding_window": 4,
        "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "final_logit_softcapping": 2.0,
    },
}


def save_foreign_target(model_type: str, folder: Path) -> None:
    config = AutoConfig.for_model(
        model_type,
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        eos_token_id=95,
        pad_token_id=0,
        **FOREIGN[model_type],
    )
    random_target(config).save_pretrained(folder)


def random_target(config: Any, *, std: float = 0.2) -> Any:
    """Return a float32 target with random weights, including norms and biases."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model
