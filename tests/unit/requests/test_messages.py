"""Messages in every form of OpenAI's clients, compared with vLLM's conversations."""

import copy

import pytest

from peagle.requests.messages import parse_messages

USER = {"role": "user", "content": "weather?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}
HISTORY = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]
FORMS = {
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


def vllm_conversation(messages):
    """Return vLLM's conversation for a text template."""
    from vllm.entrypoints.chat_utils import parse_chat_messages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    class Tracker:
        """For a text model."""

        multimodal_config = None
        enable_prompt_embeds = False
        allowed_local_media_path = ""
        allowed_media_domains = None

    request = ChatCompletionRequest.model_validate({"messages": copy.deepcopy(messages)})
    for message in request.messages:
        if not isinstance(message.get("content"), str | None):
            message["content"] = list(message["content"])  # pydantic validates lazily
    conversation, _, _ = parse_chat_messages(request.messages, Tracker(), "string")
    return conversation


@pytest.mark.parametrize("name", FORMS)
def test_messages_match_vllm(name):
    assert parse_messages(FORMS[name]) == vllm_conversation(FORMS[name])


def test_tool_arguments_may_be_an_object():
    """Conversation files often have objects."""
    call = {**CALL, "function": {"name": "f", "arguments": {"city": "Oslo"}}}
    assert parse_messages([USER, {"role": "assistant", "tool_calls": [call]}])[1]["tool_calls"] == [call]


def test_null_keys_are_dropped():
    """In columnar files, every struct has every key."""
    assert parse_messages([{**USER, "tool_calls": None, "name": None}]) == [USER]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": None}, "it needs a role and a content"),
        ({"role": "user", "content": []}, "it needs a role and a content"),
        ({"role": "tool", "tool_call_id": "c1"}, "it needs a role and a content"),
        ({"role": "assistant", "content": None}, "it needs a role and a content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "it needs a role and a content"),
        ({"role": "user", "content": [{"text": "x"}]}, "it needs a role and a content"),
        ({"role": "user", "content": [{"type": ["text"], "text": "x"}]}, "it needs a role and a content"),
        ({"role": "user", "content": [{"type": "input_text", "text": "x"}]}, "it needs a role and a content"),
        ({"role": "user", "content": ["x"]}, "it needs a role and a content"),
        ({"role": 7, "content": "x"}, "it needs a role and a content"),
        ({"role": "assistant", "tool_calls": "f()"}, "its tool_calls must be"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}, "its tool_calls must"),
        ({"role": "assistant", "tool_calls": [{"type": "function"}]}, "its tool_calls must be"),
        ({"role": "assistant", "content": None, "function_call": {"name": "f"}}, "function_call is not supported"),
    ],
)
def test_invalid_messages(message, expected):
    assert parse_messages([USER, message]).startswith(f", message 1: {expected}")
