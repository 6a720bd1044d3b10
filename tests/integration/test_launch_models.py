"""The models of the P-EAGLE launch in vLLM's CPU engine: real architectures and published head layout, tiny and random.

Targets have the configurations of tests/rehearsal/shapes.py with small sizes: the experts of Qwen3-Coder; the sinks,
windows, biases, experts and YaRN of gpt-oss; Gemma 4's two widths of attention heads, its windows, and keys that are
values; Llama. Each head has `ptd_token_id`, embeddings and an lm_head of its own for the whole vocabulary.

All is held against transformers in float32. A few tokens are far likelier than the others, so that some drafts of a
head that was never trained are accepted.
"""

import json
import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from draft_comparison import compare, document_reader, run_jobs
from foreign_targets import random_target

from peagle import hardware
from peagle.catalog.cards import load_catalog
from peagle.catalog.head_files import check_fit, check_weights, read_shapes
from peagle.drafter.head import HeadSpec, build_head, save_head
from peagle.drafter.vocabulary import DraftVocabulary
from peagle.engine.arguments import engine_args
from peagle.engine.environment import environment
from peagle.engine.spec import DrafterSpec, EngineSpec
from tests.rehearsal.shapes import head_config, target_config, write_json

SINKS, GEMMA = "gpt-oss-20b", "gemma-4-31b-it"
MODELS = ("qwen3-coder-30b-a3b-instruct", SINKS, GEMMA, "llama")
VOCABULARY, NUM_LAYERS, K, NUM_TOKENS = 320, 12, 4, 32
AUX_LAYERS = (2, NUM_LAYERS // 2, NUM_LAYERS - 3)
STD = 0.5  # of weights: attention is sharp, so that texts and drafts vary
NUM_LIKELY, LIKELIER = 4, 8  # tokens, and the factor of their rows of lm_head
PROMPTS = (3, 6, 9, 14, 20, 27, 33, 40)  # tokens; windows have 8
STATES_APART = 1e-4  # of their length

_SIZES = {"hidden_size": 64, "num_layers": NUM_LAYERS, "vocab_size": VOCABULARY, "context_tokens": 512}
_FURTHER_SIZES = {
    "eos_token_id": VOCABULARY - 1,
    "head_dim": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_SIZES_OF_FAMILY = {
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 16},
    "gpt_oss": {"num_local_experts": 8, "sliding_window": 8},
    "gemma4": {"global_head_dim": 64, "num_global_key_value_heads": 1, "sliding_window": 8},
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "max_position_embeddings": 512,
    "num_hidden_layers": NUM_LAYERS,
    "tie_word_embeddings": True,
    "vocab_size": VOCABULARY,
}

pytestmark = pytest.mark.timeout(600)


def _tiny(name):
    """`config.json` of a target; unquantised, since random weights have no MXFP4."""
    if name == "llama":
        return _LLAMA | _FURTHER_SIZES
    card = load_catalog().get(name)
    small = card.architecture.model_copy(update=_SIZES)
    config = target_config(card.model_copy(update={"architecture": small}))
    config.pop("quantization_config", None)
    return config | _FURTHER_SIZES | _SIZES_OF_FAMILY[small.family]


@torch.no_grad()
def _write_target(config, folder):
    from transformers import AutoConfig

    write_json(folder, config)
    target = random_target(AutoConfig.from_pretrained(folder), std=STD)
    target.get_output_embeddings().weight[:NUM_LIKELY] *= LIKELIER
    for name, scale in target.named_buffers():
        if name.endswith("layer_scalar"):
            scale.uniform_(0.5, 1.5)
    for parameter in target.parameters():
        parameter.copy_(parameter.bfloat16())  # as published ones
    target.save_pretrained(folder)
    return target.eval()


@torch.no_grad()
def _write_head(config, target, folder):
    """A random head in the layout of published ones; the same head, as training has it."""
    published = head_config("peagle", config, in_speculators=False)
    shape = HeadSpec(
        aux_layers=AUX_LAYERS,
        # Published heads have 4. Beside the 6 windowed layers of so small a gpt-oss they would lie in two groups of the
        # KV cache, and vLLM wants them in one.
        num_layers=2,
        init="random",
        mask_token_id=published["ptd_token_id"],
        train_lm_head=True,
        train_embeddings=True,
    )
    head = build_head(target, shape, DraftVocabulary(token_ids=tuple(range(VOCABULARY)), target_size=VOCABULARY))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in head.named_parameters():
        if name.startswith(("layers.", "fc.", "norm.", "mask_hidden")):
            parameter.normal_(std=STD, generator=generator)
        parameter.copy_(parameter.bfloat16())  # as it is saved
    save_head(head, folder, verifier="the target")
    layers = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    own = {
        name: value for name, value in layers.items() if name in published and name not in ("architectures", "dtype")
    }
    del published["rope_theta"]
    write_json(folder, published | own | {"rope_parameters": layers["rope_parameters"]})
    return head.eval()


def _spec(target, head):
    return EngineSpec(
        model=str(target),
        drafter=DrafterSpec(method="peagle", model=str(head), num_speculative_tokens=K) if head else None,
        precision="float32",
        max_num_seqs=len(PROMPTS),
        max_model_len=256,
        enforce_eager=True,
        kv_cache_gib=0.1,
    )


def _job(target, head, **more):
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(VOCABULARY - 1, (length,), generator=generator).tolist() for length in PROMPTS]
    engine = engine_args(_spec(target, head), hardware.detect()) | {"skip_tokenizer_init": True}
    return {"engine": engine, "prompts": prompts, "max_tokens": NUM_TOKENS, "every_k": False, **more}


@dataclass(kw_only=True)
class Served:
    """A target of transformers, its head as training has it, and answers of recorded_drafts.py.

    `drafted` is with the head, `plain` without.
    `failed` is what ends an engine that hands the sinks to vLLM's kernel in float32.
    """

    target: Any
    head: Any
    drafted: dict[str, Any]
    plain: dict[str, Any]
    failed: dict[str, Any] | None


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """By model."""
    folder = tmp_path_factory.mktemp("launch")
    modules, jobs = {}, {}
    for name in MODELS:
        config, target, head = _tiny(name), folder / name / "target", folder / name / "head"
        modules[name] = {"target": _write_target(config, target), "head": _write_head(config, target, head)}
        check_weights(read_shapes(head), check_fit(json.loads((head / "config.json").read_text()), config))
        jobs[name, "drafted"] = _job(target, head, sinks_in_bf16=True)
        jobs[name, "plain"] = _job(target, None, sinks_in_bf16=True)
    jobs[SINKS, "failed"] = _job(folder / SINKS / "target", None, fails=True)
    variables = environment(_spec(target, head), hardware.detect())
    answers = dict(zip(jobs, run_jobs(list(jobs.values()), variables, folder), strict=True))
    return {
        name: Served(**modules[name], **{kind: answers.get((name, kind)) for kind in ("drafted", "plain", "failed")})
        for name in MODELS
    }


def _assert_greedy(texts, target):
    for tokens, length in zip(texts, PROMPTS, strict=True):
        with torch.no_grad():
            likeliest = target(input_ids=torch.tensor([tokens])).logits[0].argmax(-1).tolist()
        assert tokens[length:] == likeliest[length - 1 : -1]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_the_targets_own_with_and_without_the_drafter(name, served):
    model = served[name]
    texts = model.drafted["tokens"]
    assert texts == model.plain["tokens"]
    _assert_greedy(texts, model.target)
    num_steps, num_tokens = len(model.drafted["contexts"]), sum(map(len, texts)) - sum(PROMPTS)
    assert num_steps < num_tokens, "nothing was accepted, so nothing was tested"


@pytest.mark.parametrize("name", MODELS)
def test_the_head_reads_the_states_that_enter_its_layers_and_drafts_as_in_training(name, served, record_property):
    model = served[name]
    result = compare(model.drafted, PROMPTS, model.head, document_reader(model.target, AUX_LAYERS))
    record_property(
        "compared", f"{len(result.contexts)} contexts, {result.ties} ties, states {result.states_apart:.1e}"
    )
    assert len(result.contexts) >= 80
    assert result.states_apart < STATES_APART
    for depth in range(K):  # tokens that were always the same would be equal for no reason
        assert len({draft[depth] for draft in result.drafts[K]}) >= 3, depth


@pytest.mark.parametrize("name", MODELS)
def test_states_of_the_layer_behind_are_noticed(name, served):
    model = served[name]
    with pytest.raises(AssertionError, match="apart"):
        compare(model.drafted, PROMPTS, model.head, document_reader(model.target, [layer + 1 for layer in AUX_LAYERS]))


def test_vllm_still_takes_sinks_in_bf16_alone(served):
    """Once it fails: float32 is a precision of gpt-oss on CPUs, and `sinks_in_bf16` can go."""
    error = served[SINKS].failed["error"]
    assert error == "expected scalar type BFloat16 but found Float"
    assert error in load_catalog().get(SINKS).precision.source


# Names for transformers' modules to import; nothing of it is called for text.
_TORCHVISION = """
__version__ = "0.28.0"

class Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything(name, (), {})
"""


def _write_target_with_images(folder, text):
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    vision = {
        "head_dim": 32,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "position_embedding_size": 16,
    }
    names = ("image_token_id", "boi_token_id", "eoi_token_id", "video_token_id", "audio_token_id")
    ids = {name: VOCABULARY - 2 - number for number, name in enumerate(names)}
    config = Gemma4Config(text_config=text.config.to_dict(), vision_config=vision, audio_config=None, **ids)
    target = Gemma4ForConditionalGeneration(config)
    target.model.language_model.load_state_dict(text.model.state_dict())
    target.save_pretrained(folder)
    return target.eval()


@pytest.mark.soak
@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is here, as on GPUs")
def test_gemmas_class_with_images_drafts_alike_where_torchvision_is(tmp_path):
    """vLLM 0.29 on CPUs has no torchvision, without which it does not load the class; a stand-in is enough for text."""
    config, folders = _tiny(GEMMA), {name: tmp_path / name for name in ("text", "target", "head", "stand_in")}
    text = _write_target(config, folders["text"])
    head = _write_head(config, folders["text"], folders["head"])
    target = _write_target_with_images(folders["target"], text)
    variables = environment(_spec(folders["target"], folders["head"]), hardware.detect())
    job = _job(folders["target"], folders["head"])
    error = run_jobs([job | {"fails": True}], variables, tmp_path)[0]["error"]
    message = "Model architectures ['Gemma4ForConditionalGeneration'] failed to be inspected"
    assert message in error
    assert message in load_catalog().get(GEMMA).heads["peagle"].note

    for module in (
        "__init__",
        "io",
        "transforms/__init__",
        "transforms/functional",
        "transforms/v2/__init__",
        "transforms/v2/functional",
    ):
        file = folders["stand_in"] / "torchvision" / f"{module}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_TORCHVISION)
    path = ":".join(filter(None, [str(folders["stand_in"]), os.environ.get("PYTHONPATH")]))
    drafted = run_jobs([job], variables | {"PYTHONPATH": path}, tmp_path)[0]
    _assert_greedy(drafted["tokens"], target)
    result = compare(drafted, PROMPTS, head, document_reader(text, AUX_LAYERS))
    assert len(result.contexts) >= 80
    assert result.states_apart < STATES_APART
