"""Limits for requests and responses of bulk runs and endpoints: lists, texts, schemas, patterns, response size.

Oversized schemas, patterns and grammars are refused immediately. The others are compiled in a trial process
(`engine/trials.py`) before they reach an engine.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_MAX_ENTRIES = {
    "tools": 128, "stop": 64, "bad_words": 128, "documents": 128, "stop_token_ids": 1024,
    # vLLM 0.29 on accelerators crashes with more (v1/worker/gpu/sample/logit_bias.py).
    "allowed_token_ids": 1024, "logit_bias": 1024,
}  # fmt: skip


def bounds_error(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first field above its limit, and a message; None if all fields are within their limits.

    >>> bounds_error({"stop_token_ids": [1] * 101, "min_tokens": 1})
    ('stop_token_ids', 'stop_token_ids has 101 entries; the limit is 100')
    """
    return next(_errors(values), None)


def _errors(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for field, limit in _MAX_ENTRIES.items():
        value = values.get(field)
        if field == "stop_token_ids" and values.get("min_tokens"):  # vLLM's limit with min_tokens
            limit = 100
        if isinstance(value, list | dict) and len(value) > limit:
            yield field, f"{field} has {len(value):,} entries; the limit is {limit:,}"
    for field in ("stop", "bad_words"):
        value = values.get(field)
        texts = value if isinstance(value, list) else [value]
        size = sum(len(text.encode(errors="replace")) for text in texts if isinstance(text, str))
        if size > 8_192:
            yield field, f"{field} has {size:,} bytes; the limit is 8,192"
    detection = values.get("repetition_detection")
    detection = detection if isinstance(detection, dict) else {}
    for name in ("max_pattern_size", "min_count"):  # vLLM tries every pattern size at each token
        number = detection.get(name)
        # pydantic also accepts a number as text.
        if (isinstance(number, int | float) and number > 64) or (isinstance(number, str) and len(number) > 2):
            yield "repetition_detection", f"repetition_detection.{name} must be at most 64"


_TOKEN_ID_FIELDS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias")


def token_id_error(values: Mapping[str, Any], vocab_size: int | None) -> tuple[str, str] | None:
    """Return the field with a token id that the model does not have, and a message; None if all ids are valid.

    An engine uses token ids as indices, so an id that is too large crashes the engine. vLLM 0.29 checks only
    the ids of prompts, and only against the tokenizer, which may have more ids than the model has embeddings.

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
            if error := _unknown_id_error("prompt", ids, vocab_size):
                return error
    errors = (_unknown_id_error(field, values.get(field), vocab_size) for field in _TOKEN_ID_FIELDS)
    return next(filter(None, errors), None)


def _unknown_id_error(field: str, ids: Any, vocab_size: int) -> tuple[str, str] | None:
    """Return the error for the first id outside the vocabulary. Values that are not token ids are ignored."""
    if isinstance(ids, dict):  # logit_bias
        ids = [int(key) for key in ids if isinstance(key, int) or (key.isascii() and key.lstrip("-").isdecimal())]
    for token_id in ids if isinstance(ids, list) else ():
        if isinstance(token_id, int) and not 0 <= token_id < vocab_size:
            return field, f"{field} has the token id {token_id}, but the model only has ids 0 to {vocab_size - 1}"
    return None


MAX_BYTES = 65_536  # of a schema, a grammar, or all choices together
MAX_DEPTH = 64  # of nested lists and objects
MAX_PROPERTIES = 1_000  # of all objects together
MAX_OPTIONAL = 200  # optional properties of one object; xgrammar's time grows at least quadratically with their number
MAX_ALTERNATIVES = 2_000  # of all enums, choices and unions together
MAX_REFERENCES = 500  # number of `$ref`
MAX_REPETITIONS = 100_000  # of one element
MAX_PATTERN_BYTES = 8_192

_REPETITION_KEYWORDS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
# The quantifiers are possessive, so that long runs of blanks do not backtrack.
_QUANTIFIER = re.compile(r"\{\s*+(\d++)\s*+(?:,\s*+(\d*+)\s*+)?+\}")


def schema_error(schema: Any) -> str | None:
    """Return why a JSON schema, or a value that contains schemas, exceeds the limits, or None.

    >>> schema_error({"type": "string", "maxLength": 10**9})
    'maxLength is 1,000,000,000; the limit is 100,000'
    """
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        if error := _length_error(text, MAX_BYTES):
            return error
        value = json.loads(schema) if isinstance(schema, str) else schema
    except RecursionError:
        return f"it is nested deeper than {MAX_DEPTH} levels"
    except ValueError:
        return None  # the caller's parser refuses invalid JSON
    return _SchemaSize().error(value)


def pattern_error(pattern: Any) -> str | None:
    """Return why a regular expression exceeds the limits, or None.

    >>> pattern_error("a{3,500000}")
    'it repeats an element 500,000 times; the limit is 100,000'
    """
    if not isinstance(pattern, str):
        return None
    return _length_error(pattern, MAX_PATTERN_BYTES) or _repetition_error(pattern)


def grammar_error(grammar: Any) -> str | None:
    if not isinstance(grammar, str):
        return None
    return _length_error(grammar, MAX_BYTES) or _repetition_error(grammar)


def choice_error(choices: Any) -> str | None:
    if not isinstance(choices, list):
        return None
    if len(choices) > MAX_ALTERNATIVES:
        return f"it has {len(choices):,} alternatives; the limit is {MAX_ALTERNATIVES:,}"
    return _length_error("".join(choice for choice in choices if isinstance(choice, str)), MAX_BYTES)


_CHECKS_BY_KIND = {
    "json": schema_error,
    "structural_tag": schema_error,
    "regex": pattern_error,
    "whitespace_pattern": pattern_error,
    "grammar": grammar_error,
    "choice": choice_error,
}


def constraint_error(body: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first field of an OpenAI request whose constraint exceeds the limits, and why; None if all are fine.

    Tools only count if they constrain the response: `tool_choice` requires a tool, or a tool is strict.
    """
    return next(((field, error) for field, error in _constraint_errors(body) if error is not None), None)


def _constraint_errors(body: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    if isinstance(response_format := body.get("response_format"), dict):
        yield "response_format", schema_error(response_format)
    if isinstance(constraints := body.get("structured_outputs"), dict):
        for kind, error_of in _CHECKS_BY_KIND.items():
            if constraints.get(kind) is not None:
                yield f"structured_outputs.{kind}", error_of(constraints[kind])
    tools = body.get("tools")
    if not isinstance(tools, list):
        return
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    is_strict = any(isinstance(function, dict) and function.get("strict") for function in functions)
    if is_strict or body.get("tool_choice") not in (None, "none", "auto"):
        for index, tool in enumerate(tools):
            yield f"tools[{index}]", schema_error(tool)


def _length_error(text: str, limit: int) -> str | None:
    size = len(text.encode(errors="surrogatepass"))
    return f"it has {size:,} bytes; the limit is {limit:,}" if size > limit else None


def _repetition_error(text: str) -> str | None:
    for minimum, maximum in _QUANTIFIER.findall(text):
        digits = max(minimum, maximum, key=len)
        if len(digits) > len(str(MAX_REPETITIONS)) or int(digits) > MAX_REPETITIONS:
            count_text = f"{int(digits):,}" if len(digits) < 20 else f"{digits[:20]}..."
            return f"it repeats an element {count_text} times; the limit is {MAX_REPETITIONS:,}"
    return None


class _SchemaSize:
    """Counts the properties, alternatives and references of a schema."""

    def __init__(self) -> None:
        self._properties = self._alternatives = self._references = 0

    def error(self, value: Any) -> str | None:
        """Return how the schema exceeds a limit, or None."""
        level = [value] if isinstance(value, dict | list) else []
        for _ in range(MAX_DEPTH + 1):
            if not level:
                return None
            children: list[Any] = []
            for item in level:
                if isinstance(item, dict) and (error := self._object_error(item)):
                    return error
                inner = item.values() if isinstance(item, dict) else item
                children += [child for child in inner if isinstance(child, dict | list)]
            level = children
        return f"it is nested deeper than {MAX_DEPTH} levels"

    def _object_error(self, schema: Mapping[str, Any]) -> str | None:
        self._references += isinstance(schema.get("$ref"), str)
        if self._references > MAX_REFERENCES:
            return f"it has more than {MAX_REFERENCES:,} references"
        unions = [schema.get(name) for name in ("enum", "anyOf", "oneOf", "allOf")]
        self._alternatives += sum(len(union) for union in unions if isinstance(union, list))
        if self._alternatives > MAX_ALTERNATIVES:
            return f"it has {self._alternatives:,} alternatives or more; the limit is {MAX_ALTERNATIVES:,}"
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, dict):
            self._properties += len(properties)
            if self._properties > MAX_PROPERTIES:
                return f"it has {self._properties:,} properties or more; the limit is {MAX_PROPERTIES:,}"
            names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
            if (num_optional := len(properties.keys() - names)) > MAX_OPTIONAL:
                limit = f"the limit is {MAX_OPTIONAL:,}"
                return f"an object has {num_optional:,} optional properties; {limit}; add more of them to `required`"
        for name in _REPETITION_KEYWORDS:
            count = schema.get(name)
            if isinstance(count, int | float) and not isinstance(count, bool) and count > MAX_REPETITIONS:
                return f"{name} is {count:,}; the limit is {MAX_REPETITIONS:,}"
        patterns = (schema.get(name) for name in ("pattern", "regex", "excludes_regex"))
        return next(filter(None, map(pattern_error, patterns)), None)


DEFAULT_MAX_ANSWER_MIB = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """The properties of a response that determine its size. Sizes are upper estimates in bytes of JSON.

    Sizes are limited because the engine's front end, the replica and the ingress each keep a response in memory.

    Attributes:
        num_choices: number of choices of all prompts together.
        prompt_tokens: number of prompt tokens that the response repeats.
        logprobs, prompt_logprobs: log-probabilities per position of a response or a prompt; 0 means none.
        with_ids: whether the response has token ids.
    """

    num_choices: int = 1
    prompt_tokens: int = 0
    logprobs: int = 0
    prompt_logprobs: int = 0
    with_ids: bool = False

    def num_bytes(self, output_tokens: int) -> int:
        """Return the size of the response if each choice has this many tokens."""
        return self._prompt_bytes() + self.num_choices * output_tokens * self._position_bytes(self.logprobs)

    def max_output_tokens(self, num_bytes: int) -> int:
        """Return the tokens per choice that fit into a response of this size; below 1 if no token fits.

        >>> AnswerShape(num_choices=2, logprobs=1).max_output_tokens(2 * 10 * (16 + 128))
        10
        """
        return (num_bytes - self._prompt_bytes()) // (max(1, self.num_choices) * self._position_bytes(self.logprobs))

    def _prompt_bytes(self) -> int:
        return self.prompt_tokens * self._position_bytes(self.prompt_logprobs)

    def _position_bytes(self, logprobs: int) -> int:
        # 16 bytes for the token's text, 128 per log-probability (text, bytes, rank and value), 8 for the token's id.
        return 16 + logprobs * 128 + (8 if self.with_ids else 0)
