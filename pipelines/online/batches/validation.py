"""Validation of a batch's input file before anything is spent on it.

Each request is checked like a request to the routes. Errors that only an engine can detect end up in the error file.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from peagle.corpus.lines import Lines
from peagle.corpus.text import envelope_error
from peagle.errors import InputError, shown
from peagle.plain_json import HalfSurrogate, from_json
from pipelines.online.errors import ApiError
from pipelines.online.gateway.admission import ServedModel, check_request
from pipelines.online.gateway.keys import KeyRecord

MAX_REQUESTS = 50_000  # OpenAI's own limit
_MAX_ERRORS = 100
_MAX_MESSAGE_CHARS = 400  # per error message, which may contain text from the client


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """The limits and settings that a batch's requests are checked against."""

    endpoint: str
    key: KeyRecord
    models: Sequence[ServedModel]
    max_output_tokens: int | None = None
    max_line_bytes: int = 1 << 20  # per request; parsed JSON takes many times that memory


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedInput:
    """The result of the validation."""

    num_requests: int = 0
    model: str | None = None
    # prompt_tokens, output_tokens: sums of the requests' upper bounds
    prompt_tokens: int = 0
    output_tokens: int = 0
    # OpenAI's error objects (code, message, param, line); the batch fails if there are any
    errors: tuple[dict[str, Any], ...] = field(default_factory=tuple)


class _FileError(ApiError):
    """An error in the file or in a line's envelope, not in the body of a request."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(400, message, code=code, param=param)


def check_input(path: str, rules: BatchRules) -> CheckedInput:
    """Validate the file. Stops after 100 errors."""
    validator = _Validator(rules)
    try:
        with contextlib.closing(Lines(path)) as lines:
            for line_number, line in enumerate(lines, start=1):
                if line.strip():
                    validator.add_line(line_number, line)
                if len(validator.errors) >= _MAX_ERRORS:
                    break
    except InputError as error:
        message = error.message.replace(f"input {path}", "the file").replace(path, "it")
        validator.add_error(None, _FileError("invalid_file", message))
    except _FileError as error:
        validator.add_error(None, error)
    if not validator.num_requests and not validator.errors:
        validator.add_error(None, _FileError("empty_file", "the file has no requests"))
    return CheckedInput(
        num_requests=validator.num_requests,
        model=validator.model,
        prompt_tokens=validator.prompt_tokens,
        output_tokens=validator.output_tokens,
        errors=tuple(validator.errors),
    )


class _Validator:
    def __init__(self, rules: BatchRules) -> None:
        self._rules = rules
        self._models = {model.name: model for model in rules.models}
        self._line_by_custom_id: dict[str, int] = {}
        self.num_requests = self.prompt_tokens = self.output_tokens = 0
        self.model: str | None = None
        self.errors: list[dict[str, Any]] = []

    def add_line(self, line_number: int, line: bytes) -> None:
        if self.num_requests == MAX_REQUESTS:
            raise _FileError("too_many_requests", f"a batch may have at most {MAX_REQUESTS:,} requests")
        self.num_requests += 1
        try:
            self._check_line(line_number, line)
        except ApiError as error:
            self.add_error(line_number, error)
        except RecursionError:
            self.add_error(line_number, _FileError("invalid_json_line", "this line is nested too deeply"))

    def add_error(self, line_number: int | None, error: ApiError) -> None:
        message, param = error.message, error.param
        if len(message) > _MAX_MESSAGE_CHARS:
            message = message[:_MAX_MESSAGE_CHARS] + "..."
        if param and not isinstance(error, _FileError):
            param = f"body.{param}"
        self.errors.append({"code": error.code, "message": message, "param": param, "line": line_number})

    def _check_line(self, line_number: int, line: bytes) -> None:
        if len(line) > self._rules.max_line_bytes:
            message = f"this line has {len(line)} bytes, but at most {self._rules.max_line_bytes} are allowed"
            raise _FileError("line_too_large", message)
        request = _parse_line(line)
        if error := envelope_error(request):
            raise _FileError("invalid_request", error)
        custom_id, url = request["custom_id"], request["url"]
        if custom_id in self._line_by_custom_id:
            message = f"custom_id {shown(custom_id)} is already used on line {self._line_by_custom_id[custom_id]}"
            raise _FileError("duplicate_custom_id", message, "custom_id")
        self._line_by_custom_id[custom_id] = line_number
        if url != self._rules.endpoint:
            raise _FileError(
                "mismatched_endpoint", f"url is {shown(url)}, but the batch is for {self._rules.endpoint}", "url"
            )
        body = json.dumps(request["body"]).encode()
        rules = self._rules
        checked = check_request(url, body, rules.key, self._models, max_output_tokens=rules.max_output_tokens)
        self.prompt_tokens += checked.prompt_tokens
        self.output_tokens += checked.output_tokens
        self.model = self.model or checked.model.name
        if checked.model.name != self.model:
            raise _FileError(
                "mismatched_model",
                f"all requests must use the same model: earlier lines {self.model}, this line {checked.model.name}",
                "body.model",
            )


def _parse_line(line: bytes) -> dict[str, Any]:
    try:
        request = from_json(line)
    except HalfSurrogate as error:
        raise _FileError("invalid_json_line", f"this line is not valid JSON: {error}") from None
    except (ValueError, RecursionError):
        raise _FileError("invalid_json_line", "this line is not valid JSON") from None
    if not isinstance(request, dict):
        raise _FileError("invalid_json_line", "this line is not a JSON object")
    return request
