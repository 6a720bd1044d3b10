"""Answers end at the same token with drafts (several tokens per step) and without drafts (one token per step).

The tests pass the same tokens to vLLM's own output processor in both ways.
"""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.sampler import Sampler

from peagle.engine import vllm_plugin

TEXT = "Repeat: the cat — naïve 日本語 🙂 — sat.\nRepeat: the dog sat on\n\nthe mat, and then END of it. the the the"
STOPS = [
    "\n",
    "Repeat: the dog",
    "sat",
    "日本語",
    "🙂 —",
    "END",
    "the the",
    "it. the the the",
    "at, a",
    "not in the text",
]


@pytest.fixture(scope="module")
def tokenizer(embedded_target):
    return get_tokenizer(str(embedded_target))


@pytest.fixture
def work_around(monkeypatch):
    """Install the work-around for stop strings; it is undone after the test."""
    monkeypatch.setattr(BaseIncrementalDetokenizer, "update", _original(BaseIncrementalDetokenizer.update))
    monkeypatch.setattr(LogprobsProcessor, "update_from_output", _original(LogprobsProcessor.update_from_output))
    for _ in range(2):  # a process may load plug-ins more than once
        vllm_plugin.cut_at_stop_strings()


def _original(function):
    return getattr(function, "__wrapped__", function)


def answer(tokenizer, tokens, sizes, n=1, **sampling):
    """Return the merged answer of all steps; `sizes` yields the number of tokens of each step."""
    processor = OutputProcessor(tokenizer, log_stats=False)
    params = SamplingParams(n=n, max_tokens=len(tokens), logprobs=1, **sampling)
    params.update_from_generation_config({}, tokenizer.eos_token_id)
    collector = RequestOutputCollector(params.output_kind, "r")
    parent = ParentRequest(_request("r", params)) if n > 1 else None
    for index in range(n):
        child, child_params = parent.get_child_info(index) if parent else ("r", params)
        processor.add_request(_request(child, child_params), None, parent, index, collector)
    aborted = []
    outputs = []
    while processor.request_states:
        for child in list(processor.request_states):
            step = _step(child, tokens, processor.request_states[child].detokenizer.num_output_tokens(), next(sizes))
            aborted += processor.process_outputs([step]).reqs_to_abort
        if (output := collector.get_nowait()) is not None:
            outputs.append(output)
    assert len(aborted) == len(set(aborted))
    return _merged(outputs, is_delta=params.output_kind == RequestOutputKind.DELTA)


def _request(request_id, params):
    return EngineCoreRequest(request_id, [1, 2], None, params, None, 0.0, None, None, None, external_req_id="r")


def _step(request_id, tokens, start, size):
    """Return a step of vLLM's core; it finishes at the last token."""
    new = list(tokens[start : start + size])
    rows = np.array([[token, token + 1] for token in new])
    logprobs = LogprobsLists(rows, -rows / 7.0, np.ones(len(new), int), None)
    reason = FinishReason.STOP if start + size >= len(tokens) else None
    return EngineCoreOutput(request_id, new, new_logprobs=logprobs, finish_reason=reason)


def _merged(outputs, *, is_delta):
    choices = {}
    for choice in (choice for output in outputs for choice in output.outputs):
        old = choices.get(choice.index) if is_delta else None
        new = {"text": choice.text, "tokens": list(choice.token_ids), "logprobs": list(choice.logprobs or [])}
        merged = {name: old[name] + value for name, value in new.items()} if old else new
        ends = {"cumulative": choice.cumulative_logprob, "ends": (choice.finish_reason, choice.stop_reason)}
        choices[choice.index] = {**merged, **ends}
    assert all(len(choice["tokens"]) == len(choice["logprobs"]) for choice in choices.values())
    return {"finished": outputs[-1].finished, "choices": choices}


@pytest.mark.usefixtures("work_around")
@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_answer_is_independent_of_accepted_tokens(tokenizer, kind, include, n):
    rng = random.Random(1)
    tokens = [*tokenizer.encode(TEXT), tokenizer.eos_token_id]
    stop_reasons = set()
    for _ in range(60):
        stop = rng.sample(STOPS, rng.choice([0, 1, 1, 2, 3]))
        sampling = {
            "stop": stop,
            "include_stop_str_in_output": include,
            "min_tokens": rng.choice([0, 0, 3, 12]),
            "skip_special_tokens": rng.choice([True, False]),
            "output_kind": kind,
        }
        one_by_one = answer(tokenizer, tokens, itertools.repeat(1), n, **sampling)
        several_at_a_time = answer(tokenizer, tokens, iter(lambda: rng.randint(1, 8), 0), n, **sampling)  # endless
        assert several_at_a_time == one_by_one, (stop, sampling)
        stop_reasons.add(one_by_one["choices"][0]["ends"][1])
    assert len(stop_reasons) > 5, "too few different stop strings have ended an answer"


def test_vllm_still_keeps_the_tokens_after_a_stop_string(tokenizer, monkeypatch):
    """Once this fails, vLLM has fixed it (pull request 47616): `cut_at_stop_strings` can go.

    Before you remove it, check that `test_answer_is_independent_of_accepted_tokens` passes without it, because the pull
    request does not cover steps that the core ended itself.
    """
    monkeypatch.setattr(BaseIncrementalDetokenizer, "update", _original(BaseIncrementalDetokenizer.update))
    monkeypatch.setattr(LogprobsProcessor, "update_from_output", _original(LogprobsProcessor.update_from_output))
    tokens = tokenizer.encode("Repeat\nand so on")
    one_by_one = answer(tokenizer, tokens, itertools.repeat(1), stop=["\n"])["choices"][0]
    several_at_a_time = answer(tokenizer, tokens, itertools.repeat(4), stop=["\n"])["choices"][0]
    assert several_at_a_time["text"] == one_by_one["text"] == "Repeat"
    assert (len(one_by_one["tokens"]), len(several_at_a_time["tokens"])) == (2, 4)


def bonus_logits(monkeypatch, *, is_fixed):
    """Return the logits of the token after all drafts, of four requests with min_tokens 3 and the stop token 5."""
    sampling = SamplingParams(min_tokens=3, stop_token_ids=[5])
    outputs, drafts = [[7], [7], [7, 7], []], [[8, 8], [8], [], [8, 8, 8]]
    processor = MinTokensLogitsProcessor(None, torch.device("cpu"), False)
    added = [(index, sampling, None, tokens) for index, tokens in enumerate(outputs)]
    processor.update_state(BatchUpdate(batch_size=4, removed=[], added=added, moved=[]))
    metadata = SimpleNamespace(
        bad_words_token_ids={},
        no_penalties=True,
        allowed_token_ids_mask=None,
        thinking_budget_state_holder=None,
        output_token_ids=outputs,
        spec_token_ids=drafts,
        logitsprocs=SimpleNamespace(non_argmax_invariant=[processor]),
    )
    monkeypatch.setattr(Sampler, "apply_logits_processors", _original(Sampler.apply_logits_processors))
    if is_fixed:
        for _ in range(2):  # a process may load plug-ins more than once
            vllm_plugin.count_drafts_toward_min_tokens()
    Sampler().apply_logits_processors(torch.zeros(4, 9), metadata, predict_bonus_token=False)
    assert processor.apply(torch.zeros(4, 9))[:, 5].isinf().all(), "the processor is unchanged"
    return Sampler().apply_logits_processors(torch.zeros(4, 9), metadata, predict_bonus_token=True)


def test_token_after_min_tokens_may_end_an_answer(monkeypatch):
    logits = bonus_logits(monkeypatch, is_fixed=True)
    assert logits[:, 5].isinf().tolist() == [False, True, True, False]
    assert logits.isinf().sum() == 2


def test_vllm_still_counts_no_drafts_toward_min_tokens(monkeypatch):
    """Once this fails, vLLM has fixed it: `count_drafts_toward_min_tokens` can go."""
    assert bonus_logits(monkeypatch, is_fixed=False)[:, 5].isinf().all()
