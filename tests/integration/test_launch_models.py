"""Tests of the model architectures for which P-EAGLE was announced, in vLLM's CPU engine, with tiny random weights.

Targets have the real architectures of tests/rehearsal/shapes.py in small sizes. They cover the experts of Qwen3-Coder;
the attention sinks, sliding windows, biases, experts and YaRN of gpt-oss; the two head sizes, sliding windows, and
shared keys and values of Gemma 4; and Llama. Heads have the published layout: `ptd_token_id`, and their own embeddings
and lm_head for the whole vocabulary.

Tokens, states and drafts are compared with Transformers in float32. The targets make a few tokens far likelier than the
others, so that some drafts of an untrained head are accepted.
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

GPT_OSS, GEMMA_4 = "gpt-oss-20b", "gemma-4-31b-it"
MODELS = ("qwen3-coder-30b-a3b-instruct", GPT_OSS, GEMMA_4, "llama")
VOCABULARY, NUM_LAYERS, K, NUM_TOKENS = 320, 12, 4, 32
AUX_LAYERS = (2, NUM_LAYERS // 2, NUM_LAYERS - 3)
STD = 0.5  # of the weights: sharp attention makes texts and drafts vary
NUM_BOOSTED_TOKENS, LM_HEAD_BOOST = 4, 8  # the factor applies to these tokens' rows of lm_head
PROMPT_LENGTHS = (3, 6, 9, 14, 20, 27, 33, 40)  # tokens; the sliding windows have 8 tokens
MAX_STATE_ERROR = 1e-4  # of hidden states, relative to their norm
MIN_CONTEXTS = 80  # with fewer compared drafts, a test proves little

_CARD_SIZES = {"hidden_size": 64, "num_layers": NUM_LAYERS, "vocab_size": VOCABULARY, "context_tokens": 512}
_COMMON_CONFIG = {
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


def _tiny_config(name):
    """Return the `config.json` of a target. It is not quantised, since the random weights are not MXFP4."""
    if name == "llama":
        return _LLAMA | _COMMON_CONFIG
    card = load_catalog().get(name)
    small = card.architecture.model_copy(update=_CARD_SIZES)
    config = target_config(card.model_copy(update={"architecture": small}))
    config.pop("quantization_config", None)
    return config | _COMMON_CONFIG | _SIZES_OF_FAMILY[small.family]


@torch.no_grad()
def _write_target(config, folder):
    from transformers import AutoConfig

    write_json(folder, config)
    target = random_target(AutoConfig.from_pretrained(folder), std=STD)
    target.get_output_embeddings().weight[:NUM_BOOSTED_TOKENS] *= LM_HEAD_BOOST
    for name, scale in target.named_buffers():
        if name.endswith("layer_scalar"):
            scale.uniform_(0.5, 1.5)
    for parameter in target.parameters():
        parameter.copy_(parameter.bfloat16())  # round to bf16, like published checkpoints
    target.save_pretrained(folder)
    return target.eval()


@torch.no_grad()
def _write_head(config, target, folder):
    """Write a random head in the published layout. Return it as a module of the training code."""
    published = head_config("peagle", config, in_speculators=False)
    spec = HeadSpec(
        aux_layers=AUX_LAYERS,
        # Published heads have 4. With only 6 sliding-window layers in this tiny gpt-oss, 4 layers would be split across
        # two KV-cache groups, and vLLM requires one.
        num_layers=2,
        init="random",
        mask_token_id=published["ptd_token_id"],
        train_lm_head=True,
        train_embeddings=True,
    )
    head = build_head(target, spec, DraftVocabulary(token_ids=tuple(range(VOCABULARY)), target_size=VOCABULARY))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in head.named_parameters():
        if name.startswith(("layers.", "fc.", "norm.", "mask_hidden")):
            parameter.normal_(std=STD, generator=generator)
        parameter.copy_(parameter.bfloat16())  # round to bf16, as heads are saved
    save_head(head, folder, verifier="the target")
    layers = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    layer_config = {
        name: value for name, value in layers.items() if name in published and name not in ("architectures", "dtype")
    }
    del published["rope_theta"]
    write_json(folder, published | layer_config | {"rope_parameters": layers["rope_parameters"]})
    return head.eval()


def _spec(target, head):
    return EngineSpec(
        model=str(target),
        drafter=DrafterSpec(method="peagle", model=str(head), num_speculative_tokens=K) if head else None,
        precision="float32",
        max_num_seqs=len(PROMPT_LENGTHS),
        max_model_len=256,
        enforce_eager=True,
        kv_cache_gib=0.1,
    )


def _job(target, head, **options):
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(VOCABULARY - 1, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
    engine = engine_args(_spec(target, head), hardware.detect()) | {"skip_tokenizer_init": True}
    return {"engine": engine, "prompts": prompts, "max_tokens": NUM_TOKENS, "every_k": False, **options}


@dataclass(kw_only=True)
class ModelResults:
    """A transformers target, its head as a module of the training code, and the results of recorded_drafts.py.

    `drafted` was generated with the head, `plain` without it. `failed` has the error of an engine that passes float32
    sinks to vLLM's kernel.
    """

    target: Any
    head: Any
    drafted: dict[str, Any]
    plain: dict[str, Any]
    failed: dict[str, Any] | None


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The `ModelResults` by model name."""
    folder = tmp_path_factory.mktemp("launch")
    modules, jobs = {}, {}
    for name in MODELS:
        config, target, head = _tiny_config(name), folder / name / "target", folder / name / "head"
        modules[name] = {"target": _write_target(config, target), "head": _write_head(config, target, head)}
        check_weights(read_shapes(head), check_fit(json.loads((head / "config.json").read_text()), config))
        jobs[name, "drafted"] = _job(target, head, sinks_in_bf16=True)
        jobs[name, "plain"] = _job(target, None, sinks_in_bf16=True)
    jobs[GPT_OSS, "failed"] = _job(folder / GPT_OSS / "target", None, fails=True)
    variables = environment(_spec(target, head), hardware.detect())  # equal for all models
    job_results = dict(zip(jobs, run_jobs(list(jobs.values()), variables, folder), strict=True))
    return {
        name: ModelResults(
            **modules[name], **{kind: job_results.get((name, kind)) for kind in ("drafted", "plain", "failed")}
        )
        for name in MODELS
    }


def _assert_greedy(texts, target):
    for tokens, length in zip(texts, PROMPT_LENGTHS, strict=True):
        with torch.no_grad():
            likeliest = target(input_ids=torch.tensor([tokens])).logits[0].argmax(-1).tolist()
        assert tokens[length:] == likeliest[length - 1 : -1]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_equals_that_of_the_target_with_and_without_drafter(name, results):
    model = results[name]
    texts = model.drafted["tokens"]
    assert texts == model.plain["tokens"]
    _assert_greedy(texts, model.target)
    num_steps, num_tokens = len(model.drafted["contexts"]), sum(map(len, texts)) - sum(PROMPT_LENGTHS)
    assert num_steps < num_tokens, "no draft was accepted, so the test proves nothing"


@pytest.mark.parametrize("name", MODELS)
def test_head_reads_the_inputs_of_its_aux_layers_and_drafts_as_in_training(name, results, record_property):
    model = results[name]
    result = compare(model.drafted, PROMPT_LENGTHS, model.head, document_reader(model.target, AUX_LAYERS))
    record_property(
        "compared", f"{len(result.contexts)} contexts, {result.ties} ties, states {result.max_state_error:.1e}"
    )
    assert len(result.contexts) >= MIN_CONTEXTS
    assert result.max_state_error < MAX_STATE_ERROR
    for depth in range(K):  # constant drafts would match without proving anything
        assert len({draft[depth] for draft in result.drafts[K]}) >= 3, depth


@pytest.mark.parametrize("name", MODELS)
def test_off_by_one_aux_layers_are_detected(name, results):
    model = results[name]
    with pytest.raises(AssertionError, match="apart"):
        compare(
            model.drafted,
            PROMPT_LENGTHS,
            model.head,
            document_reader(model.target, [layer + 1 for layer in AUX_LAYERS]),
        )


def test_vllm_still_requires_bf16_sinks(results):
    """Once this fails, gpt-oss can run in float32 on CPUs, and `sinks_in_bf16` can be removed."""
    error = results[GPT_OSS].failed["error"]
    assert error == "expected scalar type BFloat16 but found Float"
    assert error in load_catalog().get(GPT_OSS).precision.source


# A stub of torchvision from which Transformers can import any name. Requests with only text use none of these names.
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


def _write_target_with_images(folder, text_target):
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
    config = Gemma4Config(text_config=text_target.config.to_dict(), vision_config=vision, audio_config=None, **ids)
    target = Gemma4ForConditionalGeneration(config)
    target.model.language_model.load_state_dict(text_target.model.state_dict())
    target.save_pretrained(folder)
    return target.eval()


@pytest.mark.soak
@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed, as on GPUs")
def test_multimodal_gemma_drafts_as_in_training_with_torchvision(tmp_path):
    """vLLM cannot load the multimodal class without torchvision. For text, a stub of torchvision is sufficient."""
    config, folders = _tiny_config(GEMMA_4), {name: tmp_path / name for name in ("text", "target", "head", "stub")}
    text_target = _write_target(config, folders["text"])
    head = _write_head(config, folders["text"], folders["head"])
    target = _write_target_with_images(folders["target"], text_target)
    variables = environment(_spec(folders["target"], folders["head"]), hardware.detect())
    job = _job(folders["target"], folders["head"])
    error = run_jobs([job | {"fails": True}], variables, tmp_path)[0]["error"]
    message = "Model architectures ['Gemma4ForConditionalGeneration'] failed to be inspected"
    assert message in error
    assert message in load_catalog().get(GEMMA_4).heads["peagle"].note

    for module in (
        "__init__",
        "io",
        "transforms/__init__",
        "transforms/functional",
        "transforms/v2/__init__",
        "transforms/v2/functional",
    ):
        file = folders["stub"] / "torchvision" / f"{module}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_TORCHVISION)
    path = ":".join(filter(None, [str(folders["stub"]), os.environ.get("PYTHONPATH")]))
    drafted = run_jobs([job], variables | {"PYTHONPATH": path}, tmp_path)[0]
    _assert_greedy(drafted["tokens"], target)
    result = compare(drafted, PROMPT_LENGTHS, head, document_reader(text_target, AUX_LAYERS))
    assert len(result.contexts) >= MIN_CONTEXTS
    assert result.max_state_error < MAX_STATE_ERROR
