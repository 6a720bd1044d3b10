import json

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from peagle.requests.openai import CHAT_URL, error_line, output_line, parse_body

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object"}
TOOL = {"type": "function", "function": {"name": "f"}}


def test_chat_parameters_are_translated():
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


def test_completion_parameters_are_translated():
    body = parse_body("/v1/completions", {"prompt": "once", "logprobs": 3, "echo": False, "best_of": 1, "top_k": -1})
    # In vLLM, -1 and 0 both mean that top_k is off.
    assert (body.content, body.is_chat, body.sampling) == ("once", False, {"logprobs": 3, "top_k": 0})


def test_vllm_parameters_are_unchanged():
    parameters = {
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
        assert parse_body(url, {**source, **parameters}).sampling == parameters


def test_structural_tag_becomes_a_constraint():
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}
    (constraint,) = parse_body(CHAT_URL, {"messages": MESSAGES, "response_format": tag}).sampling.values()
    assert json.loads(constraint["structural_tag"]) == tag


@pytest.mark.parametrize(
    ("response_type", "expected"), [("text", {}), ("json_object", {"json_schema": '{"type": "object"}'})]
)
def test_response_format_without_a_schema_is_translated(response_type, expected):
    for url, source in ((CHAT_URL, {"messages": MESSAGES}), ("/v1/completions", {"prompt": "x"})):
        assert parse_body(url, {**source, "response_format": {"type": response_type}}).sampling == expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "body: the request has no messages"),
        ({"prompt": "x"}, "body: unknown parameter 'prompt'"),
        ({"messages": MESSAGES, "stream": True}, "body.stream: True is not supported: only online answers"),
        ({"messages": MESSAGES, "tools": [{}]}, "body.tools: each must be"),
        ({"messages": MESSAGES, "tools": [TOOL]}, 'body.tools: requires a tool_call_parser, or tool_choice: "none"'),
        ({"messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto"}, "body.tool_choice: 'auto' is not supported"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"tokenize": 1}}, "body.chat_template_kwargs: tokenize is not"),
        ({"messages": MESSAGES, "chat_template_kwargs": []}, "body.chat_template_kwargs: must be an object"),
        ({"messages": MESSAGES, "continue_final_message": True}, "body.continue_final_message: requires add_gen"),
        ({"messages": MESSAGES, "reasoning_effort": "huge"}, "body.reasoning_effort: must be one of none, min"),
        (
            {"messages": MESSAGES, "documents": [{"a": 1}]},
            "body.documents: must be a list of objects with string",
        ),
        ({"messages": MESSAGES, "add_special_tokens": 1}, "body.add_special_tokens: must be true or false, not 1"),
        ({"messages": MESSAGES, "echo": True}, "body.echo: True is not supported"),
        ({"messages": MESSAGES, "logit_bias": {"x": 1}}, "body.logit_bias: 'x' is not a token id"),
        (
            {"messages": MESSAGES, "logit_bias": {str(n): 1 for n in range(1025)}},
            "body.logit_bias: logit_bias has 1,025",
        ),
        ({"messages": MESSAGES, "repetition_detection": {"max": 1}}, "body.repetition_detection: unknown 'max'"),
        ({"messages": MESSAGES, "structured_outputs": {}}, "body.structured_outputs: requires exactly one of"),
        ({"messages": MESSAGES, "structured_outputs": {"regexp": "x"}}, "body.structured_outputs: unknown 'regexp'"),
        ({"messages": MESSAGES, "structured_outputs": {"regex": "a{1,999999}"}}, "body.structured_outputs: it repeats"),
        ({"messages": MESSAGES, "json_schema": {}}, "body: unknown parameter 'json_schema'"),
        ({"messages": MESSAGES, "temprature": 1}, "body: unknown parameter 'temprature': did you mean temperature?"),
        ({"messages": MESSAGES, "temperature": -1}, "body.temperature: Input should be greater"),
        ({"messages": MESSAGES, "logprobs": 3}, "body.logprobs: must be true or false, not 3"),
        ({"messages": MESSAGES, "top_logprobs": 3}, "body.top_logprobs: requires logprobs: true"),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "body.top_logprobs: must be an integer from 0"),
        ({"messages": MESSAGES, "response_format": "json"}, "body.response_format: its type must be"),
        (
            {"messages": MESSAGES, "response_format": {"type": "json_schema"}},
            "body.response_format: json_schema req",
        ),
    ],
)
def test_invalid_bodies_are_refused(body, message):
    assert parse_body(CHAT_URL, body).startswith(message)


LOGPROBS = [
    {"token": "é", "logprob": -0.5, "top": [{"token": "é", "logprob": -0.5}, {"token": "e", "logprob": -1.0}]},
    {"token": " x", "logprob": -0.1, "top": []},
]
COMPLETIONS = [
    {"text": "é x", "finish_reason": "stop", "num_output_tokens": 2, "logprobs": LOGPROBS},
    {"text": "y", "finish_reason": "length", "num_output_tokens": 1, "logprobs": LOGPROBS[1:]},
]


def make_row(**changes):
    values = {
        "id": "000000007", "response": "hello", "finish_reason": "stop", "num_prompt_tokens": 5,
        "num_cached_tokens": 2, "num_output_tokens": 3, "model": "m", "completions": None,
    }  # fmt: skip
    return values | changes


def make_line(row, *, is_chat):
    return output_line(row, custom_id="mine", is_chat=is_chat, created=1_700_000_000, run_id="r")


def parse_strictly(answer_type, body):
    """Parse the body as a type of OpenAI's client. Fail if the type lacks a field of the body."""
    answer = answer_type.model_validate(body, strict=True)
    assert not answer.model_extra
    return answer


def test_chat_answer_parses_in_openai_client():
    answer = make_line(make_row(), is_chat=True)
    assert list(answer) == ["id", "custom_id", "response", "error"]
    assert (answer["custom_id"], answer["error"]) == ("mine", None)
    assert (answer["response"]["status_code"], set(answer["response"])) == (200, {"status_code", "request_id", "body"})
    chat = parse_strictly(ChatCompletion, answer["response"]["body"])
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("hello", "stop")
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens) == (5, 3, 8)
    assert chat.usage.prompt_tokens_details.cached_tokens == 2
    assert (chat.created, chat.model) == (1_700_000_000, "m")


def test_completion_answer_parses_in_openai_client():
    answer = parse_strictly(Completion, make_line(make_row(num_cached_tokens=None), is_chat=False)["response"]["body"])
    assert (answer.object, answer.choices[0].text, answer.usage.total_tokens) == ("text_completion", "hello", 8)


def test_several_choices_with_logprobs_parse_in_openai_client():
    chat = parse_strictly(
        ChatCompletion, make_line(make_row(completions=COMPLETIONS), is_chat=True)["response"]["body"]
    )
    choices = [(c.index, c.message.content, c.finish_reason) for c in chat.choices]
    assert choices == [(0, "é x", "stop"), (1, "y", "length")]
    first = chat.choices[0].logprobs.content[0]
    assert (first.token, first.bytes, first.logprob) == ("é", [195, 169], -0.5)
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("é", -0.5), ("e", -1.0)]
    answer = parse_strictly(Completion, make_line(make_row(completions=COMPLETIONS), is_chat=False)["response"]["body"])
    logprobs = answer.choices[0].logprobs
    assert (logprobs.tokens, logprobs.text_offset, logprobs.token_logprobs) == (["é", " x"], [0, 1], [-0.5, -0.1])
    assert logprobs.top_logprobs == [{"é": -0.5, "e": -1.0}, {}]


def test_id_of_a_line_depends_on_run_and_row():
    assert make_line(make_row(), is_chat=True) == make_line(make_row(), is_chat=True)
    other = output_line(make_row(), custom_id="mine", is_chat=True, created=1, run_id="another")
    assert (
        other["id"]
        != make_line(make_row(), is_chat=True)["id"]
        != make_line(make_row(id="000000008"), is_chat=True)["id"]
    )


@pytest.mark.parametrize("reason", ["invalid", "prompt_too_long", "refused"])
def test_error_line_of_an_invalid_request_has_status_400(reason):
    answer = error_line({"id": "1", "reason": reason, "message": "no"}, custom_id="mine", run_id="r")
    assert (answer["custom_id"], answer["error"], answer["response"]["status_code"]) == ("mine", None, 400)
    assert answer["response"]["body"]["error"]["code"] == reason
    assert answer["response"]["body"]["error"]["message"] == "no"


def test_error_line_of_an_engine_failure_has_no_response():
    answer = error_line({"id": "1", "reason": "engine_died", "message": "no"}, custom_id=None, run_id="r")
    assert (answer["response"], answer["error"]) == (None, {"code": "engine_died", "message": "no"})


def test_tools_are_accepted_with_a_parser():
    body = parse_body(
        CHAT_URL,
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"},
        has_tool_parser=True,
        has_parser=True,
    )
    assert body.parsing == {"tools": [TOOL], "tool_choice": "required"}
    assert body.template["tools"][0]["function"]["name"] == TOOL["function"]["name"]
    assert parse_body(CHAT_URL, {"messages": MESSAGES}, has_parser=True).parsing == {}
    assert parse_body("/v1/completions", {"prompt": "x"}, has_parser=True).parsing is None


def test_message_of_a_parsed_row_has_reasoning_and_tool_calls():
    call = {"id": "call-1", "name": "f", "arguments": "{}"}
    unparsed = {"text": "<think>hm</think><tool_call>", "finish_reason": "stop", "logprobs": None}
    row = {
        "id": "7", "response": "", "finish_reason": "tool_calls", "num_prompt_tokens": 1, "num_output_tokens": 2,
        "num_cached_tokens": None, "model": "m", "completions": [unparsed], "reasoning": "hm", "tool_calls": [call],
    }  # fmt: skip
    line = output_line(row, custom_id="a", is_chat=True, created=1, run_id="r")
    (choice,) = line["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant", "content": None, "refusal": None, "reasoning": "hm",
        "tool_calls": [{"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }  # fmt: skip
