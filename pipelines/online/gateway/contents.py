"""Validation of a request's contents (text, media, lists, constraints) and of the size of its answer.

Rejects everything that would make an engine fetch, execute or render data for a client.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from peagle.requests.bounds import AnswerShape, bounds_error, request_error
from peagle.requests.messages import message_error
from peagle.requests.openai import template_error
from peagle.requests.sampling import MAX_LOGPROBS
from pipelines.online.errors import ApiError

MODALITIES = {"image": ("image_url", "input_image"), "audio": ("audio_url", "input_audio"), "video": ("video_url",)}
_TEXT_PARTS = ("text", "input_text", "output_text", "thinking", "refusal", "tool_reference")
# vLLM infers the type of an untyped part from these. A uuid refers to media that another client may have sent.
_MEDIA_KEYS = (
    *("image_url", "input_image", "audio_url", "input_audio", "video_url"),
    *("image_pil", "image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "uuid", "file"),
)


def check_contents(
    values: Mapping[str, Any], *, max_messages: int, media: Mapping[str, int], media_domains: frozenset[str]
) -> None:
    """Refuse contents that engines must not receive.

    Args:
        max_messages: each message needs at least one token of the context.
        media: maximum items per request of each modality; others are refused.
        media_domains: hosts from which engines may fetch media; if empty, only data: URLs are accepted.

    Raises:
        ApiError: 400, with the invalid field.
    """
    kwargs = values.get("chat_template_kwargs")
    if kwargs is not None and (refused := template_error(kwargs)):
        raise ApiError(
            400, f"chat_template_kwargs: {refused}", code="unsupported_parameter", param="chat_template_kwargs"
        )
    _check_lists(values, max_messages)
    _check_messages(values.get("messages"))
    _check_media(values, media, media_domains)
    if wrong := request_error(values):
        field, reason = wrong
        raise ApiError(400, f"{field}: {reason}", code="constraint_too_large", param=field)


def _check_lists(values: Mapping[str, Any], max_messages: int) -> None:
    messages = values.get("messages")
    if isinstance(messages, list) and len(messages) > max_messages:
        message = f"messages has {len(messages):,} entries, and may have {max_messages:,}"
        raise ApiError(400, message, code="invalid_value", param="messages")
    if wrong := bounds_error(values):
        field, message = wrong
        raise ApiError(400, message, code="invalid_value", param=field)


def _check_messages(messages: Any) -> None:
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict) and isinstance(message.get("role"), str) and (wrong := message_error(message)):
            raise ApiError(400, f"messages[{index}]: {wrong}", code="invalid_value", param="messages")


def _check_media(values: Mapping[str, Any], media: Mapping[str, int], domains: frozenset[str]) -> None:
    counts = dict.fromkeys(MODALITIES, 0)
    for where, part in _parts(values.get("messages")):
        kind = part.get("type")
        modality = next((name for name, kinds in MODALITIES.items() if kind in kinds), None)
        is_plain = not any(part.get(name) is not None for name in _MEDIA_KEYS)
        if modality is None and is_plain and kind in _TEXT_PARTS:
            continue
        allowed = media.get(modality, 0) if modality is not None and part.get("uuid") is None else 0
        if modality is None or not allowed:
            taken = ", ".join(["text", *(name for name, most in media.items() if most)])
            message = f"{where} is {_shown(kind)}, but this model only takes {taken}"
            raise ApiError(400, message, code="unsupported_content", param="messages")
        counts[modality] += 1
        if counts[modality] > allowed:
            message = f"the request has more than {allowed} of {modality}"
            raise ApiError(400, message, code="too_many_media", param="messages")
        for url in _urls(part):
            _check_url(url, where, domains)


def _check_url(url: str, where: str, domains: frozenset[str]) -> None:
    if url[:5].lower() == "data:":
        return
    try:
        split = urlsplit(url)
        host = split.hostname
    except ValueError:
        host = None
    if host is None or split.scheme not in ("http", "https") or host not in domains:
        allowed = f"a data: URL, or one from {', '.join(sorted(domains))}" if domains else "a data: URL"
        raise ApiError(400, f"{where}: its URL must be {allowed}", code="media_not_allowed", param="messages")


def _parts(messages: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict):
                yield f"messages[{index}].content[{number}]", part


def _urls(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield all URLs of a part. Which one vLLM uses depends on the part's type."""
    for name in ("image_url", "audio_url", "video_url"):
        value = part.get(name)
        value = value.get("url") if isinstance(value, dict) else value
        if value is not None:
            yield str(value)


def _shown(kind: Any) -> str:
    return f"of type {kind[:40]!r}" if isinstance(kind, str) else "of no type that is known"


TEMPLATE_TOKENS = 1_024  # upper bound of what a chat template adds; the longest known ones add a few hundred


def answer_shape(
    values: Mapping[str, Any], num_body_bytes: int, *, is_chat: bool, max_model_len: int, num_choices: int
) -> AnswerShape:
    """Return how the size of the answer grows with its tokens. A text prompt has at most one token per byte."""
    asks_logprobs, repeats = values.get("logprobs"), bool(values.get("echo"))
    if is_chat:
        logprobs = 1 + max(_count(values.get("top_logprobs")), _length(values.get("logprob_token_ids")))
        logprobs = logprobs if asks_logprobs else 0
    else:
        logprobs = (
            0 if asks_logprobs is None else 1 + max(_count(asks_logprobs), _length(values.get("logprob_token_ids")))
        )
    requested = values.get("prompt_logprobs")
    # vLLM always returns prompt logprobs for a chat with `echo`.
    prompt_logprobs = 1 + _count(requested) if requested is not None else max(logprobs, int(is_chat)) * repeats
    with_ids = bool(values.get("return_token_ids"))
    comes_back = repeats or prompt_logprobs or with_ids or values.get("return_prompt_text")
    most = num_body_bytes + TEMPLATE_TOKENS
    lengths = [most] if is_chat else [_prompt_length(prompt) for prompt in _prompts(values.get("prompt"))]
    each = num_choices // max(1, len(lengths))
    return AnswerShape(
        num_choices=num_choices,
        prompt_tokens=sum(min(length, max_model_len) for length in lengths) * each if comes_back else 0,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        with_ids=with_ids,
    )


def limit_output_tokens(shape: AnswerShape, max_bytes: int | None, *, requested: int | None, tokens: int) -> int:
    """Return the maximum output tokens of one choice, so that the answer stays within `max_bytes`.

    Args:
        max_bytes: of the whole answer; None is unlimited.
        requested: the request's own max_tokens, which is refused rather than lowered.
        tokens: the limit from other rules.

    Raises:
        ApiError: 400, the answer could be too large.
    """
    if max_bytes is None:
        return tokens
    room = shape.most_output_tokens(max_bytes)
    if room < 1 or (requested or 0) > room:
        message = (
            f"the answer could have {shape.num_bytes(max(requested or 0, 1)) / 2**20:,.1f} MiB (choices, tokens and "
            f"logprobs), but at most {max_bytes / 2**20:,.1f} are allowed; request less, or send several requests"
        )
        raise ApiError(400, message, code="answer_too_large")
    return min(tokens, room)


def _prompts(prompt: Any) -> list[Any]:
    is_one = not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int)
    return [prompt] if is_one else prompt


def _prompt_length(prompt: Any) -> int:
    if isinstance(prompt, str):
        return len(prompt.encode(errors="replace")) + 1  # + 1 for the BOS token
    return _length(prompt)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def _count(value: Any) -> int:
    """Return a count as pydantic would parse it. Negative values and values above vLLM's limit become the limit."""
    try:
        number = int(value or 0)
    except (TypeError, ValueError, OverflowError):
        return 0
    return number if 0 <= number <= MAX_LOGPROBS else MAX_LOGPROBS
