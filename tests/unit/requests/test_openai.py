import json

import pytest

from peagle.requests.openai import CHAT_URL, parse_body

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object"}
TOOL = {"type": "function", "function": {"name": "f"}}


def test_a_chats_parameters_have_their_own_names_here():
    body = parse_body(
        CHAT_URL,
        {
            "model": "gpt-x",
            "messages": MESSAGES,
            "max_completion_tokens": 9,
            "temperature": 0.5,
            "stop": "END",
            "logprobs": True,
            "top_logprobs": 2,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
            "user": "me",
            "stream": False,
            "tools": None,
        },
    )
    assert (body.content, body.is_chat) == (MESSAGES, True)
    schema = body.sampling.pop("json_schema")
    assert json.loads(schema) == SCHEMA
    assert body.sampling == {"max_tokens": 9, "temperature": 0.5, "stop": ["END"], "logprobs": 2}


def test_a_completion_has_a_prompt_and_a_number_of_logprobs():
    body = parse_body("/v1/completions", {"prompt": "once", "logprobs": 3, "echo": False, "best_of": 1})
    assert (body.content, body.is_chat, body.sampling) == ("once", False, {"logprobs": 3})


def test_top_k_is_off_in_both_ways():
    assert parse_body("/v1/completions", {"prompt": "x", "top_k": -1}).sampling == {"top_k": 0}
    assert parse_body("/v1/completions", {"prompt": "x", "top_k": 0}).sampling == {"top_k": 0}


def test_what_means_something_for_one_prompt_is_taken():
    own = {
        "stop_token_ids": [1],
        "include_stop_str_in_output": True,
        "min_tokens": 2,
        "bad_words": ["x"],
        "logit_bias": {"7": 2.0},
        "allowed_token_ids": [7],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
        "structured_outputs": {"choice": ["a", "b"]},
        "seed": -(2**63),
    }
    for url, source in ((CHAT_URL, {"messages": MESSAGES}), ("/v1/completions", {"prompt": "x"})):
        assert parse_body(url, {**source, **own}).sampling == own


def test_a_completion_may_have_a_response_format():
    body = parse_body("/v1/completions", {"prompt": "x", "response_format": {"type": "json_object"}})
    assert json.loads(body.sampling["json_schema"]) == {"type": "object"}


def test_a_structural_tag_is_a_constraint():
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}
    (constraint,) = parse_body(CHAT_URL, {"messages": MESSAGES, "response_format": tag}).sampling.values()
    assert json.loads(constraint["structural_tag"]) == tag


@pytest.mark.parametrize(("kind", "expected"), [("text", {}), ("json_object", {"json_schema": '{"type": "object"}'})])
def test_response_formats_without_a_schema(kind, expected):
    assert parse_body(CHAT_URL, {"messages": MESSAGES, "response_format": {"type": kind}}).sampling == expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "body: the request has no messages"),
        ({"prompt": "x"}, "body: unknown parameter 'prompt'"),
        ({"messages": MESSAGES, "stream": True}, "body.stream: True is not taken: only an answer online"),
        ({"messages": MESSAGES, "tools": [{}]}, "body.tools: each must be"),
        ({"messages": MESSAGES, "tools": [TOOL]}, 'body.tools: they need tool_choice: "none" here'),
        ({"messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto"}, "body.tool_choice: 'auto' is not taken"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"tokenize": 1}}, "body.chat_template_kwargs: tokenize is not"),
        ({"messages": MESSAGES, "chat_template_kwargs": []}, "body.chat_template_kwargs: must be an object"),
        ({"messages": MESSAGES, "continue_final_message": True}, "body.continue_final_message: it needs add_gen"),
        ({"messages": MESSAGES, "reasoning_effort": "huge"}, "body.reasoning_effort: must be one of none, min"),
        ({"messages": MESSAGES, "documents": [{"a": 1}]}, "body.documents: must be a list of objects of texts"),
        ({"messages": MESSAGES, "add_special_tokens": 1}, "body.add_special_tokens: must be true or false, not 1"),
        ({"messages": MESSAGES, "echo": True}, "body.echo: True is not taken"),
        ({"messages": MESSAGES, "logit_bias": {"x": 1}}, "body.logit_bias: 'x' is no token id"),
        (
            {"messages": MESSAGES, "logit_bias": {str(n): 1 for n in range(1025)}},
            "body.logit_bias: logit_bias has 1,025",
        ),
        ({"messages": MESSAGES, "repetition_detection": {"max": 1}}, "body.repetition_detection: unknown 'max'"),
        ({"messages": MESSAGES, "structured_outputs": {}}, "body.structured_outputs: it needs one of json, regex"),
        ({"messages": MESSAGES, "structured_outputs": {"regexp": "x"}}, "body.structured_outputs: unknown 'regexp'"),
        ({"messages": MESSAGES, "structured_outputs": {"regex": "a{1,999999}"}}, "body.structured_outputs: it repeats"),
        ({"messages": MESSAGES, "json_schema": {}}, "body: unknown parameter 'json_schema'"),
        ({"messages": MESSAGES, "temprature": 1}, "body: unknown parameter 'temprature': did you mean temperature?"),
        ({"messages": MESSAGES, "temperature": -1}, "body.temperature: Input should be greater"),
        ({"messages": MESSAGES, "logprobs": 3}, "body.logprobs: must be true or false, not 3"),
        ({"messages": MESSAGES, "top_logprobs": 3}, "body.top_logprobs: needs logprobs: true"),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "body.top_logprobs: must be a number from 0"),
        ({"messages": MESSAGES, "response_format": "json"}, "body.response_format: its type must be"),
        ({"messages": MESSAGES, "response_format": {"type": "json_schema"}}, "body.response_format: json_schema needs"),
    ],
)
def test_what_is_wrong_with_a_body_is_said(body, message):
    assert parse_body(CHAT_URL, body).startswith(message)
