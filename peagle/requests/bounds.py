"""Limits for requests and answers in bulk and online: lists, texts, schemas, patterns, answer size.

Compiling a grammar of a few kilobytes can take seconds and gigabytes, while all requests of the engine wait. These
limits refuse obvious cases immediately; all other grammars are compiled in a trial process (`engine/trials.py`) before
an engine gets them.

A request of one mebibyte can cause an answer of gigabytes, which the engine's front end, the replica and the ingress
would each keep in memory. Answer sizes are upper estimates in bytes of JSON.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MOST_ENTRIES = {
    "tools": 128, "stop": 64, "bad_words": 128, "documents": 128, "stop_token_ids": 1024,
    # vLLM 0.29 on accelerators crashes with more (v1/worker/gpu/sample/logit_bias.py).
    "allowed_token_ids": 1024, "logit_bias": 1024,
}  # fmt: skip
_MOST_STOP_IDS = 100  # also, with a minimum response length
_MOST_TEXT_BYTES = {"stop": 8_192, "bad_words": 8_192}
_MOST_REPETITIONS = {"max_pattern_size": 64, "min_count": 64}  # vLLM checks each length at each token


def bounds_error(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first field above its limit, and a message; None if all fields are within their limits.

    >>> bounds_error({"stop_token_ids": [1] * 101, "min_tokens": 1})
    ('stop_token_ids', 'stop_token_ids has 101 entries; the limit is 100')
    """
    return next(_errors(values), None)


def _errors(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for field, most in MOST_ENTRIES.items():
        value = values.get(field)
        most = _MOST_STOP_IDS if field == "stop_token_ids" and values.get("min_tokens") else most
        if isinstance(value, list | dict) and len(value) > most:
            yield field, f"{field} has {len(value):,} entries; the limit is {most:,}"
    for field, most in _MOST_TEXT_BYTES.items():
        value = values.get(field)
        texts = value if isinstance(value, list) else [value]
        size = sum(len(text.encode(errors="replace")) for text in texts if isinstance(text, str))
        if size > most:
            yield field, f"{field} has {size:,} bytes; the limit is {most:,}"
    detection = values.get("repetition_detection")
    detection = detection if isinstance(detection, dict) else {}
    for name, most in _MOST_REPETITIONS.items():
        number = detection.get(name)
        # pydantic also accepts a number as text.
        if (isinstance(number, int | float) and number > most) or (isinstance(number, str) and len(number) > 2):
            yield "repetition_detection", f"repetition_detection.{name} must be at most {most}"


_TOKEN_ID_FIELDS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias")


def token_id_error(values: Mapping[str, Any], vocab_size: int | None) -> tuple[str, str] | None:
    """Return the field with a token id that the model does not have, and a message; None if all ids are valid.

    An engine uses token ids as indices, so an id that is too large crashes the engine. vLLM 0.29 only checks prompts
    against the tokenizer, which may have more ids than the model has embeddings.

    Args:
        values: a request body or sampling parameters; `prompt` may be token ids or a list of them.
        vocab_size: rows of the embedding; None if unknown.

    >>> token_id_error({"prompt": [5, 100]}, 100)
    ('prompt', 'prompt has the token id 100, but the model only has ids 0 to 99')
    """
    if vocab_size is None:
        return None
    prompt = values.get("prompt")
    if isinstance(prompt, list):
        for ids in prompt if prompt and isinstance(prompt[0], list) else [prompt]:
            if (wrong := _first_unknown(ids, vocab_size)) is not None:
                return "prompt", _unknown_id("prompt", wrong, vocab_size)
    for field in _TOKEN_ID_FIELDS:
        if (wrong := _first_unknown(values.get(field), vocab_size)) is not None:
            return field, _unknown_id(field, wrong, vocab_size)
    return None


def _first_unknown(ids: Any, vocab_size: int) -> int | None:
    """Return the first id outside the vocabulary. Values that are not token ids are checked elsewhere."""
    if isinstance(ids, dict):  # logit_bias
        ids = [int(key) for key in ids if isinstance(key, int) or (key.isascii() and key.lstrip("-").isdecimal())]
    if not isinstance(ids, list):
        return None
    return next((token_id for token_id in ids if isinstance(token_id, int) and not 0 <= token_id < vocab_size), None)


def _unknown_id(field: str, token_id: int, vocab_size: int) -> str:
    return f"{field} has the token id {token_id}, but the model only has ids 0 to {vocab_size - 1}"


MAX_BYTES = 65_536
MAX_DEPTH = 64  # of nested lists and objects
MAX_PROPERTIES = 1_000  # of all objects together
MAX_OPTIONAL = 200  # of one object; xgrammar's time grows at least with their square
MAX_ALTERNATIVES = 2_000  # of all enums, choices and unions together
MAX_REFERENCES = 500
MAX_REPETITIONS = 100_000  # of one element
MAX_PATTERN_BYTES = 8_192

_UNIONS = ("enum", "anyOf", "oneOf", "allOf")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_PATTERNS = ("pattern", "regex", "excludes_regex")
# Possessive, so that long runs of blanks do not backtrack.
_REPEATED = re.compile(r"\{\s*+(\d++)\s*+(?:,\s*+(\d*+)\s*+)?+\}")


def schema_error(schema: Any) -> str | None:
    """Return why a value with JSON schemas exceeds the limits, or None.

    >>> schema_error({"type": "string", "maxLength": 10**9})
    'maxLength is 1,000,000,000; the limit is 100,000'
    """
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        if wrong := _too_long(text, MAX_BYTES):
            return wrong
        value = json.loads(schema) if isinstance(schema, str) else schema
    except RecursionError:
        return f"it is nested deeper than {MAX_DEPTH} levels"
    except ValueError:
        return None  # invalid JSON is refused elsewhere
    return _Count().take(value)


def pattern_error(pattern: Any) -> str | None:
    """Return why a regular expression exceeds the limits, or None.

    >>> pattern_error("a{3,500000}")
    'it repeats an element 500,000 times; the limit is 100,000'
    """
    if not isinstance(pattern, str):
        return None
    return _too_long(pattern, MAX_PATTERN_BYTES) or _repetition_error(pattern)


def grammar_error(grammar: Any) -> str | None:
    if not isinstance(grammar, str):
        return None
    return _too_long(grammar, MAX_BYTES) or _repetition_error(grammar)


def choice_error(choices: Any) -> str | None:
    if not isinstance(choices, list):
        return None
    if len(choices) > MAX_ALTERNATIVES:
        return f"it has {len(choices):,} alternatives; the limit is {MAX_ALTERNATIVES:,}"
    return _too_long("".join(choice for choice in choices if isinstance(choice, str)), MAX_BYTES)


_KINDS = {
    "json": schema_error,
    "structural_tag": schema_error,
    "regex": pattern_error,
    "whitespace_pattern": pattern_error,
    "grammar": grammar_error,
    "choice": choice_error,
}


def request_error(body: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first field of an OpenAI request whose constraint exceeds the limits, and why; None if all are fine.

    Tools only count if they constrain the response: `tool_choice` requires a tool, or a tool is strict.
    """
    return next(((field, error) for field, error in _faults(body) if error is not None), None)


def _faults(body: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    if isinstance(response_format := body.get("response_format"), dict):
        yield "response_format", schema_error(response_format)
    if isinstance(given := body.get("structured_outputs"), dict):
        for kind, error_of in _KINDS.items():
            if given.get(kind) is not None:
                yield f"structured_outputs.{kind}", error_of(given[kind])
    tools = body.get("tools")
    if isinstance(tools, list) and (body.get("tool_choice") not in (None, "none", "auto") or any(map(_strict, tools))):
        for index, tool in enumerate(tools):
            yield f"tools[{index}]", schema_error(tool)


def _strict(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and bool(function.get("strict"))


def _too_long(text: str, most: int) -> str | None:
    size = len(text.encode(errors="surrogatepass"))
    return f"it has {size:,} bytes; the limit is {most:,}" if size > most else None


def _repetition_error(text: str) -> str | None:
    for least, most in _REPEATED.findall(text):
        digits = max(least, most, key=len)
        if len(digits) > len(str(MAX_REPETITIONS)) or int(digits) > MAX_REPETITIONS:
            shown = f"{int(digits):,}" if len(digits) < 20 else f"{digits[:20]}..."
            return f"it repeats an element {shown} times; the limit is {MAX_REPETITIONS:,}"
    return None


class _Count:
    """The number of properties, alternatives and references in a whole schema."""

    def __init__(self) -> None:
        self._properties = self._alternatives = self._references = 0

    def take(self, value: Any) -> str | None:
        level = [value]
        for _ in range(MAX_DEPTH + 1):
            if not level:
                return None
            for item in level:
                if isinstance(item, dict) and (wrong := self._object(item)):
                    return wrong
            level = [child for item in level for child in _children(item)]
        return f"it is nested deeper than {MAX_DEPTH} levels"

    def _object(self, schema: Mapping[str, Any]) -> str | None:
        self._references += isinstance(schema.get("$ref"), str)
        if self._references > MAX_REFERENCES:
            return f"it has more than {MAX_REFERENCES:,} references"
        self._alternatives += sum(len(schema[name]) for name in _UNIONS if isinstance(schema.get(name), list))
        if self._alternatives > MAX_ALTERNATIVES:
            return f"it has {self._alternatives:,} alternatives or more; the limit is {MAX_ALTERNATIVES:,}"
        if wrong := self._properties_error(schema):
            return wrong
        for name in _COUNTS:
            count = schema.get(name)
            if isinstance(count, int | float) and not isinstance(count, bool) and count > MAX_REPETITIONS:
                return f"{name} is {count:,}; the limit is {MAX_REPETITIONS:,}"
        return next(filter(None, (pattern_error(schema.get(name)) for name in _PATTERNS)), None)

    def _properties_error(self, schema: Mapping[str, Any]) -> str | None:
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            return None
        self._properties += len(properties)
        if self._properties > MAX_PROPERTIES:
            return f"it has {self._properties:,} properties or more; the limit is {MAX_PROPERTIES:,}"
        required = schema.get("required")
        needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        if (optional := len(properties.keys() - needed)) > MAX_OPTIONAL:
            return f"an object has {optional:,} optional properties; the limit is {MAX_OPTIONAL:,}; require the others"
        return None


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    inner = value if isinstance(value, list) else []
    return [child for child in inner if isinstance(child, dict | list)]


DEFAULT_MIB = 16
_TOKEN_BYTES = 16  # text of a token
_ID_BYTES = 8
_LOGPROB_BYTES = 128  # of one token at one position: text, bytes, rank and value


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """The parts of an answer that are repeated for each token.

    Attributes:
        num_choices: number of choices of all prompts together.
        prompt_tokens: prompt tokens in the answer, counted once per repetition.
        logprobs, prompt_logprobs: log-probabilities per position of a response or a prompt; 0 for none.
        with_ids: whether the answer has token ids.
    """

    num_choices: int = 1
    prompt_tokens: int = 0
    logprobs: int = 0
    prompt_logprobs: int = 0
    with_ids: bool = False

    def num_bytes(self, output_tokens: int) -> int:
        """Return the size of the answer if each choice has this many tokens."""
        return self._prompt_bytes() + self.num_choices * output_tokens * self._place_bytes(self.logprobs)

    def most_output_tokens(self, num_bytes: int) -> int:
        """Return the tokens per choice that fit into an answer of this size; below 1 if not even one fits.

        >>> AnswerShape(num_choices=2, logprobs=1).most_output_tokens(2 * 10 * (16 + 128))
        10
        """
        return (num_bytes - self._prompt_bytes()) // (max(1, self.num_choices) * self._place_bytes(self.logprobs))

    def _prompt_bytes(self) -> int:
        return self.prompt_tokens * self._place_bytes(self.prompt_logprobs)

    def _place_bytes(self, logprobs: int) -> int:
        return _TOKEN_BYTES + logprobs * _LOGPROB_BYTES + (_ID_BYTES if self.with_ids else 0)
