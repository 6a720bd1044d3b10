"""What a model's chat template takes: contents as text or as parts, and developers or not.

vLLM tells it from the template's text, and so does this, so that a request becomes the same tokens in bulk and online.
Pure: it knows no tokenizer.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import nodes, sandbox


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
    """Whether it is a variable `content`, or some variable's content: filtered, tested or a slice of it too."""
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
    """All system messages as one at the beginning, where there are several or one stands elsewhere."""
    places = [index for index, message in enumerate(messages) if message["role"] == "system"]
    if places == [0]:
        return messages
    texts = [text for index in places if (text := _text(messages[index]["content"]))]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
