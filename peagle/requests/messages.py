"""Chat messages of rows and requests, as a chat template takes them.

Contents are text or parts; developers become systems where the template lacks them.

vLLM tells from a template's text whether contents are texts or parts, and so does this, so that a request becomes the
same tokens in bulk and online.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import nodes, sandbox

_TEXT_PARTS = ("text", "refusal", "thinking")  # each holds its text under its own name
_SILENT = ("tool_calls", "reasoning", "reasoning_content", "refusal")  # an assistant that has one may say nothing else
_CALL = '{"type": "function", "function": {"name": ..., "arguments": ...}}'


def parse_messages(value: Any, *, keep_parts: bool = False) -> list[dict[str, Any]] | str:
    """The messages, or what is wrong with them, to follow the name of where they are.

    A file without lists (CSV) has them as JSON text. Every message gets a content that is text: parts of type text
    become their texts, one below the other, and an assistant that only calls tools says "". Arguments of calls become
    objects. So vLLM has it online.

    Args:
        keep_parts: a content that came in parts stays so, for a template that takes parts; but a tool's.

    >>> parse_messages([{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}])
    [{'role': 'assistant', 'tool_calls': [{'function': {'name': 'f', 'arguments': {}}}], 'content': ''}]
    """
    if isinstance(value, str):
        value = _json_list(value)
    if not isinstance(value, list) or not value:
        return f" holds {kind_of(value)}, not a list of messages"
    messages = []
    for index, message in enumerate(value):
        parsed = _parse(message, keep_parts)
        if isinstance(parsed, str):
            return f", message {index}: {parsed}"
        messages.append(parsed)
    return messages


def message_error(message: Mapping[str, Any]) -> str | None:
    """The fault of a message beside its parts: no content, unknown form of calls."""
    if message.get("function_call") is not None:
        return "function_call is not taken: say it as tool_calls"
    if (calls := message.get("tool_calls")) is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
        return f"its tool_calls must be a list of {_CALL}"
    is_silent = message.get("role") == "assistant" and any(message.get(name) for name in _SILENT)
    if message.get("content") in (None, []) and not is_silent:
        return "it needs a role and a content, both text"
    return None


def kind_of(value: Any) -> str:
    """A value in words, for an error.

    >>> kind_of(None), kind_of(7)
    ('nothing', 'a int')
    """
    if value is None:
        return "nothing"
    return "an empty list" if value == [] else f"a {type(value).__name__}"


def _json_list(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, list) else text


def _parse(message: Any, keep_parts: bool) -> dict[str, Any] | str:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return "it needs a role and a content, both text"
    if wrong := message_error(message):
        return wrong
    texts = _texts(message.get("content"))
    if texts is None:
        return "it needs a role and a content, both text"
    # Columnar files give every struct every key; a key that is null was not there.
    kept = {key: item for key, item in message.items() if item is not None}
    if (reasoning := kept.get("reasoning", kept.get("reasoning_content"))) is not None:
        kept |= {"reasoning": reasoning, "reasoning_content": reasoning}  # templates read either
    if calls := kept.pop("tool_calls", None):
        kept["tool_calls"] = list(map(_with_arguments, calls))
    if keep_parts and isinstance(message.get("content"), list) and message["role"] != "tool":
        return kept | {"content": [{"type": "text", "text": text} for text in texts]}
    return kept | {"content": "\n".join(texts)}


def _texts(content: Any) -> list[str] | None:
    """The texts of a content; None where something in it is no text."""
    if isinstance(content, str):
        return [content]
    if content is None:
        return []
    texts = [_part_text(part) for part in content] if isinstance(content, list) else [None]
    return None if None in texts else [text for text in texts if text]  # vLLM leaves empty ones out


def _part_text(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(kind) if kind in _TEXT_PARTS else None
    return text if isinstance(text, str) else None


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
    return is_named and call.get("type") in (None, "function")


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call with its arguments as an object, which templates expect.

    The API has them as JSON text that a model wrote: text that is none becomes {}, as one bad call must not end every
    later turn of its conversation.
    """
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    arguments = arguments if isinstance(arguments, dict) else {}
    return {**call, "function": {**call["function"], "arguments": arguments}}


def conversation(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """The messages in the form that the template takes.

    Args:
        messages: as `parse_messages` gives them.
    """
    told = [dict(message) for message in messages]
    if takes_parts(template):
        for message in told:
            if isinstance(text := message["content"], str) and message["role"] != "tool":
                message["content"] = [{"type": "text", "text": text}] if text else []
    if any(message["role"] == "developer" for message in told) and not _knows_developers(template):
        told = _one_system_message([{**m, "role": "system"} if m["role"] == "developer" else m for m in told])
    return told


@functools.lru_cache(maxsize=32)
def takes_parts(template: str) -> bool:
    """Whether the template goes through a content part by part.

    >>> takes_parts("{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}")
    True
    >>> takes_parts("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    False
    """
    try:
        tree = sandbox.ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except Exception:  # a tag of the model's own; whoever renders it says what is wrong
        return False
    return any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node | None) -> bool:
    """Whether it is a variable `content`, or a variable's content.

    A filtered, tested or sliced one too.
    """
    if isinstance(node, nodes.Filter | nodes.Test):
        return _is_content(node.node)
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node)
        return isinstance(node.node, nodes.Name) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Getattr):
        return isinstance(node.node, nodes.Name) and node.attr == "content"
    return isinstance(node, nodes.Name) and node.name == "content"


def _knows_developers(template: str) -> bool:
    return '"developer"' in template or "'developer'" in template


def _one_system_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All system messages as one at the beginning.

    Where there are several, or one stands elsewhere.
    """
    system = [index for index, message in enumerate(messages) if message["role"] == "system"]
    if system == [0]:
        return messages
    texts = [text for index in system if (text := _text(messages[index]["content"]))]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
