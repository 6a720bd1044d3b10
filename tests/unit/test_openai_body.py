import json

import pytest

from peagle.openai_body import CHAT_URL, parse_body

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object"}


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


@pytest.mark.parametrize(("kind", "expected"), [("text", {}), ("json_object", {"json_schema": '{"type": "object"}'})])
def test_response_formats_without_a_schema(kind, expected):
    assert parse_body(CHAT_URL, {"messages": MESSAGES, "response_format": {"type": kind}}).sampling == expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "body: the request has no messages"),
        ({"prompt": "x"}, "body: unknown parameter 'prompt'"),
        ({"messages": MESSAGES, "stream": True}, "body.stream: True is not supported"),
        ({"messages": MESSAGES, "tools": [{}]}, "body.tools: [{}] is not supported"),
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
