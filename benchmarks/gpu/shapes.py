"""Write a target and heads of Qwen3-Coder-30B-A3B's shape for timing: a target without weights, random heads.

    python3 benchmarks/gpu/shapes.py --output shapes
    python3 benchmarks/gpu/shapes.py --output shapes-tiny --tiny

    OUTPUT/target/         config.json and a tokenizer: for --load-format dummy
    OUTPUT/peagle/         a P-EAGLE head of 4 layers       OUTPUT/eagle3/   an EAGLE-3 head of 1 layer
    OUTPUT/prompts.jsonl   prompts of random words, about as long as HumanEval's

Sources of the figures:

- the target: config.json of Qwen/Qwen3-Coder-30B-A3B-Instruct. The tokenizer is generated, with one word for each id,
  since text does not matter with dummy weights. So nothing has to be copied to the machine;
- the EAGLE-3 head: SpecForge's configs/qwen3-coder-30B-A3B-instruct-eagle3.json (draft vocabulary of 32,000);
- the P-EAGLE head: 4 layers (card of amazon/Qwen3-Coder-30B-A3B-Instruct-P-EAGLE) and the whole vocabulary, like
  published P-EAGLE heads. We found no published size of its layers, so they have the size of the EAGLE-3 head's layer.

The heads need weight files, because vLLM sees from them which weights a head shares with the target. `--tiny` writes
the same architecture, smaller, for a dry run on a CPU. This script starts no engine.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TARGET = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 5472, "max_position_embeddings": 262144, "mlp_only_layers": [],
    "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
    "router_aux_loss_coef": 0.0, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
HEAD_LAYERS = {"peagle": 4, "eagle3": 1}
HEAD_INTERMEDIATE, EAGLE3_VOCABULARY = 12288, 32000
TINY = {
    "head_dim": 64, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 4096,
    "moe_intermediate_size": 64, "num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 2,
    "num_hidden_layers": 8, "num_key_value_heads": 2, "vocab_size": 16384, "eos_token_id": 1,
}  # fmt: skip
TINY_HEAD_INTERMEDIATE = 256
_FROM_TARGET = (
    "attention_bias", "attention_dropout", "eos_token_id", "head_dim", "hidden_act", "hidden_size", "initializer_range",
    "max_position_embeddings", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_theta",
    "tie_word_embeddings", "vocab_size",
)  # fmt: skip
_NUM_PROMPTS, _PROMPT_WORDS = 128, (100, 250)

Shape = tuple[int, ...]


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments, by default those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="the same architecture, for a dry run on a CPU")
    return parser.parse_args(arguments)


def main() -> None:
    """Write the folders."""
    args = options()
    write_shapes(args.output, tiny=args.tiny)


def write_shapes(output: Path, *, tiny: bool) -> None:
    """Write `target`, `peagle` and `eagle3` below `output`, then `prompts.jsonl`."""
    target = target_config(tiny=tiny)
    folder = output / "target"
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", target)
    write_tokenizer(folder, target)
    for method in HEAD_LAYERS:
        head = head_config(method, target, tiny=tiny)
        (output / method).mkdir(exist_ok=True)
        _write_json(output / method / "config.json", head)
        _write_weights(output / method / "model.safetensors", head)
    write_prompts(output / "prompts.jsonl", target)


def write_tokenizer(folder: Path, target: dict[str, Any]) -> None:
    """Write a tokenizer with one word for each id of the target's vocabulary: <unk> w1 w2 ..."""
    names = {0: "<unk>", target["eos_token_id"]: "<eos>"}
    words = {names.get(token_id, f"w{token_id}"): token_id for token_id in range(target["vocab_size"])}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    unused = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    split = {"type": "WhitespaceSplit"}
    tokenizer = {"version": "1.0", **unused, "added_tokens": [], "pre_tokenizer": split, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "unk_token": "<unk>"}
    _write_json(folder / "tokenizer_config.json", config)


def write_prompts(path: Path, target: dict[str, Any]) -> None:
    """Write prompts of random words, with a fixed seed."""
    generator = random.Random(0)
    end = min(target["vocab_size"], target["eos_token_id"]) if target["eos_token_id"] > 1 else target["vocab_size"]
    with path.open("w") as file:
        for _ in range(_NUM_PROMPTS):
            ids = (generator.randrange(2, end) for _ in range(generator.randint(*_PROMPT_WORDS)))
            file.write(json.dumps({"prompt": " ".join(f"w{token_id}" for token_id in ids)}) + "\n")


def target_config(*, tiny: bool) -> dict[str, Any]:
    """Return the target's `config.json`."""
    return TARGET | (TINY if tiny else {})


def head_config(method: str, target: dict[str, Any], *, tiny: bool) -> dict[str, Any]:
    """Return a head's `config.json` in the format of `peagle train`."""
    num_layers, target_layers = HEAD_LAYERS[method], target["num_hidden_layers"]
    layer = {name: target[name] for name in _FROM_TARGET} | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": TINY_HEAD_INTERMEDIATE if tiny else HEAD_INTERMEDIATE,
        "num_hidden_layers": num_layers,
        "torch_dtype": "bfloat16",
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": 7, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier = {"architectures": target["architectures"], "name_or_path": "Qwen/Qwen3-Coder-30B-A3B-Instruct"}
    return {
        "architectures": ["PEagleSpeculator" if method == "peagle" else "Eagle3Speculator"],
        "draft_vocab_size": target["vocab_size"]
        if method == "peagle"
        else min(EAGLE3_VOCABULARY, target["vocab_size"] // 2),
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [2, target_layers // 2, target_layers - 3],
        "norm_before_residual": False,
        "speculators_config": {
            "algorithm": method,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "speculators_model_type": method,
        "speculators_version": "0.9.0",
        "transformer_layer_config": layer,
        **({"mask_token_id": 0} if method == "peagle" else {}),
    }


def head_shapes(head: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Yield the name and shape of each floating-point weight of a head.

    The first layer's input is the concatenation of embedding and hidden state.
    """
    layer = head["transformer_layer_config"]
    hidden, width = layer["hidden_size"], layer["intermediate_size"]
    heads, kv_heads = (layer[name] * layer["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    yield "fc.weight", (hidden, 3 * hidden)
    for index in range(layer["num_hidden_layers"]):
        prefix, input_width = f"layers.{index}.", hidden if index else 2 * hidden
        for name in ("input_layernorm", "post_attention_layernorm", *(() if index else ("hidden_norm",))):
            yield f"{prefix}{name}.weight", (hidden,)
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, input_width)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, heads)
        for name, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
            yield f"{prefix}mlp.{name}_proj.weight", shape
    yield "norm.weight", (hidden,)
    if head["draft_vocab_size"] < layer["vocab_size"]:
        yield "lm_head.weight", (head["draft_vocab_size"], hidden)
    if "mask_token_id" in head:
        yield "mask_hidden", (1, 1, 3 * hidden)


def _write_weights(path: Path, head: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    std, bf16 = head["transformer_layer_config"]["initializer_range"], torch.bfloat16
    tensors = {
        name: torch.ones(shape, dtype=bf16) if "norm" in name else torch.empty(shape, dtype=bf16).normal_(std=std)
        for name, shape in head_shapes(head)
    }
    if "lm_head.weight" in tensors:
        tensors["d2t"] = torch.zeros(head["draft_vocab_size"], dtype=torch.int64)  # offsets of 0: the first ids
    save_file(tensors, path, metadata={"format": "pt"})


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
