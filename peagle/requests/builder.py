"""Build a request (prompt token ids and sampling parameters) from a row, or return why it is invalid."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from peagle.requests.bounds import token_id_error
from peagle.requests.openai import parse_body
from peagle.requests.prompts import PromptBuilder, RowError
from peagle.requests.sampling import SamplingLimits, conflict, parse_overrides


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """The sources of a request's sampling parameters.

    Attributes:
        base: the run's parameters.
        column: the column with a row's own parameters, or None.
        limits: the engine's limits.
        has_tool_parser, has_parser: whether a parser for tool calls, or any parser, is configured.
    """

    base: Mapping[str, Any]
    column: str | None = None
    limits: SamplingLimits
    has_tool_parser: bool = False
    has_parser: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt, the row's own sampling parameters, and the request's fields that vLLM's parsers use."""

    prompt_token_ids: list[int]
    sampling: dict[str, Any] = field(default_factory=dict)
    parsing: dict[str, Any] | None = None


class RequestBuilder:
    """Converts rows to requests."""

    def __init__(self, prompts: PromptBuilder, sampling: SamplingSpec) -> None:
        self._prompts = prompts
        self.sampling = sampling

    def build(self, columns: Mapping[str, Any]) -> Request | RowError:
        body_column, sampling_column = self._prompts.spec.body_column, self.sampling.column
        spec = self.sampling
        parsing: dict[str, Any] | None = {} if spec.has_parser and self._prompts.spec.chat else None
        if body_column is not None:
            body = parse_body(
                columns["url"], columns[body_column], has_tool_parser=spec.has_tool_parser, has_parser=spec.has_parser
            )
            if isinstance(body, str):
                return _invalid(body)
            prompt, overrides, parsing = self._prompts.build_from_body(body), body.sampling, body.parsing
        else:
            parsed = {} if sampling_column is None else parse_overrides(columns.get(sampling_column))
            if isinstance(parsed, str):
                return _invalid(f"column {sampling_column!r}: {parsed}")
            prompt, overrides = self._prompts.build(columns), parsed
        if "structured_outputs" in overrides:  # replaces the run's schema
            overrides = {"json_schema": None, **overrides}
        if overrides and (error := conflict({**self.sampling.base, **overrides}, self.sampling.limits)):
            return _invalid(error)
        if spec.has_parser and {**spec.base, **overrides}.get("n", 1) > 1:
            return _invalid("n: must be 1 with a tool_call_parser or reasoning_parser")
        if isinstance(prompt, RowError):
            return prompt
        if id_error := token_id_error({"prompt": prompt}, self.sampling.limits.vocab_size):
            return RowError(reason="invalid_prompt", message=id_error[1])
        return Request(prompt_token_ids=prompt, sampling=overrides, parsing=parsing)


def _invalid(message: str) -> RowError:
    return RowError(reason="invalid", message=message)
