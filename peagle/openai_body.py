"""The body of an OpenAI request, chat completions or completions: its prompt and its sampling parameters.

It knows the API's names; it knows neither batches nor answers. What this engine cannot do is refused by name, what
does not change a response is left aside.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from peagle.errors import did_you_mean, shown
from peagle.sampling import MAX_LOGPROBS, parse_overrides

CHAT_URL = "/v1/chat/completions"
_SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "ignore_eos", "max_tokens",
)  # fmt: skip
_CHAT = ("messages", "max_completion_tokens", "logprobs", "top_logprobs", "response_format")
_COMPLETION = ("prompt", "logprobs")
_LEFT_ASIDE = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# Accepted with the value that asks for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,), "echo": (False,), "suffix": ("",), "best_of": (1,), "tools": ([],), "tool_choice": ("none",),
    "logit_bias": ({},), "parallel_tool_calls": (True, False), "modalities": (["text"],),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A request's content (messages, text or token ids) and its own sampling parameters."""

    content: Any
    is_chat: bool
    sampling: dict[str, Any] = field(default_factory=dict)


def parse_body(url: str, body: Mapping[str, Any]) -> Body | str:
    """The body, or what is wrong with it. Null is not set."""
    is_chat = url == CHAT_URL
    given = {key: value for key, value in body.items() if value is not None}
    known = (*_SAME_NAME, *(_CHAT if is_chat else _COMPLETION), *_LEFT_ASIDE)
    for key, value in given.items():
        if key in _NEUTRAL and value not in _NEUTRAL[key]:
            return f"body.{key}: {shown(value)} is not supported"
        if key not in known and key not in _NEUTRAL:
            return f"body: unknown parameter {shown(key)}: {did_you_mean(key, known)}"
    source = "messages" if is_chat else "prompt"
    if source not in given:
        return f"body: the request has no {source}"
    sampling = _sampling(given, is_chat)
    if isinstance(sampling, str):
        return f"body.{sampling}"
    return Body(content=given[source], is_chat=is_chat, sampling=sampling)


def _sampling(given: Mapping[str, Any], is_chat: bool) -> dict[str, Any] | str:
    values = {key: given[key] for key in _SAME_NAME if key in given}
    if "max_completion_tokens" in given:
        values["max_tokens"] = given["max_completion_tokens"]
    logprobs = _chat_logprobs(given) if is_chat else given.get("logprobs")
    if isinstance(logprobs, str):
        return logprobs
    schema = _schema(given.get("response_format", {"type": "text"}))
    if isinstance(schema, str):
        return schema
    return parse_overrides({**values, "logprobs": logprobs, "json_schema": schema})


def _chat_logprobs(given: Mapping[str, Any]) -> int | str | None:
    asked, top = given.get("logprobs", False), given.get("top_logprobs", 0)
    if not isinstance(asked, bool):
        return f"logprobs: must be true or false, not {shown(asked)}"
    if type(top) is not int or not 0 <= top <= MAX_LOGPROBS:
        return f"top_logprobs: must be a number from 0 to {MAX_LOGPROBS}, not {shown(top)}"
    if top and not asked:
        return "top_logprobs: needs logprobs: true"
    return top if asked else None


def _schema(response_format: Any) -> dict[str, Any] | str | None:
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        return f"response_format: its type must be text, json_object or json_schema, not {shown(kind)}"
    named = response_format.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    return schema if isinstance(schema, dict) else "response_format: json_schema needs a schema that is an object"
