"""The maximum size of an answer."""

import json

import pytest

from peagle.requests.fields import CHAT_URL, COMPLETIONS_URL
from pipelines.online.errors import ApiError
from pipelines.online.gateway.admission import ServedModel, answer_shape, check
from pipelines.online.gateway.keys import LOCAL

MIB = 2**20


def taken(path, body, max_model_len=8192, mib=16):
    model = ServedModel(name="m", max_model_len=max_model_len, max_choices=4096, max_answer_bytes=mib * MIB)
    return check(path, json.dumps(body).encode(), LOCAL, {"m": model}, max_output_tokens=None)


def is_refused(path, body, **how):
    try:
        taken(path, body, **how)
    except ApiError as error:
        return (error.status, error.code) == (400, "answer_too_large")
    return False


PROMPTS = ["word " * 800] * 250  # about one mebibyte
TEXT = [{"role": "user", "content": "x" * 6000}]


@pytest.mark.parametrize(
    "body",
    [{"prompt_logprobs": 20}, {"prompt_logprobs": 0}, {"prompt_logprobs": -1}, {"echo": True, "logprobs": 5},
     {"echo": True, "logprobs": 5, "max_tokens": 0}, {"logprobs": 20, "max_tokens": 500},
     {"prompt_logprobs": "20"}, {"return_token_ids": True}],
)  # fmt: skip
def test_many_prompts_with_logprobs_are_refused(body):
    assert is_refused(COMPLETIONS_URL, {"prompt": PROMPTS, "max_tokens": 1, **body})
    assert not is_refused(COMPLETIONS_URL, {"prompt": PROMPTS[:1], "max_tokens": 1, **body})
    assert not is_refused(COMPLETIONS_URL, {"prompt": PROMPTS, "max_tokens": 1})


def test_choices_multiply_the_prompt_in_the_answer():
    body = {"prompt": "x" * 6000, "max_tokens": 1, "prompt_logprobs": 1}
    assert not is_refused(COMPLETIONS_URL, body)
    assert is_refused(COMPLETIONS_URL, {**body, "n": 64})
    assert not is_refused(COMPLETIONS_URL, {**body, "n": 64, "prompt_logprobs": None})


def test_token_ids_are_counted():
    assert not is_refused(COMPLETIONS_URL, {"prompt": [1] * 4000, "prompt_logprobs": 20, "max_tokens": 1})
    assert is_refused(COMPLETIONS_URL, {"prompt": [[1] * 4000] * 8, "prompt_logprobs": 20, "max_tokens": 1})


@pytest.mark.parametrize("more", [{"top_logprobs": 20}, {"logprob_token_ids": list(range(128))}])
def test_choices_and_logprobs_of_a_chat_count(more):
    body = {"messages": TEXT, "logprobs": True, "max_tokens": 500, **more}
    assert not is_refused(CHAT_URL, body)
    assert is_refused(CHAT_URL, {**body, "n": 64})
    assert not is_refused(CHAT_URL, {**body, "n": 64, "logprobs": False})


def test_answer_size_without_logprobs():
    assert is_refused(CHAT_URL, {"messages": TEXT, "n": 1024, "max_tokens": 8000})


def test_chat_with_echo_has_prompt_logprobs():
    shape = answer_shape({"echo": True}, 1000, is_chat=True, max_model_len=8192, num_choices=1)
    assert shape.prompt_logprobs == 1
    shape = answer_shape({"echo": True, "prompt": "x"}, 1000, is_chat=False, max_model_len=8192, num_choices=1)
    assert shape.prompt_logprobs == 0


def test_default_max_tokens_fit_the_answer_size():
    intake = taken(CHAT_URL, {"messages": [], "logprobs": True, "top_logprobs": 20}, max_model_len=131_072)
    assert intake.cap_tokens == 16 * MIB // (16 + 21 * 128)
    assert taken(CHAT_URL, {"messages": []}).cap_tokens is None


@pytest.mark.parametrize("value", ["x", [], {}, 1e400])
def test_wrong_types_are_left_to_later_validation(value):
    assert not is_refused(COMPLETIONS_URL, {"prompt": "a", "logprobs": value, "prompt_logprobs": value})
