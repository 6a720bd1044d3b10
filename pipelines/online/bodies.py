"""The bodies of the two model routes: vLLM's own types, whose every failure on a client's values is that client's.

vLLM 0.29 checks bodies in validators that meet values before these have types, and then raise whatever Python does
(`'list' object has no attribute 'get'`); none of that is a fault of the server. Lists that pydantic would check only
when they are read are read here. A chat may be given a cap on its output tokens, which vLLM itself does not know.
"""

from dataclasses import replace
from typing import Annotated, Any

from pydantic import PrivateAttr, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
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


class Chat(ChatCompletionRequest):  # type: ignore[misc]  # Ray's classes are untyped
    """A chat whose output tokens may be capped by the endpoint, where the client named no number."""

    _is_capped: bool = PrivateAttr(default=False)

    def cap(self, tokens: int) -> None:
        """Give it as many output tokens as its prompt leaves of the context, and no more than these."""
        self.max_completion_tokens = tokens
        self._is_capped = True

    def build_tok_params(self, model_config: Any) -> Any:
        """vLLM's check of the prompt's length, which keeps room for all output tokens that were asked for. Nobody asked
        for a cap; after this check vLLM gives what the prompt leaves, as where no number is named."""
        params = super().build_tok_params(model_config)
        return replace(params, max_output_tokens=0) if self._is_capped else params


ChatBody = Annotated[Chat, WrapValidator(_checked)]
CompletionBody = Annotated[CompletionRequest, WrapValidator(_checked)]
