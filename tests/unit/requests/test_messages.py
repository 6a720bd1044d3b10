"""Checks that messages of OpenAI's clients are parsed and passed to chat templates as by vLLM."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest

from peagle.requests.messages import convert_messages, expects_parts, parse_messages

USER = {"role": "user", "content": "weather?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}
HISTORY = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]
CONVERSATIONS = {
    "tool history": HISTORY,
    "tool history without a content": [USER, {"role": "assistant", "tool_calls": [CALL]}, HISTORY[2]],
    "tool answer in parts": [*HISTORY[:2], {**HISTORY[2], "content": [{"type": "text", "text": "rain"}]}],
    "several calls": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL, {**CALL, "id": "c2"}]}],
    "no calls": [USER, {"role": "assistant", "content": "x", "tool_calls": []}],
    "empty arguments": [
        USER,
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": ""}}]},
    ],
    "arguments with invalid JSON": [
        USER,
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]},
    ],
    "arguments with a JSON list": [
        USER,
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1]"}}]},
    ],
    "text parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    "an empty part": [{"role": "user", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "b"}]}],
    "thinking": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "b"}]}],
    "a refusal": [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
    "names": [{"role": "system", "content": "s", "name": "n"}, {**USER, "name": "me"}],
    "reasoning": [USER, {"role": "assistant", "content": "x", "reasoning": "because"}],
    "reasoning with its old name": [USER, {"role": "assistant", "content": "x", "reasoning_content": "because"}],
    "only reasoning": [USER, {"role": "assistant", "content": None, "reasoning": "because"}],
}


def vllm_conversation(messages, content_format="string"):
    from vllm.entrypoints.chat_utils import parse_chat_messages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    text_model = SimpleNamespace(
        multimodal_config=None, enable_prompt_embeds=False, allowed_local_media_path="", allowed_media_domains=None
    )
    request = ChatCompletionRequest.model_validate({"messages": copy.deepcopy(messages)})
    for message in request.messages:
        if not isinstance(message.get("content"), str | None):
            message["content"] = list(message["content"])  # pydantic validates lazily
    return parse_chat_messages(request.messages, text_model, content_format)[0]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_parsed_messages_match_vllm(name):
    assert parse_messages(CONVERSATIONS[name]) == vllm_conversation(CONVERSATIONS[name])


def test_tool_arguments_can_be_an_object():
    """Files of conversations often have objects, where the API has JSON text."""
    call = {**CALL, "function": {"name": "f", "arguments": {"city": "Oslo"}}}
    assert parse_messages([USER, {"role": "assistant", "tool_calls": [call]}])[1]["tool_calls"] == [call]


def test_fields_with_null_are_dropped():
    """In columnar files, every struct has every field."""
    assert parse_messages([{**USER, "tool_calls": None, "name": None}]) == [USER]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": None}, "it needs a role and text content"),
        ({"role": "user", "content": []}, "it needs a role and text content"),
        ({"role": "tool", "tool_call_id": "c1"}, "it needs a role and text content"),
        ({"role": "assistant", "content": None}, "it needs a role and text content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "it needs a role and text content"),
        ({"role": "user", "content": [{"text": "x"}]}, "it needs a role and text content"),
        ({"role": "user", "content": [{"type": ["text"], "text": "x"}]}, "it needs a role and text content"),
        ({"role": "user", "content": [{"type": "input_text", "text": "x"}]}, "it needs a role and text content"),
        ({"role": "user", "content": ["x"]}, "it needs a role and text content"),
        ({"role": 7, "content": "x"}, "it needs a role and text content"),
        ({"role": "assistant", "tool_calls": "f()"}, "its tool_calls must be"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}, "its tool_calls must"),
        ({"role": "assistant", "tool_calls": [{"type": "function"}]}, "its tool_calls must be"),
        ({"role": "assistant", "content": None, "function_call": {"name": "f"}}, "function_call is not supported"),
    ],
)
def test_invalid_messages_are_refused(message, expected):
    assert parse_messages([USER, message]).startswith(f", message 1: {expected}")


LOOP = "{% for m in messages %}{% for part in CONTENT %}{{ part['text'] }}{% endfor %}{% endfor %}"
TEMPLATES = {
    "text": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "parts by name": LOOP.replace("CONTENT", "m['content']"),
    "parts by attribute": LOOP.replace("CONTENT", "m.content"),
    "filtered parts": LOOP.replace("CONTENT", "m.content | list"),
    "a slice of parts": LOOP.replace("CONTENT", "m.content[1:]"),
    "a macro": "{% macro say(content) %}{% for part in content %}{{ part.text }}{% endfor %}{% endmacro %}",
    "another list": LOOP.replace("CONTENT", "m.tool_calls"),
    "developers": "{% for m in messages %}{% if m.role == 'developer' %}{{ m.content }}{% endif %}{% endfor %}",
    "no template": "{% for",
}
CHATS = {
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    "text": [{"role": "user", "content": "a"}],
    "tool history": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "id": "1",
                                                               "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1",
         "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ],
    "a developer": [{"role": "developer", "content": "d"}, {"role": "user", "content": "a"}],
    "a developer in the middle": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "developer", "content": [{"type": "text", "text": "d"}, {"type": "text", "text": "e"}]},
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_expects_parts_matches_vllm(name):
    from vllm.renderers.hf import _detect_content_format

    assert expects_parts(TEMPLATES[name]) == (_detect_content_format(TEMPLATES[name], default="string") == "openai")


def test_expects_parts_matches_vllm_for_the_templates_of_vllm():
    from vllm.renderers import hf
    from vllm.transformers_utils import chat_templates

    templates = [path.read_text() for path in Path(chat_templates.__file__).parent.glob("*.jinja")]
    assert templates
    for text in templates:
        assert expects_parts(text) == (hf._detect_content_format(text, default="string") == "openai")


@pytest.mark.parametrize("template", ["text", "parts by name", "developers"])
@pytest.mark.parametrize("chat", CHATS)
def test_converted_messages_match_vllm(chat, template):
    from vllm.renderers import hf

    text = TEMPLATES[template]
    expected = vllm_conversation(CHATS[chat], "openai" if expects_parts(text) else "string")
    if any(m["role"] == "developer" for m in expected) and not hf._detect_developer_role_support(text):
        expected = hf._consolidate_system_messages(hf._convert_developer_to_system(expected))
    expected = [{name: value for name, value in message.items() if value is not None} for message in expected]
    assert convert_messages(parse_messages(CHATS[chat], keep_parts=expects_parts(text)), text) == expected
