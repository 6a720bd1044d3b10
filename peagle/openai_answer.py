"""Rows and dead letters as the lines of OpenAI's batch output and error files.

It knows both shapes and no file. Every value follows from the row, so the same run gives the same bytes.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from peagle.plain_json import logprob_number

ANSWER_COLUMNS = frozenset(
    {"id", "response", "finish_reason", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "model",
     "completions"}
)  # fmt: skip
_REQUEST_FAULTS = frozenset(
    {"invalid", "invalid_row", "invalid_prompt", "invalid_messages", "empty_prompt", "prompt_too_long",
     "template_error", "refused"}
)  # fmt: skip


def output_line(row: Mapping[str, Any], *, custom_id: str, is_chat: bool, created: int, run_id: str) -> dict[str, Any]:
    """A line of the output file.

    Args:
        row: an output row of a run, with `ANSWER_COLUMNS` at least.
        created: when it was answered, in Unix seconds.
        run_id: makes ids unique among runs.
    """
    key = _key(run_id, row["id"])
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{key}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": row["model"],
        "choices": [(_chat_choice if is_chat else _choice)(i, c) for i, c in enumerate(_completions(row))],
        "usage": _usage(row),
    }
    response = {"status_code": 200, "request_id": f"req_{key}", "body": body}
    return {"id": f"batch_req_{key}", "custom_id": custom_id, "response": response, "error": None}


def error_line(letter: Mapping[str, Any], *, custom_id: str | None, run_id: str) -> dict[str, Any]:
    """A line of the error file: a bad request has a response that says so, as from the API; anything else an error."""
    key = _key(run_id, letter["id"])
    line = {"id": f"batch_req_{key}", "custom_id": custom_id, "response": None, "error": None}
    if letter["reason"] not in _REQUEST_FAULTS:
        return line | {"error": {"code": letter["reason"], "message": letter["message"]}}
    error = {
        "message": letter["message"],
        "type": "invalid_request_error",
        "param": None,
        "code": letter["reason"],
    }
    return line | {"response": {"status_code": 400, "request_id": f"req_{key}", "body": {"error": error}}}


def _key(run_id: str, row_id: str) -> str:
    return hashlib.sha256(f"{run_id}/{row_id}".encode()).hexdigest()[:32]


def _completions(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return row["completions"] or [{"text": row["response"], "finish_reason": row["finish_reason"], "logprobs": None}]


def _chat_choice(index: int, completion: Mapping[str, Any]) -> dict[str, Any]:
    logprobs = None
    if completion["logprobs"] is not None:
        content = [
            {**_token(token), "top_logprobs": [_token(top) for top in token["top"]]} for token in completion["logprobs"]
        ]
        logprobs = {"content": content, "refusal": None}
    return {
        "index": index,
        "message": {"role": "assistant", "content": completion["text"], "refusal": None},
        "logprobs": logprobs,
        "finish_reason": completion["finish_reason"],
    }


def _token(token: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "token": token["token"],
        "logprob": logprob_number(token["logprob"]),
        "bytes": list(token["token"].encode()),
    }


def _choice(index: int, completion: Mapping[str, Any]) -> dict[str, Any]:
    logprobs = None
    if (tokens := completion["logprobs"]) is not None:
        offsets = [0]
        for token in tokens:
            offsets.append(offsets[-1] + len(token["token"]))
        logprobs = {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [logprob_number(token["logprob"]) for token in tokens],
            "top_logprobs": [
                {top["token"]: logprob_number(top["logprob"]) for top in token["top"]} for token in tokens
            ],
            "text_offset": offsets[:-1],
        }
    return {
        "index": index,
        "text": completion["text"],
        "logprobs": logprobs,
        "finish_reason": completion["finish_reason"],
    }


def _usage(row: Mapping[str, Any]) -> dict[str, Any]:
    prompt, output, cached = row["num_prompt_tokens"], row["num_output_tokens"], row["num_cached_tokens"]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }
