"""Sampling parameters of runs and rows, and checks that an engine supports their combination."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field, field_validator

from peagle.errors import did_you_mean, shown
from peagle.plain_json import from_json
from peagle.requests.bounds import (
    DEFAULT_MAX_ANSWER_MIB,
    AnswerShape,
    bounds_error,
    constraint_error,
    schema_error,
    token_id_error,
)

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")  # of `structured_outputs`
_CONSTRAINT_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_REPETITION_FIELDS = ("max_pattern_size", "min_pattern_size", "min_count")
MAX_LOGPROBS = 20  # vLLM's own limit, and OpenAI's


class SamplingOptions(BaseModel):
    """The sampling parameters of a run. `RequestSampling` extends them for rows."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    temperature: float = Field(0.0, ge=0, le=2, description="0 is greedy, and exactly reproducible")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling")
    top_k: int = Field(0, ge=-1, description="0 (or -1, as in vLLM) keeps all tokens")
    min_p: float = Field(0.0, ge=0, le=1, description="minimum probability, relative to that of the most likely token")
    max_tokens: int = Field(256, ge=1, description="maximum response length in tokens")
    stop: list[str] = Field(default_factory=list, description="strings that end a response")
    seed: int | None = Field(
        None, ge=0, lt=2**31, description="makes sampling reproducible; applies to each row separately"
    )
    n: int = Field(1, ge=1, le=128, description="responses per prompt; more than one needs a temperature above 0")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="return log-probabilities of each token and of the N most likely tokens at its position",
    )
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="penalty on tokens that already occur")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="penalty on tokens by their number of occurrences")
    repetition_penalty: float = Field(
        1.0, gt=0, le=10, description="penalty factor on tokens that already occur, including in the prompt; 1 is off"
    )
    json_schema: str | None = Field(None, description="JSON schema for every response: a file, or the schema itself")
    ignore_eos: bool = Field(False, description="always generate max_tokens (for measuring)")

    @field_validator("top_k")
    @classmethod
    def _normalise_top_k(cls, value: int) -> int:
        return max(value, 0)

    @field_validator("stop", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("an empty string cannot be a stop string")
        return value

    @field_validator("json_schema", mode="before")
    @classmethod
    def _schema_as_text(cls, value: Any) -> Any:
        return json.dumps(value) if isinstance(value, dict) else value

    @field_validator("json_schema")
    @classmethod
    def _valid_schema(cls, value: str | None) -> str | None:
        if value is not None and (error := _schema_error(value)):
            raise ValueError(error)
        return value


SAMPLING_KEYS = tuple(SamplingOptions.model_fields)


class RequestSampling(SamplingOptions):
    """The parameters of one request."""

    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    min_tokens: int = Field(0, ge=0)
    bad_words: list[str] = Field(default_factory=list)
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    repetition_detection: dict[str, int] | None = None
    structured_outputs: dict[str, Any] | None = None

    @field_validator("logit_bias")
    @classmethod
    def _names_are_token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or ():
            if not (key.isascii() and key.isdecimal()):
                raise ValueError(f"{shown(key)} is not a token id")
        return value

    @field_validator("repetition_detection")
    @classmethod
    def _names_are_known(cls, value: dict[str, int] | None) -> dict[str, int] | None:
        if unknown := sorted(set(value or ()) - set(_REPETITION_FIELDS)):
            raise ValueError(f"unknown {shown(unknown[0])}: {did_you_mean(unknown[0], _REPETITION_FIELDS)}")
        return value

    @field_validator("structured_outputs")
    @classmethod
    def _single_constraint(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        names = {name for name, constraint in (value or {}).items() if constraint is not None}
        valid = (*_CONSTRAINTS, *_CONSTRAINT_OPTIONS)
        if unknown := sorted(names.difference(valid)):
            raise ValueError(f"unknown {shown(unknown[0])}: {did_you_mean(unknown[0], valid)}")
        if value is not None and len(names.intersection(_CONSTRAINTS)) != 1:
            raise ValueError(f"requires exactly one of {', '.join(_CONSTRAINTS)}")
        if error := constraint_error({"structured_outputs": value}):
            raise ValueError(error[1])
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """Limits of an engine, in addition to the limits of the fields.

    Attributes:
        has_drafter: whether the engine drafts for every request. Such an engine supports neither `logit_bias` nor
            `min_p`.
        can_seed: whether the engine supports a sampling seed.
        vocab_size: number of token ids of the model; None if unknown.
        max_answer_bytes: limit for one row's responses, as estimated by `AnswerShape`.
    """

    max_model_len: int
    has_drafter: bool = False
    can_seed: bool = True
    vocab_size: int | None = None
    max_answer_bytes: int = DEFAULT_MAX_ANSWER_MIB * 2**20


def conflict(sampling: Mapping[str, Any], limits: SamplingLimits) -> str | None:
    """Return why an engine cannot use these parameters together, or None.

    >>> conflict({"n": 2, "temperature": 0.0, "max_tokens": 8}, SamplingLimits(max_model_len=100))
    'n: 2 responses require a temperature above 0: greedy responses are identical'
    """
    is_greedy = sampling.get("temperature", 0) == 0
    if sampling["max_tokens"] > limits.max_model_len:
        return f"max_tokens: {sampling['max_tokens']} exceeds the context of {limits.max_model_len} tokens"
    if sampling.get("n", 1) > 1 and is_greedy:
        return f"n: {sampling['n']} responses require a temperature above 0: greedy responses are identical"
    if sampling.get("min_p", 0) > 0 and limits.has_drafter:
        return "min_p: not supported by vLLM on a GPU with a drafter; use top_p, or drafter: none"
    if sampling.get("logit_bias") and limits.has_drafter:
        return "logit_bias: not supported by vLLM on a GPU with a drafter; use drafter: none"
    if sampling.get("min_tokens", 0) > sampling["max_tokens"]:
        return f"min_tokens: {sampling['min_tokens']} exceeds max_tokens, {sampling['max_tokens']}"
    if sampling.get("json_schema") is not None and sampling.get("structured_outputs") is not None:
        return "structured_outputs: cannot be combined with json_schema and response_format"
    # vLLM 0.29 rewinds a seeded request's generator when it prefills in chunks, which CPU generators do not support.
    if sampling.get("seed") is not None and not is_greedy and not limits.can_seed:
        return "seed: vLLM on CPU crashes with seeded sampling ('CPU Generator does not use offset'); leave it out"
    if error := token_id_error(sampling, limits.vocab_size):
        return error[1]
    num_logprobs = sampling.get("logprobs")
    shape = AnswerShape(num_choices=sampling.get("n", 1), logprobs=0 if num_logprobs is None else 1 + num_logprobs)
    num_bytes = shape.num_bytes(sampling["max_tokens"])
    if num_bytes <= limits.max_answer_bytes:
        return None
    return (
        f"n, max_tokens, logprobs: the response might have up to {num_bytes / 2**20:,.1f} MiB; the limit is "
        f"{limits.max_answer_bytes / 2**20:,.0f} MiB"
    )


def parse_overrides(values: Any) -> dict[str, Any] | str:
    """Return a row's own parameters, or an error message. Null counts as not set.

    Args:
        values: an object or its JSON text; None and empty text (CSV) mean no parameters.
    """
    try:
        return _overrides(values)
    except RecursionError:  # in the JSON parser, the validation or the message
        return "nested too deeply"


def _overrides(values: Any) -> dict[str, Any] | str:
    if values == "":
        return {}
    if isinstance(values, str):
        try:
            values = json.loads(values)
        except ValueError as error:
            return f"not valid JSON: {error}"
    if values is None:
        return {}
    if not isinstance(values, dict):
        return f"a {type(values).__name__}, not an object of parameters"
    set_values = {key: value for key, value in values.items() if value is not None}
    if limit_error := bounds_error(set_values):
        return f"{limit_error[0]}: {limit_error[1]}"
    try:
        model = RequestSampling.model_validate(set_values, strict=True)
    except pydantic.ValidationError as invalid:
        first_error = invalid.errors()[0]
        name = ".".join(map(str, first_error["loc"]))
        if first_error["type"] == "extra_forbidden":
            return f"unknown parameter {shown(name)}: {did_you_mean(name, RequestSampling.model_fields)}"
        if first_error["type"] == "value_error":
            return f"{name}: {first_error['msg'].removeprefix('Value error, ')}"
        return f"{name}: {first_error['msg']}, not {shown(first_error['input'])}"
    return {key: getattr(model, key) for key in set_values}


@functools.lru_cache(maxsize=64)
def _schema_error(text: str) -> str | None:
    import jsonschema

    if limit_error := schema_error(text):
        return limit_error
    try:
        schema = from_json(text)
    except (ValueError, RecursionError) as error:
        return f"not valid JSON: {error}"
    if not isinstance(schema, dict):
        return f"a JSON {type(schema).__name__}, not a schema"
    try:
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except jsonschema.SchemaError as error:
        return f"not a valid JSON schema: at {error.json_path}: {error.message}"
    except Exception as error:  # jsonschema fails on a "$schema" that is not text, and on deep nesting
        return f"not a valid JSON schema: {error}"
    return None
