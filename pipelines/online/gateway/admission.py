"""Admit a request's body: valid, allowed to its key, bounded in its answer.

Pure: bytes in, the request's values out. It checks what the endpoint itself decides by (model, stream, number of
tokens); the rest is for the models of the API behind it.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peagle.errors import did_you_mean, shown
from peagle.plain_json import HalfSurrogate, finite_float, from_json
from peagle.requests.bounds import token_id_error
from peagle.requests.fields import CHAT_URL, COMPLETIONS_URL, asks_nothing, refused_field
from pipelines.online.errors import ApiError
from pipelines.online.gateway.bodies import REQUEST
from pipelines.online.gateway.contents import TEMPLATE_TOKENS, answer_shape, check_contents, within_room
from pipelines.online.gateway.keys import KeyRecord
from pipelines.online.wire import INVOCATIONS_URL, ShownUsage

COMPLETION_TOKENS = 16  # what OpenAI's API gives a completion that names no number
_LEAST_MADE = 1  # token of a choice: vLLM makes, and counts, one that nobody sees where a request wants none
_TYPES: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "stream": (bool,),
    "stream_options": (dict,),
    "max_tokens": (int,),
    "max_completion_tokens": (int,),
    "n": (int,),
}
_WORDS = {str: "a string", bool: "true or false", dict: "an object", int: "a whole number"}
_LEAST_INT, _MOST_INT = -(2**63), 2**63 - 1  # what 64 bits hold; an engine takes no others
_DIGITS_SHOWN = 40
_OF_A_TEXT_PART = {"type", "text"}
# What vLLM takes from anybody and the endpoint decides: whose cache a request reads, and by which ids it is known.
_OF_THE_ENDPOINT = ("cache_salt", "request_id", "session_id")
_MOST_FRACTIONS = 10_000
_MOST_FIELDS, _LONGEST_FIELD = 200, 100  # of a request; vLLM has some seventy
_DEEPEST = 100  # lists and objects in each other; at some hundreds what hands a request on fails of it


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as the ingress knows it.

    Attributes:
        can_seed: whether a sampling seed works; vLLM 0.29 on CPU dies on one, and every request in it.
        max_choices: of one request, over all its prompts: they are one request for whoever counts an engine's; None is
            without limit.
        max_answer_bytes: of one answer, by `AnswerShape`; None is without limit.
        media: items of each modality that one request may have; None is text alone.
        media_domains: hosts from which engines may fetch media.
        vocab_size: token ids that the model has; None if unknown.
        parsers: the keys of vLLM's parsers that the model is served with.
    """

    name: str
    max_model_len: int
    can_seed: bool = True
    max_choices: int | None = None
    max_answer_bytes: int | None = None
    media: Mapping[str, int] | None = None
    media_domains: frozenset[str] = frozenset()
    drafter: str | None = None
    num_speculative_tokens: int | None = None
    vocab_size: int | None = None
    parsers: frozenset[str] = frozenset({"tool_call_parser", "reasoning_parser"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """A request that may go on.

    Attributes:
        path: of the API; another one than the request's where that is SageMaker's.
        values: the request as the engine gets it.
        shown_usage: what the client asked for of a stream's.
        num_choices: of all its prompts.
        prompt_tokens: of all its choices at most, before anybody has counted them.
        output_tokens: of all its choices at most.
        cap_tokens: of a chat that names no number: its answer has what the context leaves, and no more than these.
    """

    path: str
    values: dict[str, Any]
    model: ServedModel
    shown_usage: ShownUsage
    num_choices: int
    prompt_tokens: int
    output_tokens: int
    cap_tokens: int | None = None


def check(
    path: str,
    body: bytes,
    key: KeyRecord,
    models: Mapping[str, ServedModel],
    *,
    max_output_tokens: int | None,
    cache_salt: str | None = None,
) -> Intake:
    """Decide on a request.

    A stream is always asked for its usage, in every event, so that what was sent is known when the client leaves in
    between; the replica takes out what the client did not ask for (`relay.py`).

    Args:
        cache_salt: requests share cached prompts with those of the same salt; None is without one.

    Raises:
        ApiError: 400, 403, 404 or 422, with the field that is at fault.
    """
    values = _parse(body)
    path = _invoked(values) if path == INVOCATIONS_URL else path
    _check_types(path, values)
    model = _model(values, key, models)
    values = _as_an_engine_takes_it(path, values)
    if not model.can_seed and values.get("seed") is not None and values.get("temperature") != 0:
        raise ApiError(400, "seed works here only with temperature 0", code="unsupported_value", param="seed")
    _require_parser(values, model)
    check_contents(values, max_messages=model.max_model_len, media=model.media or {}, media_domains=model.media_domains)
    if wrong := token_id_error(values, model.vocab_size):
        raise ApiError(400, wrong[1], code="invalid_value", param=wrong[0])
    num_choices = _num_choices(path, values, model)
    asked = _asked_tokens(path, values, model, max_output_tokens, num_choices)
    tokens = default_tokens(path, key, model, max_output_tokens, num_choices) if asked is None else asked
    shape = answer_shape(
        values, len(body), is_chat=path == CHAT_URL, max_model_len=model.max_model_len, num_choices=num_choices
    )
    tokens = within_room(shape, model.max_answer_bytes, asked=asked, tokens=tokens)
    if path == COMPLETIONS_URL:
        values["max_tokens"] = tokens  # vLLM would give it its own 16
    options = values.get("stream_options") or {}
    if values.get("stream"):
        values["stream_options"] = {**options, "include_usage": True, "continuous_usage_stats": True}
    values["model"] = model.name
    values |= {"cache_salt": cache_salt} if cache_salt else {}
    return Intake(
        path=path,
        values=values,
        model=model,
        shown_usage=_shown_usage(options),
        num_choices=num_choices,
        prompt_tokens=_most_prompt_tokens(values, len(body), model, num_choices),
        output_tokens=max(tokens, _LEAST_MADE) * num_choices,
        # Not in the body, where vLLM would count it against the context beside the prompt and refuse what does not fit.
        cap_tokens=tokens if asked is None and path == CHAT_URL and tokens < model.max_model_len else None,
    )


def _shown_usage(options: Mapping[str, Any]) -> ShownUsage:
    if not options.get("include_usage"):
        return "never"
    return "each" if options.get("continuous_usage_stats") else "last"


def _parse(body: bytes) -> dict[str, Any]:
    REQUEST.check(body)
    try:
        values = from_json(body, parse_int=_whole_number, parse_float=_Fractions().read)
    except HalfSurrogate as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON", code="invalid_json") from None
    if not isinstance(values, dict):
        raise ApiError(422, "the body must be a JSON object", code="invalid_type")
    if len(values) > _MOST_FIELDS or any(len(field) > _LONGEST_FIELD for field in values):
        message = f"a request has {_MOST_FIELDS} fields at most, with names of {_LONGEST_FIELD} characters"
        raise ApiError(400, message, code="too_many_values")
    if body.count(b"[") + body.count(b"{") > _DEEPEST and _depth(values) > _DEEPEST:
        raise ApiError(400, f"the body has more than {_DEEPEST} lists and objects in each other", code="too_deep")
    return values


def _invoked(values: Mapping[str, Any]) -> str:
    """The path of the API that a body without one is for."""
    for field, path in (("messages", CHAT_URL), ("prompt", COMPLETIONS_URL)):
        if field in values:
            return path
    raise ApiError(400, "the body has neither messages, as a chat, nor prompt, as a completion", code="missing_route")


def _check_types(path: str, values: Mapping[str, Any]) -> None:
    for field, kinds in _TYPES.items():
        value = values.get(field)
        is_wrong = not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)
        if value is not None and is_wrong:
            raise ApiError(422, f"{field} must be {_WORDS[kinds[0]]}", code="invalid_type", param=field)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1 and not _scores(path, field, values):
            raise ApiError(400, f"{field} must be at least 1", code="invalid_value", param=field)


def _as_an_engine_takes_it(path: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The request without fields that ask for nothing or that the endpoint sets.

    Raises:
        ApiError: 400, it has a field that nobody knows, or that is not taken.
    """
    if refused := refused_field(path, values, in_bulk=False):
        code = "unsupported_parameter" if refused.hint is None else "unknown_parameter"
        raise ApiError(400, str(refused), code=code, param=refused.field)
    return {
        name: value for name, value in values.items() if not (name in _OF_THE_ENDPOINT or asks_nothing(name, value))
    }


def _require_parser(values: Mapping[str, Any], model: ServedModel) -> None:
    """Refuse a field for which the model is served without a parser.

    vLLM would refuse it too, and name its own flags.

    Raises:
        ApiError: 400, with the setting.
    """
    calls_tools = bool(values.get("tools")) and values.get("tool_choice", "auto") != "none"
    field = "tool_choice" if "tool_choice" in values else "tools"
    if calls_tools and "tool_call_parser" not in model.parsers:
        message = f'{model.name} is served without tool_call_parser, so it cannot call tools; send tool_choice: "none"'
        raise ApiError(400, f"{field}: {message}", code="unsupported_value", param=field)
    field = "thinking_token_budget"
    if values.get(field, -1) != -1 and "reasoning_parser" not in model.parsers:
        message = f"{model.name} is served without reasoning_parser, so its thinking cannot be bounded"
        raise ApiError(400, f"{field}: {message}", code="unsupported_value", param=field)


def _depth(values: Any) -> int:
    depth, level = 0, [values]
    while level := [one for one in level if isinstance(one, list | dict)]:
        depth += 1
        level = list(itertools.chain.from_iterable(one.values() if isinstance(one, dict) else one for one in level))
    return depth


def _scores(path: str, field: str, values: Mapping[str, Any]) -> bool:
    """Whether a request wants only its prompt back, with its tokens' logprobs."""
    return path == COMPLETIONS_URL and field == "max_tokens" and values[field] == 0 and values.get("echo") is True


class _Fractions:
    """Fractions in one body: slow to write down, and rarely many."""

    def __init__(self) -> None:
        self._num = 0

    def read(self, digits: str) -> float:
        """The next one."""
        self._num += 1
        if self._num > _MOST_FRACTIONS:
            raise ApiError(400, f"the body has more than {_MOST_FRACTIONS:,} fractions", code="too_many_values")
        return finite_float(digits)


def _whole_number(digits: str) -> int:
    is_short = len(digits) <= len(str(_LEAST_INT))  # Python itself refuses thousands of digits
    if is_short and _LEAST_INT <= (number := int(digits)) <= _MOST_INT:
        return number
    shown = digits if len(digits) <= _DIGITS_SHOWN else f"{digits[:_DIGITS_SHOWN]}... ({len(digits)} digits)"
    raise ApiError(400, f"the number {shown} is too large: whole numbers have 64 bits", code="invalid_value")


def _model(values: Mapping[str, Any], key: KeyRecord, models: Mapping[str, ServedModel]) -> ServedModel:
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


def _asked_tokens(
    path: str, values: Mapping[str, Any], model: ServedModel, most: int | None, num_choices: int
) -> int | None:
    """The most output tokens of one choice, as the request names them.

    `most` is for all choices together.
    """
    field = (
        "max_tokens"
        if path == COMPLETIONS_URL or values.get("max_completion_tokens") is None
        else "max_completion_tokens"
    )
    asked: int | None = values.get(field)
    limit = model.max_model_len if most is None else min(most // num_choices, model.max_model_len)
    if asked is not None and max(asked, _LEAST_MADE) > limit:
        each = f" to each of {num_choices} choices" if num_choices > 1 else ""
        message = f"{field} is {asked}, and {model.name} gives {limit} at most{each}"
        raise ApiError(400, message, code="max_tokens_too_large", param=field)
    return asked


def _most_prompt_tokens(values: Mapping[str, Any], num_bytes: int, model: ServedModel, num_choices: int) -> int:
    """The most prompt tokens of all choices.

    None is less than a byte of the body, but what a chat's template adds and what an image becomes, and no prompt is
    longer than the context.
    """
    n = int(values.get("n") or 1)
    num_prompts = num_choices // n
    most = num_prompts * model.max_model_len
    return n * (most if _has_media(values) else min(num_bytes + num_prompts * TEMPLATE_TOKENS, most))


def _has_media(values: Mapping[str, Any]) -> bool:
    """Whether a message has a part that may be something else than text."""
    messages = values.get("messages")
    messages = messages if isinstance(messages, list) else []
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    parts = itertools.chain.from_iterable(content for content in contents if isinstance(content, list))
    return any(isinstance(part, dict) and not part.keys() <= _OF_A_TEXT_PART for part in parts)


def default_tokens(path: str, key: KeyRecord, model: ServedModel, most: int | None, num_choices: int = 1) -> int:
    """The most output tokens of one choice where a request names no number.

    The smallest limit there is.

    Raises:
        ApiError: 400, there are more choices than tokens for all of them.
    """
    if path == COMPLETIONS_URL:
        of_each, of_all = min(COMPLETION_TOKENS, model.max_model_len), [most]
    else:
        of_each, of_all = model.max_model_len, [most, key.output_tokens_per_min]
    tokens = min([of_each, *(number // num_choices for number in of_all if number is not None)])
    if tokens < 1:
        message = f"the request has {num_choices} choices, and may not have as many output tokens; ask for fewer"
        raise ApiError(400, message, code="max_tokens_too_large", param="n")
    return tokens


def _num_choices(path: str, values: Mapping[str, Any], model: ServedModel) -> int:
    """Choices of all prompts together, each of which takes a slot of an engine.

    Raises:
        ApiError: 400, they are too many for one request.
    """
    prompt = values.get("prompt")
    is_batch = path == COMPLETIONS_URL and isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    num_prompts = len(prompt) if is_batch and prompt else 1
    n = int(values.get("n") or 1)
    if model.max_choices is not None and n * num_prompts > model.max_choices:
        raise ApiError(
            400,
            f"n is {n}, of {num_prompts} prompt(s), and {model.name} gives one request {model.max_choices} choices at "
            "most; send several",
            code="too_many_choices",
            param="prompt" if num_prompts > model.max_choices else "n",
        )
    return n * num_prompts
