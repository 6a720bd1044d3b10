"""Every field of an answer is the same with and without a drafter, for each parameter that can end an answer.

The engines are real and use float32, where greedy text has no ties. These fields are not compared:

- times, request ids and drafts;
- `system_fingerprint`, which identifies the engine's settings;
- `text_offset` of legacy completions in streams with `stop`, which counts the text sent so far. vLLM holds back text
  that might become a stop string, and the amount depends on the tokens per step;
- `num_cached_tokens` of prompts in the cache. With a drafter, vLLM computes the last cached block again and reports
  fewer cached tokens.
"""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from block_heads import save_block_head

from peagle import hardware
from peagle.catalog.drafters import resolve_drafter
from peagle.catalog.targets import resolve_model
from peagle.engine.environment import environment
from peagle.engine.spec import DrafterSpec, EngineSpec

pytestmark = pytest.mark.timeout(600)

# For the first two prompts, nearly all drafts are accepted. The answer to the third prompt ends with EOS.
PROMPTS = {
    "repeat": "Repeat: the cat sat on the mat.\nRepeat: the cat sat on the mat.\nRepeat: the cat sat",
    "count": "one two three four five one two three four five one two three",
    "end": "<|im_start|>user\nWhat is the capital of France? Answer in one word.<|im_end|>\n<|im_start|>assistant\n",
}
CONTEXT, K = 512, 5
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
# vLLM cannot draft for these requests. They run in the same steps as requests with drafts.
UNSUPPORTED_BY_DRAFTS = {
    "bias": {"logit_bias": {"253": 7.5, "28": -100.0, "198": -4.0}, "logprobs": 1},
    "forced token": {"logit_bias": {"253": 100.0}},
    "min_p": {"temperature": 1.0, "min_p": 1.0},  # only the likeliest token remains, as in greedy decoding
}
NOT_COMPARED = {"id", "created", "request_id", "ttft_s", "latency_s", "speculation", "metrics", "system_fingerprint"}


@pytest.fixture(scope="module")
def tokenizer(embedded_target):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded_target)


def bulk_cases(tokenizer):
    the, five = (tokenizer.encode(word)[0] for word in (" the", " five"))
    prompt_tokens = tokenizer.encode(PROMPTS["repeat"] + PROMPTS["count"])
    sampling_cases = {
        "stop": {"stop": ["\n", "five"], "logprobs": 2},
        "stops": {"stop": ["five one", "mat.", "on the"]},
        "stop in the answer": {"stop": ["mat.", " four five"], "include_stop_str_in_output": True, "logprobs": 0},
        "stop after min_tokens": {"stop": ["\n", "the", "five"], "min_tokens": 9},
        "stop_token_ids": {"stop_token_ids": [the, five]},
        "stop token in the answer": {"stop_token_ids": [the, five], "include_stop_str_in_output": True},
        "stop_token_ids after min_tokens": {"stop_token_ids": [the, five], "min_tokens": 5, "logprobs": 1},
        **{f"max_tokens {n}": {"max_tokens": n, "logprobs": 1} for n in (1, 3, 4, 7)},
        **{f"min_tokens {n}": {"min_tokens": n, "max_tokens": 30} for n in (7, 8, 9, 12)},
        "ignore_eos": {"ignore_eos": True},
        "n": {"n": 3, "temperature": 1.0, "top_k": 1, "stop": ["\n", "five one"], "logprobs": 1},
        "repetition": {"repetition_detection": {"max_pattern_size": 12, "min_pattern_size": 2, "min_count": 2}},
        "schema": {"json_schema": json.dumps(SCHEMA), "max_tokens": 40, "logprobs": 1},
        "choice": {"structured_outputs": {"choice": ["Paris is the capital of France", "Rome"]}},
        "regex": {"structured_outputs": {"regex": "the cat sat on the (mat|dog)\\."}, "stop": ["the mat"]},
        "bad_words": {"bad_words": ["mat", "five"], "stop": ["."]},
        "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 1},
        "allowed_token_ids": {"allowed_token_ids": prompt_tokens, "logprobs": 1},
        "special tokens": {"skip_special_tokens": False},
        **UNSUPPORTED_BY_DRAFTS,
    }
    cases = {
        f"{prompt}: {name}": (tokenizer.encode(text), {"temperature": 0.0, "max_tokens": 20, **sampling})
        for prompt, text in PROMPTS.items()
        for name, sampling in sampling_cases.items()
    }
    long_prompt = tokenizer.encode("The quick brown fox. " * CONTEXT)[: CONTEXT - 17]
    return cases | {"the context is full": (long_prompt, {"temperature": 0.0, "max_tokens": CONTEXT, "logprobs": 1})}


def online_cases():
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    sampling_cases = {
        "stop": {"stop": ["\n", "five"], "logprobs": 2, "return_token_ids": True},
        "stop in the answer": {"stop": ["mat", "five"], "include_stop_str_in_output": True, "return_token_ids": True},
        "prompt_logprobs": {"stop": "mat", "prompt_logprobs": 1},
        "echo": {"stop": "mat", "echo": True, "logprobs": 1},
    }
    cases = {}
    for (prompt, text), (name, sampling) in itertools.product(PROMPTS.items(), sampling_cases.items()):
        body = {"temperature": 0, "max_tokens": 20, **sampling}
        chat = body | {"messages": [{"role": "user", "content": text}]}
        if "logprobs" in body:
            chat |= {"logprobs": True, "top_logprobs": body["logprobs"]}
        chat.pop("echo", None)
        for mode, options in {"whole": {}, "streamed": streamed}.items():
            if mode == "whole" or name.startswith("stop"):
                cases[f"{prompt}: {name}, {mode}"] = ("/v1/completions", {**body, "prompt": text, **options})
                cases[f"{prompt}: {name}, {mode} chat"] = ("/v1/chat/completions", {**chat, **options})
    return cases


def plain_engine(model):
    return EngineSpec(model=model, precision="float32", max_num_seqs=16, max_model_len=CONTEXT, enforce_eager=True)


@pytest.fixture(scope="module")
def answers(tokenizer, tmp_path_factory):
    """The answers of an engine without a drafter, and of an engine with the shipped head and a lookup."""
    machine, model = hardware.detect(), resolve_model("smollm2-135m")
    plain = plain_engine(model.path)
    head = resolve_drafter("peagle", model, 1, num_speculative_tokens=K).spec
    with_drafter = dataclasses.replace(plain, drafter=dataclasses.replace(head, lookup=True))
    cases = {"bulk": bulk_cases(tokenizer), "online": online_cases()}
    return [_answers(spec, machine, cases, tmp_path_factory.mktemp("answers")) for spec in (plain, with_drafter)]


def _answers(spec, machine, cases, folder):
    job, out = folder / "job.json", folder / "answers.json"
    job.write_text(json.dumps({"spec": spec.to_dict(), **cases}))
    script = Path(__file__).with_name("drafted_answers.py")
    result = subprocess.run(
        [sys.executable, str(script), str(job), str(out)],
        env={**os.environ, **environment(spec, machine)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(out.read_text())


def test_every_field_is_equal_with_a_drafter(answers):
    plain, drafted = answers
    assert plain.keys() == drafted.keys()
    result = {name: list(differences(_joined(plain[name]), _joined(drafted[name]))) for name in plain}
    assert {name: different for name, different in result.items() if different} == {}


def test_dflash_head_changes_no_answer(answers, tokenizer, embedded_target, tmp_path):
    """The head is random, so its drafts are rejected. With `verify="auto"`, it might not draft at all."""
    head = save_block_head(tmp_path / "head", embedded_target, verifier="smollm2-135m")
    drafter = DrafterSpec(method="dflash", model=str(head), num_speculative_tokens=7, verify="all")
    cases = {name: case for name, case in bulk_cases(tokenizer).items() if "stop" in name or "max_tokens" in name}
    spec = dataclasses.replace(plain_engine(str(embedded_target)), drafter=drafter)
    drafted = _answers(spec, hardware.detect(), {"bulk": cases, "online": {}}, tmp_path)
    result = {name: list(differences(answers[0][name], drafted[name])) for name in cases}
    assert {name: different for name, different in result.items() if different} == {}
    assert sum((answer["speculation"] or {}).get("num_drafts", 0) for answer in drafted.values()) > 0


def test_drafts_are_accepted_and_every_finish_reason_occurs(answers):
    plain, drafted = answers
    speculations = [
        answer["speculation"] for answer in drafted.values() if isinstance(answer, dict) and "text" in answer
    ]
    accepted = sum(sum(drafts["accepted_per_position"]) for drafts in speculations if drafts)
    assert accepted > sum(drafts["num_drafts"] for drafts in speculations if drafts), "too few drafts were accepted"
    assert {answer.get("finish_reason") for answer in plain.values() if isinstance(answer, dict)} == {
        None, "stop", "length", "repetition",
    }  # fmt: skip
    assert plain["repeat: stop"]["num_output_tokens"] == drafted["repeat: stop"]["num_output_tokens"] < 8


def test_requests_without_draft_support_are_not_drafted(answers):
    plain, drafted = answers
    for prompt in PROMPTS:
        for name in UNSUPPORTED_BY_DRAFTS:
            assert not (drafted[f"{prompt}: {name}"]["speculation"] or {}).get("num_drafts"), name
        assert plain[f"{prompt}: min_p"]["text"].startswith(plain[f"{prompt}: max_tokens 7"]["text"])
    assert len({plain[f"{prompt}: forced token"]["text"] for prompt in PROMPTS}) == 1


def _joined(answer):
    """Join the events of a stream, because text can be split into events differently."""
    if isinstance(answer, dict):
        return answer
    choices, usage = {}, None
    for event in answer:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            joined = choices.setdefault(choice["index"], {"text": "", "logprobs": [], "token_ids": []})
            joined["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            joined["token_ids"] += choice.get("token_ids") or []
            joined |= {key: choice[key] for key in ("finish_reason", "stop_reason") if choice.get(key) is not None}
            logprobs = choice.get("logprobs") or {}
            names = [name for name in ("tokens", "token_logprobs", "top_logprobs") if name in logprobs]
            joined["logprobs"] += logprobs.get("content") or list(zip(*(logprobs[name] for name in names), strict=True))
    return {"choices": choices, "usage": usage}


def differences(a, b, where=""):
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({*a, *b} - NOT_COMPARED):
            yield from differences(a.get(key), b.get(key), f"{where}.{key}")
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            yield f"{where}: {len(a)} items, {len(b)} with the drafter"
        for number, pair in enumerate(zip(a, b, strict=False)):
            yield from differences(*pair, f"{where}[{number}]")
    elif a != b and not (isinstance(a, float) and a == pytest.approx(b, abs=2e-3)):
        yield f"{where}: {a!r}, {b!r} with the drafter"
