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
        column: the column with a row's own parameters, if there is one.
        limits: the engine's limits.
    """

    base: Mapping[str, Any]
    column: str | None = None
    limits: SamplingLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt, and the parameters in which the row differs from the run."""

    prompt_token_ids: list[int]
    sampling: dict[str, Any] = field(default_factory=dict)


class RequestBuilder:
    """Convert rows to requests."""

    def __init__(self, prompts: PromptBuilder, sampling: SamplingSpec) -> None:
        self._prompts = prompts
        self.sampling = sampling

    def build(self, columns: Mapping[str, Any]) -> Request | RowError:
        if self._prompts.spec.body_column is not None:
            return self._from_body(columns)
        column = self.sampling.column
        own = {} if column is None else parse_overrides(columns.get(column))
        if isinstance(own, str):
            return _invalid(f"column {column!r}: {own}")
        return self._request(self._prompts.build(columns), own)

    def _from_body(self, columns: Mapping[str, Any]) -> Request | RowError:
        body = parse_body(columns["url"], columns[self._prompts.spec.body_column or ""])
        if isinstance(body, str):
            return _invalid(body)
        return self._request(self._prompts.of_body(body), body.sampling)

    def _request(self, prompt: list[int] | RowError, own: dict[str, Any]) -> Request | RowError:
        if "structured_outputs" in own:  # replaces the run's schema
            own = {"json_schema": None, **own}
        if own and (wrong := conflict({**self.sampling.base, **own}, self.sampling.limits)):
            return _invalid(wrong)
        if isinstance(prompt, RowError):
            return prompt
        if unknown := token_id_error({"prompt": prompt}, self.sampling.limits.vocab_size):
            return RowError(reason="invalid_prompt", message=unknown[1])
        return Request(prompt_token_ids=prompt, sampling=own)


def _invalid(message: str) -> RowError:
    return RowError(reason="invalid", message=message)
