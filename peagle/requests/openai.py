"""OpenAI's chat completions and completions: request bodies, responses, batch lines."""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peagle.errors import shown
from peagle.plain_json import logprob_number
from peagle.requests.fields import CHAT_URL, refused_field
from peagle.requests.sampling import MAX_LOGPROBS, RequestSampling, parse_overrides

_PARSER_FIELDS = ("tools", "tool_choice", "parallel_tool_calls", "include_reasoning", "chat_template_kwargs")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A parsed request body.

    Attributes:
        content: messages, a string or token ids.
        template: variables for the chat template, including `tools`.
        add_special_tokens: None means False for chats and True for completions.
        parsing: fields for vLLM's tool-call and reasoning parsers; None for completions, or if no parser is configured.
    """

    content: Any
    is_chat: bool
    template: dict[str, Any] = field(default_factory=dict)
    add_special_tokens: bool | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    parsing: dict[str, Any] | None = None


class _InvalidField(Exception):  # noqa: N818
    """An error in a field of a body. The message starts with the field's name."""


def parse_body(
    url: str, body: Mapping[str, Any], *, has_tool_parser: bool = False, has_parser: bool = False
) -> Body | str:
    """Return the parsed body, or an error message. Null counts as not set.

    Args:
        has_tool_parser: whether a parser for tool calls is configured.
        has_parser: whether any parser is configured.
    """
    is_chat = url == CHAT_URL
    set_fields = {key: value for key, value in body.items() if value is not None}
    if refused := refused_field(url, set_fields, in_bulk=True, has_parser=has_parser):
        if refused.hint is not None:
            return f"body: {refused}"
        return f"body.{refused.field}: {shown(refused.value)} is not supported: {refused.why}"
    source = "messages" if is_chat else "prompt"
    if source not in set_fields:
        return f"body: the request has no {source}"
    try:
        return Body(
            content=set_fields[source] if is_chat else _single_prompt(set_fields[source]),
            is_chat=is_chat,
            template=_template(set_fields, has_tool_parser=has_tool_parser) if is_chat else {},
            add_special_tokens=_flag(set_fields, "add_special_tokens"),
            sampling=_sampling(set_fields, is_chat),
            parsing={name: set_fields[name] for name in _PARSER_FIELDS if name in set_fields}
            if is_chat and has_parser
            else None,
        )
    except _InvalidField as error:
        return f"body.{error}"


def template_error(arguments: Any) -> str | None:
    """Return an error message for invalid `chat_template_kwargs`, or None."""
    if not isinstance(arguments, dict):
        return f"must be an object, not {shown(arguments)}"
    refused = next((name for name in ("chat_template", "tokenize") if name in arguments), None)
    return refused and f"{refused} is not supported: the model's own template is used"


def _single_prompt(prompt: Any) -> Any:
    """Return a string or token ids. The API also accepts a list of prompts, but a row has only one prompt."""
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], str | list):
        return prompt
    if len(prompt) > 1:
        raise _InvalidField(f"prompt: has {len(prompt)} prompts instead of one: use a line for each prompt")
    return prompt[0]


def _template(set_fields: Mapping[str, Any], *, has_tool_parser: bool) -> dict[str, Any]:
    """Return the variables of the chat template, as in vLLM."""
    arguments = set_fields.get("chat_template_kwargs", {})
    if error := template_error(arguments):
        raise _InvalidField(f"chat_template_kwargs: {error}")
    flags = ("add_generation_prompt", "continue_final_message")
    template = {**arguments, **{name: _flag(set_fields, name) for name in flags if name in set_fields}}
    if template.get("continue_final_message") and template.get("add_generation_prompt", True):
        raise _InvalidField("continue_final_message: requires add_generation_prompt: false")
    if "reasoning_effort" in set_fields:
        if (effort := set_fields["reasoning_effort"]) not in EFFORTS:
            raise _InvalidField(f"reasoning_effort: must be one of {', '.join(EFFORTS)}, not {shown(effort)}")
        template = {"enable_thinking": effort != "none", **template, "reasoning_effort": effort}
    if (documents := set_fields.get("documents")) is not None:
        is_list = isinstance(documents, list) and all(isinstance(document, dict) for document in documents)
        if not is_list or not all(isinstance(text, str) for document in documents for text in document.values()):
            raise _InvalidField(f"documents: must be a list of objects with string values, not {shown(documents)}")
        template["documents"] = documents
    if tools := set_fields.get("tools"):
        template["tools"] = _tools(tools)
        if set_fields.get("tool_choice") != "none" and not has_tool_parser:
            raise _InvalidField('tools: requires a tool_call_parser, or tool_choice: "none"')
    return template


def _flag(set_fields: Mapping[str, Any], name: str) -> bool | None:
    """Return a boolean field; None if it is not set."""
    value = set_fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise _InvalidField(f"{name}: must be true or false, not {shown(value)}")
    return value


def _tools(tools: Any) -> list[dict[str, Any]]:
    """Return the tools with all keys that vLLM passes to a template."""
    functions = []
    for tool in tools if isinstance(tools, list) else [tools]:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            form = '{"type": "function", "function": {"name": ...}}'
            raise _InvalidField(f"tools: each must be {form}, not {shown(tool)}")
        fields = {"name": function["name"], "description": None, "parameters": None}
        for key in ("description", "parameters", "strict"):
            if function.get(key) is not None:
                fields[key] = function[key]
        functions.append({"type": "function", "function": fields})
    return functions


def _sampling(set_fields: Mapping[str, Any], is_chat: bool) -> dict[str, Any]:
    values = {key: value for key, value in set_fields.items() if key in RequestSampling.model_fields}
    values.pop("json_schema", None)
    if "max_completion_tokens" in set_fields:
        values["max_tokens"] = set_fields["max_completion_tokens"]
    if is_chat:
        is_requested, num_top = set_fields.get("logprobs", False), set_fields.get("top_logprobs", 0)
        if not isinstance(is_requested, bool):
            raise _InvalidField(f"logprobs: must be true or false, not {shown(is_requested)}")
        if type(num_top) is not int or not 0 <= num_top <= MAX_LOGPROBS:
            raise _InvalidField(f"top_logprobs: must be an integer from 0 to {MAX_LOGPROBS}, not {shown(num_top)}")
        if num_top and not is_requested:
            raise _InvalidField("top_logprobs: requires logprobs: true")
        values["logprobs"] = num_top if is_requested else None
    values |= _constraint(set_fields.get("response_format", {"type": "text"}))
    parsed = parse_overrides(values)
    if isinstance(parsed, str):
        raise _InvalidField(parsed)
    return parsed


def _constraint(response_format: Any) -> dict[str, Any]:
    """Return the sampling parameters for a response format."""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    if kind == "structural_tag":
        return {"structured_outputs": {"structural_tag": json.dumps(response_format)}}
    if kind != "json_schema":
        kinds = "text, json_object, json_schema or structural_tag"
        raise _InvalidField(f"response_format: its type must be {kinds}, not {shown(kind)}")
    named_schema = response_format.get("json_schema")
    schema = named_schema.get("schema") if isinstance(named_schema, dict) else None
    if not isinstance(schema, dict):
        raise _InvalidField("response_format: json_schema requires a schema that is an object")
    return {"json_schema": schema}


ANSWER_COLUMNS = frozenset(
    {"id", "response", "finish_reason", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "model",
     "completions", "reasoning", "tool_calls"}
)  # fmt: skip
# Reasons of dead letters with an invalid request.
_REQUEST_FAULTS = frozenset(
    {"invalid", "invalid_row", "invalid_prompt", "invalid_messages", "empty_prompt", "prompt_too_long",
     "template_error", "refused"}
)  # fmt: skip


def output_line(row: Mapping[str, Any], *, custom_id: str, is_chat: bool, created: int, run_id: str) -> dict[str, Any]:
    """Return a line of the output file. The line only depends on the arguments, so each export of a run is identical.

    Args:
        row: an output row of a run, with the columns of `ANSWER_COLUMNS` that exist in the run.
        created: Unix time of the response.
        run_id: makes ids unique across runs.
    """
    response_id = _response_id(run_id, row["id"])
    body = answer(row, response_id, is_chat=is_chat, created=created)
    response = {"status_code": 200, "request_id": f"req_{response_id}", "body": body}
    return {"id": f"batch_req_{response_id}", "custom_id": custom_id, "response": response, "error": None}


def error_line(dead_letter: Mapping[str, Any], *, custom_id: str | None, run_id: str) -> dict[str, Any]:
    """Return a line of the error file. Only an invalid request has a response (400); otherwise `error` is set."""
    response_id = _response_id(run_id, dead_letter["id"])
    line = {"id": f"batch_req_{response_id}", "custom_id": custom_id, "response": None, "error": None}
    if dead_letter["reason"] not in _REQUEST_FAULTS:
        return line | {"error": {"code": dead_letter["reason"], "message": dead_letter["message"]}}
    body = error_body(dead_letter["message"], code=dead_letter["reason"])
    return line | {"response": {"status_code": 400, "request_id": f"req_{response_id}", "body": body}}


def error_body(
    message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: Any = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _response_id(run_id: str, row_id: str) -> str:
    return hashlib.sha256(f"{run_id}/{row_id}".encode()).hexdigest()[:32]


def _parsed_message(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat message that vLLM's parsers have filled; {} without parsers."""
    if "tool_calls" not in row:
        return {}
    message: dict[str, Any] = {"content": row["response"]}
    if row["reasoning"] is not None:
        message["reasoning"] = row["reasoning"]
    if row["tool_calls"]:
        calls = [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
            for c in row["tool_calls"]
        ]
        message |= {"content": row["response"] or None, "tool_calls": calls}
    return message


def answer(row: Mapping[str, Any], response_id: str, *, is_chat: bool, created: int) -> dict[str, Any]:
    """Return the complete response for an output row (see `output_line`)."""
    only_choice = {"text": row["response"], "finish_reason": row["finish_reason"], "logprobs": None}
    choices: list[dict[str, Any]] = []
    for index, completion in enumerate(row["completions"] or [only_choice]):
        if is_chat:
            message = {"role": "assistant", "content": completion["text"], "refusal": None}
            content: Any = {"message": message | _parsed_message(row)}
            logprobs = _chat_logprobs(completion["logprobs"])
        else:
            content, logprobs = {"text": completion["text"]}, _logprobs(completion["logprobs"])
        # Only the row's own reason can be "tool_calls".
        reason = row["finish_reason"] if index == 0 else completion["finish_reason"]
        choices.append({"index": index, **content, "logprobs": logprobs, "finish_reason": reason})
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{response_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": row["model"],
        "choices": choices,
        "usage": usage(row["num_prompt_tokens"], row["num_output_tokens"], row["num_cached_tokens"]),
    }


def chunk(
    choices: Sequence[Mapping[str, Any]], response_id: str, *, is_chat: bool, created: int, model: str
) -> dict[str, Any]:
    """Return an event of a streamed response, with choices made by `chunk_choice`.

    The caller adds usage to the last event, which has no choices.
    """
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{response_id}",
        "object": "chat.completion.chunk" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": list(choices),
    }


def chunk_choice(
    index: int,
    text: str,
    finish_reason: str | None,
    *,
    is_chat: bool,
    logprobs: Sequence[Mapping[str, Any]] | None = None,
    offset: int = 0,
) -> dict[str, Any]:
    """Return a choice of a `chunk`: its new text, and its finish reason if it is finished.

    Args:
        logprobs: logprobs of the new tokens, as in an output row; None if not requested.
        offset: number of characters in earlier chunks.
    """
    content = {"delta": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    converted = _chat_logprobs(logprobs) if is_chat else _logprobs(logprobs, offset)
    return {"index": index, **content, "logprobs": converted, "finish_reason": finish_reason}


def usage(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int | None = None) -> dict[str, Any]:
    """Return the usage of a response or a choice. `num_cached_tokens` is None if unknown."""
    details = None if num_cached_tokens is None else {"cached_tokens": num_cached_tokens}
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": details,
    }


def _chat_logprobs(tokens: Sequence[Mapping[str, Any]] | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    content = [{**_token(token), "top_logprobs": [_token(top) for top in token["top"]]} for token in tokens]
    return {"content": content, "refusal": None}


def _token(token: Mapping[str, Any]) -> dict[str, Any]:
    text = token["token"]
    return {"token": text, "logprob": logprob_number(token["logprob"]), "bytes": list(text.encode())}


def _logprobs(tokens: Sequence[Mapping[str, Any]] | None, offset: int = 0) -> dict[str, Any] | None:
    if tokens is None:
        return None
    offsets = list(itertools.accumulate((len(token["token"]) for token in tokens), initial=offset))
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [logprob_number(token["logprob"]) for token in tokens],
        "top_logprobs": [{top["token"]: logprob_number(top["logprob"]) for top in token["top"]} for token in tokens],
        "text_offset": offsets[:-1],  # the last one is the end of the text
    }
