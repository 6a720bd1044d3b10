"""Write the `config.json` of the catalog's models and their heads, without weights.

Sizes come from the catalog's cards. Values that the cards lack are as published:

- Qwen3-Coder-30B-A3B: as in `benchmarks/gpu/shapes.py`.
- gpt-oss: config.json of openai/gpt-oss-20b and -120b (64 attention heads of size 64, 8 KV heads, a window of 128
  tokens in every second layer, 32 and 128 experts).
- Gemma 4 31B: text_config of google/gemma-4-31B-it, whose parameters add up to the 30.7B on its card. The part for
  images is omitted, since vLLM's class for it needs torchvision, which is not installed with vLLM's CPU build.

P-EAGLE heads have 4 layers, `ptd_token_id` and the whole vocabulary, as Amazon publishes them. EAGLE-3 heads have one
layer and a draft vocabulary of 32,000 tokens, in the layout of `speculators` or in the plain layout. The sizes of their
layers are the target's.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu import shapes as qwen
from peagle.catalog.cards import ModelCard, load_catalog
from peagle.engine.spec import DRAFT_METHODS

COMMIT = "0" * 40  # a placeholder
_EAGLE3_VOCABULARY = 32_000
_TOKENIZER_VOCABULARY = {"a": 0, "<end>": 1}


def write_all(hub: Path, heads_folder: Path) -> None:
    """Write the catalog's Hugging Face models and their published heads into `hub`, other heads into `heads_folder`."""
    for card in load_catalog():
        if card.source.kind != "huggingface":
            continue
        target = target_config(card)
        write_json(_snapshot(hub, card.source.id), target)
        write_tokenizer(_snapshot(hub, card.source.id))
        for method in DRAFT_METHODS:
            head = card.heads.get(method)
            is_on_hub = head is not None and head.published and head.id is not None
            own_folder = head_folder(heads_folder, card.name, method)
            folder = _snapshot(hub, str(head.id)) if is_on_hub and head else own_folder
            in_speculators = is_on_hub and "speculator" in folder.parts[-3].lower()  # in the repository's name
            write_json(folder, head_config(method, target, in_speculators=in_speculators))


def head_folder(heads_folder: Path, model: str, method: str) -> Path:
    """Return the folder of a head that is not on the hub."""
    return heads_folder / f"{model}-{method}"


def target_config(card: ModelCard) -> dict[str, Any]:
    """Return `config.json` of a model of the catalog."""
    architecture = card.architecture
    sizes = {
        "hidden_size": architecture.hidden_size,
        "num_hidden_layers": architecture.num_layers,
        "vocab_size": architecture.vocab_size,
        "max_position_embeddings": architecture.context_tokens,
    }
    if architecture.family == "qwen3_moe":
        return {**qwen.target_config(tiny=False), **sizes}
    if architecture.family == "gpt_oss":
        return {**_gpt_oss(num_layers=architecture.num_layers or 0), **sizes}
    if architecture.family == "gemma4":
        return _gemma4(sizes)
    raise ValueError(f"{card.name}: shapes.py has no configuration for the family {architecture.family}; add one")


def _gpt_oss(num_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "head_dim": 64,
        "hidden_act": "silu",
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (num_layers // 2),
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "num_local_experts": 128 if num_layers == 36 else 32,  # 36 layers: gpt-oss-120b
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    }


def _gemma4(sizes: dict[str, Any]) -> dict[str, Any]:
    num_layers = sizes["num_hidden_layers"]
    return {
        **sizes,
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "attention_k_eq_v": True,
        "dtype": "bfloat16",
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 21504,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * (num_layers // 6),
        "num_attention_heads": 32,
        "num_global_key_value_heads": 4,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-06,
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": "vision",
    }


def head_config(method: str, target: dict[str, Any], *, in_speculators: bool) -> dict[str, Any]:
    """Return `config.json` of a published head."""
    text = target.get("text_config", target)
    if method in ("dflash", "dspark"):
        return _block_head_config(method, text)
    num_layers = text["num_hidden_layers"]
    aux_layers = [2, num_layers // 2, num_layers - 3]
    vocabulary = text["vocab_size"] if method == "peagle" else _EAGLE3_VOCABULARY
    layer_config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": text["head_dim"],
        "hidden_act": "silu",
        "hidden_size": text["hidden_size"],
        "initializer_range": 0.02,
        "intermediate_size": 4 * text["hidden_size"],
        "max_position_embeddings": text["max_position_embeddings"],
        "num_attention_heads": text["num_attention_heads"],
        "num_hidden_layers": 4 if method == "peagle" else 1,
        "num_key_value_heads": text["num_key_value_heads"],
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": text["vocab_size"],
    }
    if in_speculators:
        return {
            "architectures": ["Eagle3Speculator"],
            "draft_vocab_size": vocabulary,
            "dtype": "bfloat16",
            "eagle_aux_hidden_state_layer_ids": aux_layers,
            "norm_before_residual": False,
            "speculators_config": {
                "algorithm": method,
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
                "verifier": {"architectures": target["architectures"], "name_or_path": "the target"},
            },
            "speculators_model_type": method,
            "speculators_version": "0.9.0",
            "transformer_layer_config": layer_config | {"architectures": ["LlamaForCausalLM"]},
        }
    eagle = {"eagle_aux_hidden_state_layer_ids": aux_layers, "use_aux_hidden_state": True}
    parallel = {"ptd_token_id": text["vocab_size"] - 1} if method == "peagle" else {}
    return {**layer_config, "draft_vocab_size": vocabulary, "dtype": "bfloat16", "eagle_config": eagle, **parallel}


def _block_head_config(method: str, text: dict[str, Any]) -> dict[str, Any]:
    """Return `config.json` of a head that drafts blocks, in z-lab's layout."""
    num_layers = text["num_hidden_layers"]
    is_gemma = "gemma4" in text["model_type"]
    kinds = ["sliding_attention"] * 4 + ["full_attention"] if is_gemma else ["full_attention"] * 5
    markov = {"markov_rank": 256, "markov_head_type": "vanilla"} if method == "dspark" else {}
    return {
        "architectures": ["DFlashDraftModel" if method == "dflash" else "Qwen3DSparkModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": 8,
        "dflash_config": {
            "mask_token_id": text["vocab_size"] - 1,
            "target_layer_ids": [1, num_layers // 4, num_layers // 2, 3 * num_layers // 4, num_layers - 3],
        },
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": text["hidden_size"],
        "intermediate_size": 3 * text["hidden_size"],
        "layer_types": kinds,
        "max_position_embeddings": text["max_position_embeddings"],
        "num_attention_heads": 32,
        "num_hidden_layers": len(kinds),
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "sliding_window": 2048 if is_gemma else None,
        "tie_word_embeddings": False,
        "use_sliding_window": is_gemma,
        "vocab_size": text["vocab_size"],
        **markov,
    }


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with a chat template; `pipelines.batch.resolve` needs both."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(_TOKENIZER_VOCABULARY, unk_token="a"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)


def _snapshot(hub: Path, model_id: str) -> Path:
    """Return the folder of a model's files in the Hugging Face cache; the branch main is at `COMMIT`."""
    repository = hub / f"models--{model_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return repository / "snapshots" / COMMIT


def write_json(folder: Path, config: dict[str, Any]) -> None:
    """Write a folder with a `config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
