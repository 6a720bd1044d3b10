"""Chat messages as rows hold them, made into what a chat template takes.

It knows shapes; it knows no template and no tokenizer.
"""

import json
from typing import Any


def parse_messages(value: Any) -> list[dict[str, Any]] | str:
    """The messages, or what is wrong with them, to follow the name of where they are.

    A file without lists (CSV) has them as JSON text. A content in OpenAI's parts of type text becomes their texts, one
    below the other.
    """
    if isinstance(value, str):
        value = _json_list(value)
    if not isinstance(value, list) or not value:
        return f" holds {kind_of(value)}, not a list of messages"
    messages = []
    for index, message in enumerate(value):
        content = _text(message.get("content")) if isinstance(message, dict) else None
        if content is None or not isinstance(message.get("role"), str):
            return f", message {index}: it needs a role and a content, both text"
        # Columnar files give every struct every key; a key that is null was not there.
        messages.append({key: item for key, item in message.items() if item is not None} | {"content": content})
    return messages


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


def _text(content: Any) -> str | None:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        return None
    parts = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in content]
    return "\n".join(part for part in parts if isinstance(part, str)) if None not in parts else None
