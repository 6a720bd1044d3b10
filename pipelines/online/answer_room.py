"""How large the answer to a request may become, and how many tokens there is room for. Pure: a body's values in."""

from collections.abc import Mapping
from typing import Any

from peagle.answer_size import AnswerShape
from peagle.sampling import MAX_LOGPROBS
from pipelines.online.errors import ApiError

_TEMPLATE_TOKENS = 1_024  # that a chat template may add to what the body says


def answer_shape(
    values: Mapping[str, Any], num_body_bytes: int, *, is_chat: bool, max_model_len: int, num_choices: int
) -> AnswerShape:
    """How an answer to this request grows; a prompt that is text has no more tokens than bytes."""
    asks_logprobs, repeats = values.get("logprobs"), bool(values.get("echo"))
    if is_chat:
        logprobs = 1 + max(_count(values.get("top_logprobs")), _length(values.get("logprob_token_ids")))
        logprobs = logprobs if asks_logprobs else 0
    else:
        logprobs = (
            0 if asks_logprobs is None else 1 + max(_count(asks_logprobs), _length(values.get("logprob_token_ids")))
        )
    asked = values.get("prompt_logprobs")
    # vLLM gives a chat with `echo` those of its prompt, whether it wants any or not.
    prompt_logprobs = 1 + _count(asked) if asked is not None else max(logprobs, int(is_chat)) * repeats
    with_ids = bool(values.get("return_token_ids"))
    comes_back = repeats or prompt_logprobs or with_ids or values.get("return_prompt_text")
    most = num_body_bytes + _TEMPLATE_TOKENS
    lengths = [most] if is_chat else [_prompt_length(prompt) for prompt in _prompts(values.get("prompt"))]
    each = num_choices // max(1, len(lengths))
    return AnswerShape(
        num_choices=num_choices,
        prompt_tokens=sum(min(length, max_model_len) for length in lengths) * each if comes_back else 0,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        with_ids=with_ids,
    )


def within_room(shape: AnswerShape, most_bytes: int | None, *, asked: int | None, tokens: int) -> int:
    """Output tokens of one choice for which an answer has room.

    Args:
        most_bytes: of the answer; None is without limit.
        asked: the number that the request names. It is not lowered.
        tokens: the request's, where nothing else limits them.

    Raises:
        ApiError: 400, the answer could be too large.
    """
    if most_bytes is None:
        return tokens
    room = shape.most_output_tokens(most_bytes)
    if room < 1 or (asked or 0) > room:
        message = (
            f"the answer could have {shape.num_bytes(max(asked or 0, 1)) / 2**20:,.1f} MiB, by its choices, tokens and "
            f"log-probabilities, and may have {most_bytes / 2**20:,.1f}; ask for less, or send several requests"
        )
        raise ApiError(400, message, code="answer_too_large")
    return min(tokens, room)


def _prompts(prompt: Any) -> list[Any]:
    is_one = not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int)
    return [prompt] if is_one else prompt


def _prompt_length(prompt: Any) -> int:
    if isinstance(prompt, str):
        return len(prompt.encode(errors="replace")) + 1  # and the token that begins a text
    return _length(prompt)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def _count(value: Any) -> int:
    """As pydantic would take it; -1 is the whole vocabulary, which vLLM refuses beyond its own limit."""
    try:
        number = int(value or 0)
    except (TypeError, ValueError, OverflowError):
        return 0
    return number if 0 <= number <= MAX_LOGPROBS else MAX_LOGPROBS
