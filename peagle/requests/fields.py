"""The fields of OpenAI's and vLLM's chat and completion requests, and their support online and in bulk.

`docs/requests.md` is generated from `FIELDS`. Values are validated elsewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from peagle.errors import did_you_mean, shown

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
URLS = (CHAT_URL, COMPLETIONS_URL)
Use = Literal["honoured", "parsed", "online", "ignored", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of a request.

    Attributes:
        use: "parsed" needs one of vLLM's parsers in bulk; "online" is refused in bulk; "ignored" has no effect on
            responses and is accepted everywhere.
        neutral: values that have no effect, and are accepted even if the field is refused. Null is always accepted.
        note: why the field is refused, or a remark.
    """

    use: Use
    urls: tuple[str, ...]
    neutral: tuple[Any, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A refused field. `hint` suggests a known field if this one is unknown."""

    field: str
    value: Any
    why: str
    hint: str | None = None

    def __str__(self) -> str:
        if self.hint is not None:
            return f"unknown parameter {shown(self.field)}: {self.hint}"
        return f"{self.field} is not supported: {self.why}"


def refused_field(url: str, values: Mapping[str, Any], *, in_bulk: bool, has_parser: bool = False) -> Refused | None:
    """Return the first refused field of a request body, or None. Null counts as not set.

    >>> str(refused_field("/v1/completions", {"prompt": "x", "best_of": 3}, in_bulk=False))
    'best_of is not supported: use n'
    """
    for name, value in values.items():
        if value is None:
            continue
        field = FIELDS.get(name)
        if field is None or url not in field.urls:
            supported = [
                known_name
                for known_name, known_field in FIELDS.items()
                if url in known_field.urls and known_field.use in ("honoured", "parsed", "online")
            ]
            return Refused(field=name, value=value, why="unknown field", hint=did_you_mean(name, supported))
        in_bulk_refused = field.use == "online" or (field.use == "parsed" and not has_parser)
        is_refused = field.use == "refused" or (in_bulk and in_bulk_refused)
        if is_refused and value not in field.neutral:
            return Refused(field=name, value=value, why=field.note)
    return None


def has_no_effect(name: str, value: Any) -> bool:
    """Return whether a field can be dropped: its value is null, or neutral and its use is "honoured" or "refused"."""
    if value is None:
        return True
    field = FIELDS[name]
    return field.use in ("honoured", "refused") and value in field.neutral


_BOTH = URLS
_CHAT = (CHAT_URL,)
_COMPLETIONS = (COMPLETIONS_URL,)
_NO_STREAM = "only online answers can be streamed"
_NEEDS_TOOLS = "in bulk only with a tool_call_parser"
_ONLY_TEXT = "a row's response is only text"
_RESERVED = "reserved for the engines"
_OPERATOR_ONLY = "the endpoint's operator configures media"
_NO_BEAM_SEARCH = "beam search is not supported"
_RENDER_ONLY = "only for vLLM's render routes"


def _fields(
    use: Use, urls: tuple[str, ...], *names: str, note: str = "", neutral: tuple[Any, ...] = ()
) -> dict[str, Field]:
    return {name: Field(use=use, urls=urls, neutral=neutral, note=note) for name in names}


FIELDS: dict[str, Field] = {
    **_fields("honoured", _CHAT, "messages", note="text, tool calls, and online the media that the model supports"),
    **_fields("honoured", _COMPLETIONS, "prompt", note="in bulk only one: text, token ids, or a list with one of them"),
    **_fields("honoured", _BOTH, "model", note="ignored in bulk"),
    **_fields("honoured", _BOTH, "max_tokens", "n", "temperature", "top_p", "repetition_penalty"),
    **_fields("honoured", _BOTH, "top_k", note="0 and -1 keep all tokens"),
    **_fields("honoured", _BOTH, "seed", note="on a CPU only with temperature 0"),
    **_fields("honoured", _BOTH, "frequency_penalty", "presence_penalty", "stop", "stop_token_ids", "bad_words"),
    **_fields("honoured", _BOTH, "logit_bias", "min_p", note="disables drafts; refused on a GPU with a drafter"),
    **_fields("honoured", _BOTH, "allowed_token_ids", "min_tokens", "ignore_eos", "include_stop_str_in_output"),
    **_fields("honoured", _BOTH, "skip_special_tokens", "spaces_between_special_tokens", "repetition_detection"),
    **_fields("honoured", _BOTH, "logprobs", note="up to 20"),
    **_fields("honoured", _BOTH, "response_format", "structured_outputs", "add_special_tokens"),
    **_fields("honoured", _CHAT, "max_completion_tokens", "top_logprobs", "documents", "reasoning_effort"),
    **_fields("honoured", _CHAT, "chat_template_kwargs", note="except chat_template and tokenize"),
    **_fields("honoured", _CHAT, "add_generation_prompt", "continue_final_message"),
    **_fields("honoured", _CHAT, "tools", neutral=([],),
              note='in bulk only with a tool_call_parser, or tool_choice "none"'),
    **_fields("parsed", _CHAT, "tool_choice", neutral=("none",), note=_NEEDS_TOOLS),
    **_fields("parsed", _CHAT, "parallel_tool_calls", neutral=(True, False), note=_NEEDS_TOOLS),
    **_fields("online", _BOTH, "stream", neutral=(False,), note=_NO_STREAM),
    **_fields("online", _BOTH, "stream_options", "stream_interval", note=_NO_STREAM),
    **_fields("online", _BOTH, "echo", "return_token_ids", "return_tokens_as_token_ids", neutral=(False,),
              note=_ONLY_TEXT),
    **_fields("online", _CHAT, "return_prompt_text", neutral=(False,), note=_ONLY_TEXT),
    **_fields("online", _BOTH, "prompt_logprobs", "logprob_token_ids", note=_ONLY_TEXT),
    **_fields("online", _BOTH, "truncate_prompt_tokens", "truncation_side",
              note="a prompt that is too long becomes a dead letter"),
    **_fields("online", _BOTH, "thinking_token_budget", neutral=(-1,), note="only online requests have it"),
    **_fields("parsed", _CHAT, "include_reasoning", neutral=(True,), note="in bulk only with a reasoning_parser"),
    **_fields("ignored", _BOTH, "user"),
    **_fields("ignored", _CHAT, "metadata", "store", "service_tier", "safety_identifier", "prediction"),
    **_fields("ignored", _CHAT, "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    **_fields("ignored", _BOTH, "cache_salt", "request_id", "session_id", note="the endpoint sets its own"),
    **_fields("refused", _BOTH, "priority", neutral=(0,), note="requests are served in order"),
    **_fields("refused", _BOTH, "vllm_xargs", neutral=({},), note="engines have no extensions that read it"),
    **_fields("refused", _BOTH, "use_beam_search", neutral=(False,), note=_NO_BEAM_SEARCH),
    **_fields("refused", _BOTH, "length_penalty", neutral=(1,), note=_NO_BEAM_SEARCH),
    **_fields("refused", _BOTH, "kv_transfer_params", "ec_transfer_params", note=_RESERVED),
    **_fields("refused", _BOTH, "routed_experts_prompt_start", neutral=(0,), note="engines return no routing"),
    **_fields("refused", _BOTH, "return_token_offsets", neutral=(False,), note=_RENDER_ONLY),
    **_fields("refused", _CHAT, "return_assistant_tokens_mask", neutral=(False,), note=_RENDER_ONLY),
    **_fields("refused", _CHAT, "chat_template", note="the model's own template is used"),
    **_fields("refused", _CHAT, "media_io_kwargs", "mm_processor_kwargs", note=_OPERATOR_ONLY),
    **_fields("refused", _CHAT, "function_call", neutral=("none",), note="use tool_choice"),
    **_fields("refused", _CHAT, "functions", neutral=([],), note="use tools"),
    **_fields("refused", _CHAT, "audio", note="models answer in text"),
    **_fields("refused", _CHAT, "modalities", neutral=(["text"],), note="models answer in text"),
    **_fields("refused", _CHAT, "moderation", note="moderation is not supported"),
    **_fields("refused", _CHAT, "web_search_options", note="web search is not supported"),
    **_fields("refused", _CHAT, "verbosity", neutral=("medium",), note="put it into a message"),
    **_fields("refused", _COMPLETIONS, "prompt_embeds", note="prompts are text or token ids"),
    **_fields("refused", _COMPLETIONS, "suffix", neutral=("",), note="insertion is not supported"),
    **_fields("refused", _COMPLETIONS, "best_of", neutral=(1,), note="use n"),
}  # fmt: skip
