"""The bodies of the two model routes: vLLM's own types, whose every failure on a client's values is that client's.

vLLM 0.29 checks bodies in validators that meet values before these have types, and then raise whatever Python does
(`'list' object has no attribute 'get'`); none of that is a fault of the server. Lists that pydantic would check only
when they are read are read here.
"""

from typing import Annotated, Any

from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest

from pipelines.online.errors import ApiError, from_exception

_LAZY = ("content", "tool_calls")  # of a message


def _checked(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    try:
        request = handler(value)
        for message in getattr(request, "messages", ()):
            _read_lists(message)
    except ValidationError:
        raise  # it says where
    except Exception as error:
        refusal = from_exception(error)
        if refusal.status < 500:
            raise refusal from error
        raise ApiError(422, "body: a field has the wrong type", code="invalid_type") from error
    return request


def _read_lists(message: Any) -> None:
    for name in _LAZY:
        if not isinstance(message.get(name), str | list | None):
            message[name] = list(message[name])


ChatBody = Annotated[ChatCompletionRequest, WrapValidator(_checked)]
CompletionBody = Annotated[CompletionRequest, WrapValidator(_checked)]
