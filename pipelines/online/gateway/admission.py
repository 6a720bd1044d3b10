"""Validation of a request's body, and the maximum number of tokens and bytes of its answer.

The gate checks the fields that its decisions need (model, key, stream and token counts), and refuses everything that
would make an engine fetch, execute or render data for a client. Other fields are validated by vLLM's API models.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from peagle.errors import did_you_mean, shown
from peagle.plain_json import HalfSurrogate, finite_float, from_json
from peagle.requests.bounds import AnswerShape, bounds_error, constraint_error, token_id_error
from peagle.requests.fields import CHAT_URL, COMPLETIONS_URL, has_no_effect, refused_field
from peagle.requests.messages import message_error
from peagle.requests.openai import template_error
from peagle.requests.sampling import MAX_LOGPROBS
from pipelines.online.errors import ApiError
from pipelines.online.gateway.bodies import REQUEST_LIMITS
from pipelines.online.gateway.keys import KeyRecord
from pipelines.online.wire import INVOCATIONS_URL, ShownUsage

COMPLETION_TOKENS = 16  # OpenAI's default max_tokens for completions
_MIN_OUTPUT_TOKENS = 1  # vLLM generates and counts one token per choice even with max_tokens 0
_TYPES: dict[str, type] = {
    "model": str,
    "stream": bool,
    "stream_options": dict,
    "max_tokens": int,
    "max_completion_tokens": int,
    "n": int,
}
_TYPE_NAMES = {str: "a string", bool: "true or false", dict: "an object", int: "a whole number"}
_MIN_INT, _MAX_INT = -(2**63), 2**63 - 1  # engines only accept 64-bit integers
_DIGITS_SHOWN = 40
_TEXT_PART_FIELDS = {"type", "text"}
# vLLM accepts these fields from clients; here the endpoint sets them.
_ENDPOINT_FIELDS = ("cache_salt", "request_id", "session_id")
_MAX_FLOATS = 10_000
_MAX_FIELDS, _MAX_FIELD_CHARS = 200, 100  # vLLM's request types have about 70 fields
_MAX_DEPTH = 100  # nested lists and objects; hundreds cause a recursion error
TEMPLATE_TOKENS = 1_024  # upper bound of what a chat template adds; the longest known ones add a few hundred
MODALITIES = {"image": ("image_url", "input_image"), "audio": ("audio_url", "input_audio"), "video": ("video_url",)}
_TEXT_PART_TYPES = ("text", "input_text", "output_text", "thinking", "refusal", "tool_reference")
# vLLM infers the type of an untyped part from these keys. A uuid refers to media that another client might have sent.
_MEDIA_KEYS = (
    *("image_url", "input_image", "audio_url", "input_audio", "video_url"),
    *("image_pil", "image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "uuid", "file"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model of the endpoint, with the limits that the gate checks."""

    name: str
    max_model_len: int
    can_seed: bool = True  # whether sampling seeds work. On CPU, a request with a seed crashes vLLM 0.29
    # maximum choices of all prompts of a request (Ray Serve's limits count requests, not choices); None: no limit
    max_choices: int | None = None
    max_answer_bytes: int | None = None  # maximum size of one answer, estimated with `AnswerShape`; None: no limit
    media: Mapping[str, int] | None = None  # maximum items per request of each modality; None allows text only
    # hosts from which engines may fetch media; if empty, only data: URLs are accepted
    media_domains: frozenset[str] = frozenset()
    drafter: str | None = None
    num_speculative_tokens: int | None = None
    vocab_size: int | None = None  # None if unknown
    parsers: frozenset[str] = frozenset({"tool_call_parser", "reasoning_parser"})  # configured vLLM parsers


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """A valid request."""

    path: str  # the API path; differs from the request's path on SageMaker
    values: dict[str, Any]  # the body that the engine receives
    model: ServedModel
    shown_usage: ShownUsage  # which events of a stream show usage, as the client requested
    # the next three are totals of all prompts; token counts are upper bounds
    num_choices: int
    prompt_tokens: int
    output_tokens: int
    # the output limit of a chat without max_tokens; None if the context is the only limit
    cap_tokens: int | None = None


def check_request(
    path: str,
    body: bytes,
    key: KeyRecord,
    models: Mapping[str, ServedModel],
    *,
    max_output_tokens: int | None,
    cache_salt: str | None = None,
) -> CheckedRequest:
    """Validate a request. Raises ApiError 400, 403, 404 or 422 with the invalid field.

    Requests with the same `cache_salt` share cached prefixes; None adds no salt.
    """
    values = _parse(body)
    path = _detect_path(values) if path == INVOCATIONS_URL else path
    _check_types(path, values)
    model = _requested_model(values, key, models)
    if refused := refused_field(path, values, in_bulk=False):
        code = "unsupported_parameter" if refused.hint is None else "unknown_parameter"
        raise ApiError(400, str(refused), code=code, param=refused.field)
    values = {
        name: value for name, value in values.items() if not (name in _ENDPOINT_FIELDS or has_no_effect(name, value))
    }
    if not model.can_seed and values.get("seed") is not None and values.get("temperature") != 0:
        raise ApiError(400, "seed is supported here only with temperature 0", code="unsupported_value", param="seed")
    _require_parser(values, model)
    check_contents(values, model)
    if id_error := token_id_error(values, model.vocab_size):
        raise ApiError(400, id_error[1], code="invalid_value", param=id_error[0])
    num_choices = _num_choices(path, values, model)
    requested = _requested_tokens(path, values, model, max_output_tokens, num_choices)
    tokens = default_max_tokens(path, key, model, max_output_tokens, num_choices) if requested is None else requested
    shape = answer_shape(
        values, len(body), is_chat=path == CHAT_URL, max_model_len=model.max_model_len, num_choices=num_choices
    )
    if model.max_answer_bytes is not None:
        tokens_by_size = shape.max_output_tokens(model.max_answer_bytes)
        if tokens_by_size < 1 or (requested or 0) > tokens_by_size:
            message = (
                f"the answer could be {shape.num_bytes(max(requested or 0, 1)) / 2**20:,.1f} MiB long (choices, "
                f"tokens and logprobs), but at most {model.max_answer_bytes / 2**20:,.1f} MiB are allowed; "
                "request less, or send several requests"
            )
            raise ApiError(400, message, code="answer_too_large")
        tokens = min(tokens, tokens_by_size)
    if path == COMPLETIONS_URL:
        values["max_tokens"] = tokens  # vLLM's own default is 16
    options = values.get("stream_options") or {}
    # Every event has the current usage, in case the client disconnects. The replica removes it from events in which the
    # client did not request it (`relay.py`).
    if values.get("stream"):
        values["stream_options"] = {**options, "include_usage": True, "continuous_usage_stats": True}
    values["model"] = model.name
    values |= {"cache_salt": cache_salt} if cache_salt else {}
    return CheckedRequest(
        path=path,
        values=values,
        model=model,
        shown_usage=_shown_usage(options),
        num_choices=num_choices,
        prompt_tokens=_max_prompt_tokens(values, len(body), model, num_choices),
        output_tokens=max(tokens, _MIN_OUTPUT_TOKENS) * num_choices,
        # Not in the body: vLLM would refuse it if prompt and max_tokens together exceed the context.
        cap_tokens=tokens if requested is None and path == CHAT_URL and tokens < model.max_model_len else None,
    )


def _shown_usage(options: Mapping[str, Any]) -> ShownUsage:
    if not options.get("include_usage"):
        return "never"
    return "each" if options.get("continuous_usage_stats") else "last"


def _parse(body: bytes) -> dict[str, Any]:
    REQUEST_LIMITS.check(body)
    try:
        values = from_json(body, parse_int=_whole_number, parse_float=_FloatParser().parse)
    except HalfSurrogate as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON", code="invalid_json") from None
    if not isinstance(values, dict):
        raise ApiError(422, "the body must be a JSON object", code="invalid_type")
    if len(values) > _MAX_FIELDS or any(len(field) > _MAX_FIELD_CHARS for field in values):
        message = f"a request may have at most {_MAX_FIELDS} fields, with names of up to {_MAX_FIELD_CHARS} characters"
        raise ApiError(400, message, code="too_many_values")
    if body.count(b"[") + body.count(b"{") > _MAX_DEPTH and _depth(values) > _MAX_DEPTH:
        raise ApiError(400, f"the body has more than {_MAX_DEPTH} nested lists and objects", code="too_deep")
    return values


def _detect_path(values: Mapping[str, Any]) -> str:
    for field, path in (("messages", CHAT_URL), ("prompt", COMPLETIONS_URL)):
        if field in values:
            return path
    raise ApiError(400, "the body has neither messages (chat) nor prompt (completion)", code="missing_route")


def _check_types(path: str, values: Mapping[str, Any]) -> None:
    for field, expected_type in _TYPES.items():
        value = values.get(field)
        if value is None:
            continue
        if type(value) is not expected_type:
            raise ApiError(422, f"{field} must be {_TYPE_NAMES[expected_type]}", code="invalid_type", param=field)
        # A completion with `echo` and max_tokens 0 requests only the logprobs of its prompt.
        only_scores_prompt = path == COMPLETIONS_URL and field == "max_tokens" and values.get("echo") is True
        if isinstance(value, int) and expected_type is int and value < (0 if only_scores_prompt else 1):
            raise ApiError(400, f"{field} must be at least 1", code="invalid_value", param=field)


def _require_parser(values: Mapping[str, Any], model: ServedModel) -> None:
    """Refuse fields that require a parser that is not configured. vLLM's own message names vLLM's flags."""
    calls_tools = bool(values.get("tools")) and values.get("tool_choice", "auto") != "none"
    field = "tool_choice" if "tool_choice" in values else "tools"
    if calls_tools and "tool_call_parser" not in model.parsers:
        message = f'{model.name} is served without tool_call_parser, so it cannot call tools; send tool_choice: "none"'
        raise ApiError(400, f"{field}: {message}", code="unsupported_value", param=field)
    field = "thinking_token_budget"
    if values.get(field, -1) != -1 and "reasoning_parser" not in model.parsers:
        message = f"{model.name} is served without reasoning_parser, so its thinking cannot be limited"
        raise ApiError(400, f"{field}: {message}", code="unsupported_value", param=field)


def _depth(values: Any) -> int:
    depth, level = 0, [values]
    while level := [value for value in level if isinstance(value, list | dict)]:
        depth += 1
        children = (value.values() if isinstance(value, dict) else value for value in level)
        level = list(itertools.chain.from_iterable(children))
    return depth


class _FloatParser:
    """Parses the floats of one body and limits their number: serializing many floats is slow."""

    def __init__(self) -> None:
        self._num_floats = 0

    def parse(self, digits: str) -> float:
        self._num_floats += 1
        if self._num_floats > _MAX_FLOATS:
            message = f"the body has more than {_MAX_FLOATS:,} numbers with a decimal point or an exponent"
            raise ApiError(400, message, code="too_many_values")
        return finite_float(digits)


def _whole_number(digits: str) -> int:
    is_short = len(digits) <= len(str(_MIN_INT))  # Python refuses thousands of digits
    if is_short and _MIN_INT <= (number := int(digits)) <= _MAX_INT:
        return number
    shown_digits = digits if len(digits) <= _DIGITS_SHOWN else f"{digits[:_DIGITS_SHOWN]}... ({len(digits)} digits)"
    raise ApiError(
        400, f"the number {shown_digits} is too large: whole numbers must fit in 64 bits", code="invalid_value"
    )


def _requested_model(values: Mapping[str, Any], key: KeyRecord, models: Mapping[str, ServedModel]) -> ServedModel:
    allowed = [name for name in models if key.models is None or name in key.models]
    name = values.get("model")
    if name is None:
        if len(models) != 1:
            raise ApiError(400, f"model must be one of {', '.join(allowed)}", code="missing_model", param="model")
        (name,) = models
    if name not in models:
        hint = did_you_mean(name, allowed)
        raise ApiError(404, f"there is no model {shown(name)}; {hint}", code="model_not_found", param="model")
    if name not in allowed:
        raise ApiError(403, f"this key may not use the model {shown(name)}", code="model_not_allowed", param="model")
    return models[name]


def _requested_tokens(
    path: str, values: Mapping[str, Any], model: ServedModel, limit: int | None, num_choices: int
) -> int | None:
    """Return the request's max_tokens, or None if unset. `limit` is for all choices together."""
    has_chat_field = path == CHAT_URL and values.get("max_completion_tokens") is not None
    field = "max_completion_tokens" if has_chat_field else "max_tokens"
    requested: int | None = values.get(field)
    limit = model.max_model_len if limit is None else min(limit // num_choices, model.max_model_len)
    if requested is not None and max(requested, _MIN_OUTPUT_TOKENS) > limit:
        choices_text = f" for each of {num_choices} choices" if num_choices > 1 else ""
        message = f"{field} is {requested}, but {model.name} allows at most {limit}{choices_text}"
        raise ApiError(400, message, code="max_tokens_too_large", param=field)
    return requested


def _max_prompt_tokens(values: Mapping[str, Any], num_bytes: int, model: ServedModel, num_choices: int) -> int:
    """Return an upper bound of the prompt tokens of all choices.

    A token has at least one byte of the body. The chat template and images may add tokens, up to the context length.
    """
    n = int(values.get("n") or 1)
    num_prompts = num_choices // n
    limit = num_prompts * model.max_model_len
    has_media = any(not part.keys() <= _TEXT_PART_FIELDS for _, part in _parts(values.get("messages")))
    return n * (limit if has_media else min(num_bytes + num_prompts * TEMPLATE_TOKENS, limit))


def default_max_tokens(path: str, key: KeyRecord, model: ServedModel, limit: int | None, num_choices: int = 1) -> int:
    """Return the smallest applicable limit of output tokens per choice, for a request without max_tokens."""
    if path == COMPLETIONS_URL:
        per_choice, totals = min(COMPLETION_TOKENS, model.max_model_len), [limit]
    else:
        per_choice, totals = model.max_model_len, [limit, key.output_tokens_per_min]
    tokens = min([per_choice, *(total // num_choices for total in totals if total is not None)])
    if tokens < 1:
        message = f"the request has {num_choices} choices, more than its limit of output tokens; request fewer choices"
        raise ApiError(400, message, code="max_tokens_too_large", param="n")
    return tokens


def _num_choices(path: str, values: Mapping[str, Any], model: ServedModel) -> int:
    """Return the number of choices of all prompts. Each choice needs an engine slot."""
    prompt = values.get("prompt")
    has_prompt_list = path == COMPLETIONS_URL and isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    num_prompts = len(prompt) if has_prompt_list and prompt else 1
    n = int(values.get("n") or 1)
    if model.max_choices is not None and n * num_prompts > model.max_choices:
        message = (
            f"n is {n} for {num_prompts} prompt(s), but {model.name} allows at most {model.max_choices} choices per "
            "request; send several requests"
        )
        param = "prompt" if num_prompts > model.max_choices else "n"
        raise ApiError(400, message, code="too_many_choices", param=param)
    return n * num_prompts


def check_contents(values: Mapping[str, Any], model: ServedModel) -> None:
    """Refuse content that engines must not receive."""
    kwargs = values.get("chat_template_kwargs")
    if kwargs is not None and (refused := template_error(kwargs)):
        field = "chat_template_kwargs"
        raise ApiError(400, f"{field}: {refused}", code="unsupported_parameter", param=field)
    messages = values.get("messages")
    messages = messages if isinstance(messages, list) else []
    if len(messages) > model.max_model_len:  # each message needs at least one token
        message = f"messages has {len(messages):,} entries, but at most {model.max_model_len:,} are allowed"
        raise ApiError(400, message, code="invalid_value", param="messages")
    if size_error := bounds_error(values):
        raise ApiError(400, size_error[1], code="invalid_value", param=size_error[0])
    for index, message in enumerate(messages):
        if isinstance(message, dict) and isinstance(message.get("role"), str) and (reason := message_error(message)):
            raise ApiError(400, f"messages[{index}]: {reason}", code="invalid_value", param="messages")
    _check_media(values, model.media or {}, model.media_domains)
    if field_and_reason := constraint_error(values):
        field, reason = field_and_reason
        raise ApiError(400, f"{field}: {reason}", code="constraint_too_large", param=field)


def _check_media(values: Mapping[str, Any], media: Mapping[str, int], domains: frozenset[str]) -> None:
    counts = dict.fromkeys(MODALITIES, 0)
    for where, part in _parts(values.get("messages")):
        part_type = part.get("type")
        modality = next((name for name, types in MODALITIES.items() if part_type in types), None)
        is_plain = not any(part.get(name) is not None for name in _MEDIA_KEYS)
        if modality is None and is_plain and part_type in _TEXT_PART_TYPES:
            continue
        allowed = media.get(modality, 0) if modality is not None and part.get("uuid") is None else 0
        if modality is None or not allowed:
            accepted = ", ".join(["text", *(name for name, limit in media.items() if limit)])
            description = f"of type {part_type[:40]!r}" if isinstance(part_type, str) else "of an unknown type"
            message = f"{where} is {description}, but this model only takes {accepted}"
            raise ApiError(400, message, code="unsupported_content", param="messages")
        counts[modality] += 1
        if counts[modality] > allowed:
            message = f"the request has too many parts of type {modality}: at most {allowed} are allowed"
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
        raise ApiError(400, f"{where}: the URL must be {allowed}", code="media_not_allowed", param="messages")


def _parts(messages: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the location of each content part, and the part."""
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


def answer_shape(
    values: Mapping[str, Any], num_body_bytes: int, *, is_chat: bool, max_model_len: int, num_choices: int
) -> AnswerShape:
    """Return the properties that determine the answer's size. A text prompt has at most one token per byte."""
    logprobs_field, echoes = values.get("logprobs"), bool(values.get("echo"))
    num_alternatives = values.get("top_logprobs") if is_chat else logprobs_field
    has_logprobs = bool(logprobs_field) if is_chat else logprobs_field is not None
    logprobs = 1 + max(_count(num_alternatives), _length(values.get("logprob_token_ids"))) if has_logprobs else 0
    requested = values.get("prompt_logprobs")
    # vLLM always returns prompt logprobs for a chat with `echo`.
    prompt_logprobs = 1 + _count(requested) if requested is not None else max(logprobs, int(is_chat)) * echoes
    with_ids = bool(values.get("return_token_ids"))
    includes_prompt = echoes or prompt_logprobs or with_ids or values.get("return_prompt_text")
    max_chat_tokens = num_body_bytes + TEMPLATE_TOKENS
    prompts = values.get("prompt")
    if not isinstance(prompts, list) or not prompts or isinstance(prompts[0], int):
        prompts = [prompts]
    lengths = [max_chat_tokens] if is_chat else [_prompt_length(prompt) for prompt in prompts]
    choices_per_prompt = num_choices // max(1, len(lengths))
    prompt_tokens = sum(min(length, max_model_len) for length in lengths) * choices_per_prompt
    return AnswerShape(
        num_choices=num_choices,
        prompt_tokens=prompt_tokens if includes_prompt else 0,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        with_ids=with_ids,
    )


def _prompt_length(prompt: Any) -> int:
    if isinstance(prompt, str):
        return len(prompt.encode(errors="replace")) + 1  # 1 for the BOS token
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
