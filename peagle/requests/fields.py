"""All fields of OpenAI's and vLLM's requests, and their use online and in bulk.

For chat and completions.

One table for all: the endpoint, its batches and bulk runs refuse by it, and `docs/requests.md` is made from it. A test
holds it against the installed schemas. It knows names and values that ask for nothing; other values are checked
where they are used.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from peagle.errors import did_you_mean, shown

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
URLS = (CHAT_URL, COMPLETIONS_URL)
Use = Literal["honoured", "online", "ignored", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of a request.

    Attributes:
        use: "online" is honoured there and refused in bulk; "ignored" changes no response, and is taken everywhere.
        urls: the routes that have it.
        neutral: values that ask for nothing, which are taken everywhere; null is one of every field.
        note: why it is refused, or what to know of it.
    """

    use: Use
    urls: tuple[str, ...]
    neutral: tuple[Any, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A refused field.

    `hint` names the nearest known field where unknown field, else it is None.
    """

    field: str
    value: Any
    why: str
    hint: str | None = None

    def __str__(self) -> str:
        if self.hint is not None:
            return f"unknown parameter {shown(self.field)}: {self.hint}"
        return f"{self.field} is not taken: {self.why}"


def refused_field(url: str, values: Mapping[str, Any], *, in_bulk: bool) -> Refused | None:
    """The first field that is not taken; None where all are.

    Args:
        values: a request's body, in which null is not set.

    >>> str(refused_field("/v1/completions", {"prompt": "x", "best_of": 3}, in_bulk=False))
    'best_of is not taken: engines make as many responses as n says'
    """
    for name, value in values.items():
        if value is None:
            continue
        field = FIELDS.get(name)
        if field is None or url not in field.urls:
            near = [known for known, one in FIELDS.items() if url in one.urls and one.use in ("honoured", "online")]
            return Refused(field=name, value=value, why="unknown field", hint=did_you_mean(name, near))
        is_refused = field.use == "refused" or (in_bulk and field.use == "online")
        if is_refused and value not in field.neutral:
            return Refused(field=name, value=value, why=field.note)
    return None


def asks_nothing(name: str, value: Any) -> bool:
    """Whether an engine need not be told of an accepted field.

    A null, which may be of a field that nobody knows; or a value that asks for nothing of a field that engines do not
    have.
    """
    if value is None:
        return True
    field = FIELDS[name]
    return field.use in ("honoured", "refused") and value in field.neutral


_BOTH = URLS
_CHAT = (CHAT_URL,)
_COMPLETIONS = (COMPLETIONS_URL,)
_NO_STREAM = "only an answer online can be a stream"
_TEXT_ALONE = "a row's response is text, without this"
_OF_THE_ENGINES = "it is the engines' own"
_OF_THE_OPERATOR = "media are read as the endpoint's operator says"
_NO_BEAMS = "engines sample"
_OF_RENDER = "it is for vLLM's routes that only render"


def _fields(
    use: Use, urls: tuple[str, ...], *names: str, note: str = "", neutral: tuple[Any, ...] = ()
) -> dict[str, Field]:
    return {name: Field(use=use, urls=urls, neutral=neutral, note=note) for name in names}


FIELDS: dict[str, Field] = {
    **_fields("honoured", _CHAT, "messages", note="text, and online the media that the model takes; tool calls too"),
    **_fields("honoured", _COMPLETIONS, "prompt", note="in bulk one: a text, token ids, or a list of one of them"),
    **_fields("honoured", _BOTH, "model", note="in bulk the run's own answers"),
    **_fields("honoured", _BOTH, "max_tokens", "n", "temperature", "top_p", "repetition_penalty"),
    **_fields("honoured", _BOTH, "top_k", note="0 and -1 keep every token"),
    **_fields("honoured", _BOTH, "seed", note="on a CPU only with temperature 0"),
    **_fields("honoured", _BOTH, "frequency_penalty", "presence_penalty", "stop", "stop_token_ids", "bad_words"),
    **_fields("honoured", _BOTH, "logit_bias", "min_p", note="without drafts; on a GPU refused if there is a drafter"),
    **_fields("honoured", _BOTH, "allowed_token_ids", "min_tokens", "ignore_eos", "include_stop_str_in_output"),
    **_fields("honoured", _BOTH, "skip_special_tokens", "spaces_between_special_tokens", "repetition_detection"),
    **_fields("honoured", _BOTH, "logprobs", note="up to 20"),
    **_fields("honoured", _BOTH, "response_format", "structured_outputs", "add_special_tokens"),
    **_fields("honoured", _CHAT, "max_completion_tokens", "top_logprobs", "documents", "reasoning_effort"),
    **_fields("honoured", _CHAT, "chat_template_kwargs", note="but for chat_template and tokenize"),
    **_fields("honoured", _CHAT, "add_generation_prompt", "continue_final_message"),
    **_fields("honoured", _CHAT, "tools", neutral=([],), note='in bulk with tool_choice "none": a response is text'),
    **_fields("online", _CHAT, "tool_choice", neutral=("none",), note="a row's response is text: say \"none\""),
    **_fields("online", _CHAT, "parallel_tool_calls", neutral=(True, False), note=_TEXT_ALONE),
    **_fields("online", _BOTH, "stream", neutral=(False,), note=_NO_STREAM),
    **_fields("online", _BOTH, "stream_options", "stream_interval", note=_NO_STREAM),
    **_fields("online", _BOTH, "echo", "return_token_ids", "return_tokens_as_token_ids", neutral=(False,),
              note=_TEXT_ALONE),
    **_fields("online", _CHAT, "return_prompt_text", neutral=(False,), note=_TEXT_ALONE),
    **_fields("online", _BOTH, "prompt_logprobs", "logprob_token_ids", note=_TEXT_ALONE),
    **_fields("online", _BOTH, "truncate_prompt_tokens", "truncation_side",
              note="a prompt that does not fit is a dead letter"),
    **_fields("online", _BOTH, "thinking_token_budget", neutral=(-1,), note="bulk takes no response apart"),
    **_fields("online", _CHAT, "include_reasoning", neutral=(True,), note="bulk takes no response apart"),
    **_fields("ignored", _BOTH, "user"),
    **_fields("ignored", _CHAT, "metadata", "store", "service_tier", "safety_identifier", "prediction"),
    **_fields("ignored", _CHAT, "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    **_fields("ignored", _BOTH, "cache_salt", "request_id", "session_id", note="the endpoint gives its own"),
    **_fields("refused", _BOTH, "priority", neutral=(0,), note="requests are served as they come"),
    **_fields("refused", _BOTH, "vllm_xargs", neutral=({},), note="engines have no extensions that read it"),
    **_fields("refused", _BOTH, "use_beam_search", neutral=(False,), note=_NO_BEAMS),
    **_fields("refused", _BOTH, "length_penalty", neutral=(1,), note=_NO_BEAMS),
    **_fields("refused", _BOTH, "kv_transfer_params", "ec_transfer_params", note=_OF_THE_ENGINES),
    **_fields("refused", _BOTH, "routed_experts_prompt_start", neutral=(0,), note="engines return no routing"),
    **_fields("refused", _BOTH, "return_token_offsets", neutral=(False,), note=_OF_RENDER),
    **_fields("refused", _CHAT, "return_assistant_tokens_mask", neutral=(False,), note=_OF_RENDER),
    **_fields("refused", _CHAT, "chat_template", note="the model's own template is used"),
    **_fields("refused", _CHAT, "media_io_kwargs", "mm_processor_kwargs", note=_OF_THE_OPERATOR),
    **_fields("refused", _CHAT, "function_call", neutral=("none",), note="say it as tool_choice"),
    **_fields("refused", _CHAT, "functions", neutral=([],), note="say them as tools"),
    **_fields("refused", _CHAT, "audio", note="models here answer in text"),
    **_fields("refused", _CHAT, "modalities", neutral=(["text"],), note="models here answer in text"),
    **_fields("refused", _CHAT, "moderation", note="nothing here moderates"),
    **_fields("refused", _CHAT, "web_search_options", note="nothing here searches"),
    **_fields("refused", _CHAT, "verbosity", neutral=("medium",), note="say it in a message"),
    **_fields("refused", _COMPLETIONS, "prompt_embeds", note="prompts are text or token ids"),
    **_fields("refused", _COMPLETIONS, "suffix", neutral=("",), note="only a prompt can be completed"),
    **_fields("refused", _COMPLETIONS, "best_of", neutral=(1,), note="engines make as many responses as n says"),
}  # fmt: skip
