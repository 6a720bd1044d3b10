"""Request types of the two model routes: vLLM's types, with every validation error attributed to the client.

vLLM 0.29 has validators that run before types are checked and raise arbitrary Python errors. Fields that pydantic
validates lazily are validated here. The validation of a list stops at its first error: a MiB of invalid messages has
five million errors, which take minutes to collect. Structural tags, which may also take minutes, are compiled next to
the engine (`engine/trials.py`).
"""

from dataclasses import replace
from typing import Annotated, Any

from pydantic import PrivateAttr, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from vllm.entrypoints.chat_utils import ChatCompletionMessageParam
from vllm.entrypoints.generate.base import protocol

from pipelines.online.errors import ApiError, from_exception

_LAZY = ("content", "tool_calls")  # fields of a message that pydantic validates lazily
_MAX_PARTS = 1024  # per message
_LISTS = ("list", "tuple", "set", "frozenset")


def _validate_body(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, Chat | Completion):
        return value
    try:
        return handler(value)
    except ValidationError:
        raise  # already names the invalid field
    except Exception as error:
        refusal = from_exception(error)
        if refusal.status < 500:
            raise refusal from error
        raise ApiError(422, "body: a field has the wrong type", code="invalid_type") from error


def _validate_message(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Validate one message at a time, so that threads can switch between messages."""
    content = value.get("content") if isinstance(value, dict) else None
    if isinstance(content, list) and len(content) > _MAX_PARTS:
        message = f"a message has {len(content)} parts, but at most {_MAX_PARTS} are allowed"
        raise ApiError(400, message, code="invalid_value", param="messages")
    message = handler(value)
    for name in _LAZY:
        if not isinstance(message.get(name), str | list | None):
            message[name] = list(message[name])
    return message


def fail_fast(schema: Any) -> None:
    """Make every list of a pydantic core schema stop at its first error.

    Pydantic's `Field(fail_fast=True)` only works for fields that we declare ourselves.
    """
    if isinstance(schema, dict):
        if schema.get("type") in _LISTS:
            schema["fail_fast"] = True
        for part in schema.values():
            fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            fail_fast(part)


def skip_tag_validation() -> None:
    """Disable the compilation of structural tags in vLLM's request types."""
    protocol.validate_structural_tag_payload = _accept


def _accept(payload: Any, *, parameter: str) -> None: ...


skip_tag_validation()


class Chat(ChatCompletionRequest):  # type: ignore[misc]  # Ray's classes are untyped
    """A chat whose output tokens can be capped if the client gave no limit."""

    messages: list[Annotated[ChatCompletionMessageParam, WrapValidator(_validate_message)]]
    _is_capped: bool = PrivateAttr(default=False)

    def cap(self, tokens: int) -> None:
        """Limit the output tokens to this number and to the rest of the context."""
        self.max_completion_tokens = tokens
        self._is_capped = True

    def build_tok_params(self, model_config: Any) -> Any:
        """Return vLLM's parameters for the check of the prompt's length, without reserving room for the cap.

        vLLM reserves room for all requested output tokens. A cap was not requested; after this check, vLLM uses the
        rest of the context as if there were no limit.
        """
        params = super().build_tok_params(model_config)
        return replace(params, max_output_tokens=0) if self._is_capped else params


class Completion(CompletionRequest):  # type: ignore[misc]  # Ray's classes are untyped
    ...


for _kind in (Chat, Completion):
    fail_fast(_kind.__pydantic_core_schema__)

ChatBody = Annotated[Chat, WrapValidator(_validate_body)]
CompletionBody = Annotated[Completion, WrapValidator(_validate_body)]
