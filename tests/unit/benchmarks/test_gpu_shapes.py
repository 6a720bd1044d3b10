import json
import re
from typing import Any

import pytest
from devices import gpu
from safetensors import safe_open

from benchmarks.gpu.shapes import HEAD_LAYERS, head_config, target_config
from peagle.bench.config import BenchConfig
from peagle.bench.plan import make_plan
from peagle.catalog.head_files import check_fit
from peagle.catalog.targets import resolve_model
from peagle.requests.tokenizer import load_tokenizer


def test_the_target_has_the_published_size():
    c = target_config(tiny=False)
    experts = c["num_hidden_layers"] * 3 * c["hidden_size"] * c["moe_intermediate_size"]
    attention = 2 * c["hidden_size"] * c["head_dim"] * (c["num_attention_heads"] + c["num_key_value_heads"])
    dense = c["num_hidden_layers"] * (attention + c["hidden_size"] * c["num_experts"])
    embeddings = 2 * c["vocab_size"] * c["hidden_size"]
    assert experts * c["num_experts"] + dense + embeddings == pytest.approx(30.5e9, rel=0.005)
    assert experts * c["num_experts_per_tok"] + dense + embeddings == pytest.approx(3.3e9, rel=0.02)


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("method", HEAD_LAYERS)
def test_heads_fit_the_target(method, tiny):
    target = target_config(tiny=tiny)
    facts = check_fit(head_config(method, target, tiny=tiny), target)
    assert (facts.method, facts.num_layers) == (method, HEAD_LAYERS[method])
    assert len(set(facts.aux_layer_ids)) == 3


def test_a_head_has_the_weights_of_a_trained_one(shapes, shipped_head):
    def names(folder):
        with safe_open(folder / "model.safetensors", "pt") as file:
            return {name for name in file.keys() if not re.match(r"layers\.[2-9]", name)}  # noqa: SIM118

    shipped = names(shipped_head)
    assert names(shapes / "peagle") == shipped - {"lm_head.weight", "d2t"}  # the whole vocabulary: the target's lm_head
    assert names(shapes / "eagle3") == {name for name in shipped if not name.startswith("layers.1")} - {"mask_hidden"}


def test_a_benchmark_of_the_shapes_can_be_planned(shapes):
    keys: dict[str, Any] = {
        "model": str(shapes / "target"), "methods": "none,eagle3,peagle", "num_speculative_tokens": "3,7,11",
        "drafter": [f"{method}={shapes / method}" for method in HEAD_LAYERS], "load_format": "dummy",
        "concurrency": "1,4,8,32,128", "max_model_len": 1024, "precision": "fp8",
        "synthetic_acceptance": ["peagle=3:3.02,7:3.94,11:4.20", "eagle3=3:2.65,7:3.03,11:3.08"],
    }  # fmt: skip
    plan = make_plan(BenchConfig(**keys), gpu(), resolve_model(keys["model"]))
    assert [setup.label for setup in plan.setups][::3] == ["no speculation", "EAGLE-3 K=11", "P-EAGLE K=11"]
    assert plan.precision.describe() == "fp8 weights, fp8 KV cache"


def test_vllm_reads_the_configurations(shapes):
    from transformers import AutoConfig
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    target = AutoConfig.from_pretrained(shapes / "target")
    assert (type(target).__name__, target.num_experts, target.num_experts_per_tok) == ("Qwen3MoeConfig", 8, 2)
    for method, layers in HEAD_LAYERS.items():
        head = SpeculatorsConfig.from_pretrained(shapes / method)
        raw = json.loads((shapes / method / "config.json").read_text())
        assert (head.num_hidden_layers, head.draft_vocab_size) == (layers, raw["draft_vocab_size"])
        config = SpeculatorsConfig.extract_vllm_speculative_config(raw)
        assert config == {
            "method": "eagle3",
            "num_speculative_tokens": 7,
            **({"parallel_drafting": True} if method == "peagle" else {}),
        }
    assert SpeculatorsConfig.from_pretrained(shapes / "peagle").pard_token == 0


def test_the_tokenizer_covers_the_prompts(shapes):
    tokenizer = load_tokenizer(shapes / "target")
    vocab_size = target_config(tiny=True)["vocab_size"]
    assert len(tokenizer) == vocab_size
    assert tokenizer.eos_token_id == target_config(tiny=True)["eos_token_id"]
    prompts = [json.loads(line)["prompt"] for line in (shapes / "prompts.jsonl").read_text().splitlines()]
    ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    assert len(ids) == 128
    assert all(100 <= len(prompt_ids) <= 250 and 0 not in prompt_ids for prompt_ids in ids), (
        "all words are in the vocabulary"
    )
    assert tokenizer.decode(ids[0]) == prompts[0]
