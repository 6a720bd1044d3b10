"""Contents of a request: text, media, lists, constraints; room for its answer.

Nothing that the engine's side would fetch, run or render for a client passes here. Pure: values in, an error out.
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
# vLLM reads a part without a type, or with a uuid, by whichever of these it has; a uuid names what others sent before.
_MEDIA_KEYS = (
    *("image_url", "input_image", "audio_url", "input_audio", "video_url"),
    *("image_pil", "image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "uuid", "file"),
)


def check_contents(
    values: Mapping[str, Any], *, max_messages: int, media: Mapping[str, int], media_domains: frozenset[str]
) -> None:
    """Refuse what no engine is given.

    Args:
        max_messages: each takes a token of the context at least.
        media: items of each modality that one request may have; none of those that are not named.
        media_domains: hosts from which an engine may fetch media; with none they come as data: URLs alone.

    Raises:
        ApiError: 400, with the field that is at fault.
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
    """All that a part has: which one vLLM reads depends on its type."""
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
    """How an answer to this request grows.

    A prompt that is text has no more tokens than bytes.
    """
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
    """A count as pydantic would take it.

    -1 is the whole vocabulary, which vLLM refuses beyond its own limit.
    """
    try:
        number = int(value or 0)
    except (TypeError, ValueError, OverflowError):
        return 0
    return number if 0 <= number <= MAX_LOGPROBS else MAX_LOGPROBS
