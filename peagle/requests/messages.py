"""Convert chat messages to the structure that a chat template expects, in the same way as vLLM."""

import contextlib
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import nodes, sandbox

_TEXT_PARTS = ("text", "refusal", "thinking")  # each part's text is under a key of the same name
# An assistant message with one of these fields needs no content.
_CONTENT_REPLACEMENTS = ("tool_calls", "reasoning", "reasoning_content", "refusal")
_NEEDS_ROLE_AND_TEXT = "it needs a role and text content"


def parse_messages(value: Any, *, keep_parts: bool = False) -> list[dict[str, Any]] | str:
    """Return the messages, or the end of an error message. The caller prepends the location of the messages.

    `value` may be JSON text, as in CSV. As in vLLM, each message gets text as its content: text parts are joined by
    newlines, and an assistant message with only tool calls gets "". Arguments of tool calls become objects.

    Args:
        keep_parts: keep lists of parts for a template that expects them, except in tool messages.

    >>> parse_messages([{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}])
    [{'role': 'assistant', 'tool_calls': [{'function': {'name': 'f', 'arguments': {}}}], 'content': ''}]
    """
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            parsed_json = json.loads(value)
            value = parsed_json if isinstance(parsed_json, list) else value
    if not isinstance(value, list) or not value:
        return f" must be a list of messages, not {kind_of(value)}"
    messages = []
    for index, message in enumerate(value):
        parsed = _parse(message, keep_parts)
        if isinstance(parsed, str):
            return f", message {index}: {parsed}"
        messages.append(parsed)
    return messages


def message_error(message: Mapping[str, Any]) -> str | None:
    """Return an error message if a chat message lacks content or has invalid tool calls, else None."""
    if message.get("function_call") is not None:
        return "function_call is not supported: use tool_calls"
    if (calls := message.get("tool_calls")) is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
        return 'its tool_calls must be a list of {"type": "function", "function": {"name": ..., "arguments": ...}}'
    is_optional = message.get("role") == "assistant" and any(message.get(name) for name in _CONTENT_REPLACEMENTS)
    if message.get("content") in (None, []) and not is_optional:
        return _NEEDS_ROLE_AND_TEXT
    return None


def kind_of(value: Any) -> str:
    """Describe a value for an error message.

    >>> kind_of(None), kind_of(7)
    ('null', 'int')
    """
    if value is None:
        return "null"
    return "an empty list" if value == [] else type(value).__name__


def _parse(message: Any, keep_parts: bool) -> dict[str, Any] | str:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return _NEEDS_ROLE_AND_TEXT
    if error := message_error(message):
        return error
    texts = _texts(message.get("content"))
    if texts is None:
        return _NEEDS_ROLE_AND_TEXT
    # In columnar files every struct has every key, so null means not set.
    parsed = {key: item for key, item in message.items() if item is not None}
    if (reasoning := parsed.get("reasoning", parsed.get("reasoning_content"))) is not None:
        parsed |= {"reasoning": reasoning, "reasoning_content": reasoning}  # templates read one or the other
    if calls := parsed.pop("tool_calls", None):
        parsed["tool_calls"] = list(map(_with_arguments, calls))
    if keep_parts and isinstance(message.get("content"), list) and message["role"] != "tool":
        return parsed | {"content": [{"type": "text", "text": text} for text in texts]}
    return parsed | {"content": "\n".join(texts)}


def _texts(content: Any) -> list[str] | None:
    """Return the texts of a message's content, or None if a part is not text."""
    if isinstance(content, str):
        return [content]
    if content is None:
        return []
    if not isinstance(content, list):
        return None
    texts = []
    for part in content:
        part_type = part.get("type") if isinstance(part, dict) else None
        text = part.get(part_type) if part_type in _TEXT_PARTS else None
        if not isinstance(text, str):
            return None
        texts.append(text)
    return [text for text in texts if text]  # vLLM drops empty texts


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
    return is_named and call.get("type") in (None, "function")


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as an object, which templates expect.

    In the API, arguments are JSON text from a model. Invalid text becomes {}, so that one bad call does not break the
    rest of the conversation.
    """
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    arguments = arguments if isinstance(arguments, dict) else {}
    return {**call, "function": {**call["function"], "arguments": arguments}}


def convert_messages(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Convert messages of `parse_messages` to the form that the template expects."""
    converted = [dict(message) for message in messages]
    if expects_parts(template):
        for message in converted:
            if isinstance(text := message["content"], str) and message["role"] != "tool":
                message["content"] = [{"type": "text", "text": text}] if text else []
    has_developer_role = '"developer"' in template or "'developer'" in template
    if not has_developer_role and any(message["role"] == "developer" for message in converted):
        for message in converted:
            if message["role"] == "developer":
                message["role"] = "system"
        converted = _merge_system_messages(converted)
    return converted


@functools.lru_cache(maxsize=32)
def expects_parts(template: str) -> bool:
    """Return whether the template iterates over the parts of a message's content.

    >>> expects_parts("{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}")
    True
    >>> expects_parts("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    False
    """
    try:
        tree = sandbox.ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except Exception:  # for example an unknown tag; rendering reports it
        return False
    return any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node | None) -> bool:
    """Return whether a node is a variable or an attribute `content`, possibly filtered, tested or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return _is_content(node.node)
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node)
        return isinstance(node.node, nodes.Name) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Getattr):
        return isinstance(node.node, nodes.Name) and node.attr == "content"
    return isinstance(node, nodes.Name) and node.name == "content"


def _merge_system_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge all system messages into one at the beginning."""
    system_indices = [index for index, message in enumerate(messages) if message["role"] == "system"]
    if system_indices == [0]:
        return messages
    texts = [text for index in system_indices if (text := _joined_text(messages[index]["content"]))]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _joined_text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
