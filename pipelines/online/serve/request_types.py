"""The bodies of the two model routes: vLLM's types with clients' faults.

Every failure on a client's values is that client's.

vLLM 0.29 checks bodies in validators that meet values before these have types, and then raise whatever Python does
(`'list' object has no attribute 'get'`); none of that is a fault of the server. Lists that pydantic would check only
when they are read are read here. Of a list its first fault is told: a mebibyte of messages that are none has five
million, which take minutes. A chat may be given a cap on its output tokens, which vLLM itself does not know. A
structural tag, which vLLM would compile here, is compiled on trial beside its engine alone (`engine/trials.py`): some
of a hundred bytes take minutes, and every stream of the endpoint would wait.
"""

from dataclasses import replace
from typing import Annotated, Any

from pydantic import PrivateAttr, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from vllm.entrypoints.chat_utils import ChatCompletionMessageParam
from vllm.entrypoints.generate.base import protocol

from pipelines.online.errors import ApiError
from pipelines.online.serve.exceptions import from_exception

_LAZY = ("content", "tool_calls")  # of a message
_MOST_PARTS = 1024  # of a message
_LISTS = ("list", "tuple", "set", "frozenset")


def _checked(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, Chat | Completion):
        return value
    try:
        return handler(value)
    except ValidationError:
        raise  # it says where
    except Exception as error:
        refusal = from_exception(error)
        if refusal.status < 500:
            raise refusal from error
        raise ApiError(422, "body: a field has the wrong type", code="invalid_type") from error


def _message(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """One message, by itself: threads take turns between two of them."""
    content = value.get("content") if isinstance(value, dict) else None
    if isinstance(content, list) and len(content) > _MOST_PARTS:
        message = f"a message has {len(content)} parts, and may have {_MOST_PARTS}"
        raise ApiError(400, message, code="invalid_value", param="messages")
    message = handler(value)
    for name in _LAZY:
        if not isinstance(message.get(name), str | list | None):
            message[name] = list(message[name])
    return message


def fail_fast(schema: Any) -> None:
    """Have every list of a pydantic core schema stop at its first fault.

    Pydantic has this for a field of one's own (`Field(fail_fast=True)`), not for a type of somebody else's.
    """
    if isinstance(schema, dict):
        if schema.get("type") in _LISTS:
            schema["fail_fast"] = True
        for part in schema.values():
            fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            fail_fast(part)


def leave_tags_to_trials() -> None:
    """Have vLLM's request types take a structural tag without compiling it."""
    protocol.validate_structural_tag_payload = _take


def _take(payload: Any, *, parameter: str) -> None:
    """In place of vLLM's check."""


leave_tags_to_trials()


class Chat(ChatCompletionRequest):  # type: ignore[misc]  # Ray's classes are untyped
    """A chat whose output tokens the endpoint may cap.

    Only where the client named no number.
    """

    messages: list[Annotated[ChatCompletionMessageParam, WrapValidator(_message)]]
    _is_capped: bool = PrivateAttr(default=False)

    def cap(self, tokens: int) -> None:
        """Cap its output tokens by these and by the rest of the context."""
        self.max_completion_tokens = tokens
        self._is_capped = True

    def build_tok_params(self, model_config: Any) -> Any:
        """vLLM's check of the prompt's length, without room for a cap.

        It keeps room for all output tokens that were asked for. Nobody asked for a cap; after this check vLLM gives
        what the prompt leaves, as where no number is named.
        """
        params = super().build_tok_params(model_config)
        return replace(params, max_output_tokens=0) if self._is_capped else params


class Completion(CompletionRequest):  # type: ignore[misc]  # Ray's classes are untyped
    """A completion."""


for _kind in (Chat, Completion):
    fail_fast(_kind.__pydantic_core_schema__)

ChatBody = Annotated[Chat, WrapValidator(_checked)]
CompletionBody = Annotated[Completion, WrapValidator(_checked)]
