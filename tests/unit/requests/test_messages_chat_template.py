"""Inputs of chat templates, compared with vLLM's."""

import copy
from pathlib import Path

import pytest

from peagle.requests.messages import conversation, parse_messages, takes_parts

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
def test_takes_parts_matches_vllm(name):
    from vllm.renderers.hf import _detect_content_format

    assert takes_parts(TEMPLATES[name]) == (_detect_content_format(TEMPLATES[name], default="string") == "openai")


def test_takes_parts_matches_vllm_for_shipped_templates():
    from vllm.renderers import hf
    from vllm.transformers_utils import chat_templates

    shipped = [path.read_text() for path in Path(chat_templates.__file__).parent.glob("*.jinja")]
    assert shipped
    for text in shipped:
        assert takes_parts(text) == (hf._detect_content_format(text, default="string") == "openai")


@pytest.mark.parametrize("template", ["text", "parts by name", "developers"])
@pytest.mark.parametrize("chat", CHATS)
def test_conversation_matches_vllm(chat, template):
    from vllm.renderers import hf

    text = TEMPLATES[template]
    expected = vllm_conversation(CHATS[chat], "openai" if takes_parts(text) else "string")
    if any(m["role"] == "developer" for m in expected) and not hf._detect_developer_role_support(text):
        expected = hf._consolidate_system_messages(hf._convert_developer_to_system(expected))
    expected = [{name: value for name, value in message.items() if value is not None} for message in expected]
    assert conversation(parse_messages(CHATS[chat], keep_parts=takes_parts(text)), text) == expected


def vllm_conversation(messages, content_format):
    from vllm.entrypoints.chat_utils import parse_chat_messages

    class Model:
        """A text model."""

        multimodal_config = None
        enable_prompt_embeds = False
        allowed_local_media_path = ""
        allowed_media_domains = None

    return parse_chat_messages(copy.deepcopy(messages), Model(), content_format)[0]
