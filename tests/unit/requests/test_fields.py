"""Compares the table of request fields with the schemas of vLLM and OpenAI, and with docs/requests.md.

With WRITE_DOCS=1 (`make docs-requests`), the table of that page is written instead.
"""

import json
import os
import re
import typing
from pathlib import Path

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from peagle.requests.fields import CHAT_URL, COMPLETIONS_URL, FIELDS, has_no_effect, refused_field
from peagle.requests.openai import EFFORTS, parse_body
from peagle.requests.sampling import RequestSampling
from peagle.tables import markdown

PAGE = Path(__file__).parents[3] / "docs" / "requests.md"
OPENAI_MODULES = {CHAT_URL: chat_create_params, COMPLETIONS_URL: completion_create_params}
MINIMAL_BODY = {CHAT_URL: {"messages": [{"role": "user", "content": "x"}]}, COMPLETIONS_URL: {"prompt": "x"}}


def vllm_schema(url):
    """Return vLLM's model of a request body."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    return {CHAT_URL: ChatCompletionRequest, COMPLETIONS_URL: CompletionRequest}[url]


def openai_fields(url):
    """Return the fields that OpenAI's client sends."""
    module = OPENAI_MODULES[url]
    kinds = (module.CompletionCreateParamsNonStreaming, module.CompletionCreateParamsStreaming)
    return set().union(*(typing.get_type_hints(kind) for kind in kinds))


@pytest.mark.parametrize("url", OPENAI_MODULES)
def test_table_has_all_fields_of_vllm_and_openai(url):
    """If an upgrade adds a field, this test fails until the table says how the field is used."""
    in_table = {name for name, field in FIELDS.items() if url in field.urls}
    assert in_table == set(vllm_schema(url).model_fields) | openai_fields(url)


@pytest.mark.parametrize("url", OPENAI_MODULES)
def test_honoured_fields_exist_in_vllm(url):
    honoured = {
        name for name, field in FIELDS.items() if url in field.urls and field.use in ("honoured", "parsed", "online")
    }
    assert honoured <= set(vllm_schema(url).model_fields)


def fields_with(name):
    """Return the field with a value that has an effect, and the other fields that it requires."""
    examples = {
        "model": "m", "stop": ["x"], "stop_token_ids": [1], "bad_words": ["x"], "logit_bias": {"1": 1},
        "allowed_token_ids": [1], "repetition_detection": {"max_pattern_size": 2, "min_count": 2}, "top_logprobs": 1,
        "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "x"}, "documents": [{"text": "x"}],
        "reasoning_effort": "low", "chat_template_kwargs": {"a": 1}, "add_generation_prompt": False, "min_tokens": 1,
        "tools": [{"type": "function", "function": {"name": "f"}}], "seed": 1, "n": 2, "max_tokens": 2, "top_k": 5,
        "max_completion_tokens": 2, "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "temperature": 0.5, "top_p": 0.5, "min_p": 0.5, "repetition_penalty": 1.5, "frequency_penalty": 1,
        "presence_penalty": 1,
    }  # fmt: skip
    required_with = {
        "top_logprobs": {"logprobs": True}, "tools": {"tool_choice": "none"},
        "continue_final_message": {"add_generation_prompt": False},
    }  # fmt: skip
    return {name: examples.get(name, True), **required_with.get(name, {})}


@pytest.mark.parametrize(
    ("url", "name"),
    [(url, name) for name, field in FIELDS.items() for url in field.urls if name not in ("messages", "prompt")],
)
def test_bulk_runs_honour_ignore_or_refuse_every_field(url, name):
    plain = parse_body(url, MINIMAL_BODY[url])
    values = fields_with(name) if name != "logprobs" else {name: True if url == CHAT_URL else 1}
    body = parse_body(url, {**MINIMAL_BODY[url], **values})
    use = FIELDS[name].use
    if (
        use in ("parsed", "online", "refused")
        and not has_no_effect(name, values[name])
        and values[name] not in FIELDS[name].neutral
    ):
        error = body
        assert error.startswith(f"body.{name}: ")
        assert error.endswith(f" is not supported: {FIELDS[name].note}")
    else:
        assert (body == plain) == (use != "honoured" or name == "model")
    for value in (None, *FIELDS[name].neutral):
        assert parse_body(url, {**MINIMAL_BODY[url], name: value}) == plain
    if use == "parsed":
        parsed = parse_body(url, {**MINIMAL_BODY[url], **values}, has_tool_parser=True, has_parser=True)
        assert parsed.parsing == values


@pytest.mark.parametrize("url", OPENAI_MODULES)
def test_endpoints_refuse_unknown_and_unsupported_fields(url):
    for name, field in FIELDS.items():
        refused = refused_field(url, {name: object()}, in_bulk=False)
        if url not in field.urls:
            assert refused.hint is not None
        else:
            assert (refused is not None) == (field.use == "refused")


def test_sampling_parameters_of_rows_are_honoured_fields():
    """Rows use vLLM's field names, plus peagle's own `json_schema`."""
    names = set(RequestSampling.model_fields) - {"json_schema"}
    assert names == {name for name, field in FIELDS.items() if field.use == "honoured" and len(field.urls) == 2} - {
        "model",
        "response_format",
        "add_special_tokens",
    }


def test_reasoning_efforts_match_vllm():
    (literal, _) = typing.get_args(vllm_schema(CHAT_URL).model_fields["reasoning_effort"].annotation)
    assert typing.get_args(literal) == EFFORTS


def test_constraint_names_match_vllm():
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    for name, kind in (
        ("structured_outputs", StructuredOutputsParams),
        ("repetition_detection", RepetitionDetectionParams),
    ):
        names = {field for field in kind.__dataclass_fields__ if not field.startswith("_")}
        message = parse_body(COMPLETIONS_URL, {"prompt": "x", name: {"none": 1}})
        assert all(field in message for field in names)


def test_docs_page_has_the_table():
    support = {
        "honoured": ("yes", "yes"),
        "parsed": ("yes", "with a parser"),
        "online": ("yes", "no"),
        "ignored": ("no effect",) * 2,
        "refused": ("no", "no"),
    }
    routes = {CHAT_URL: "chats", COMPLETIONS_URL: "completions"}
    rows = [("field", "of", "online", "bulk, batches", "always accepted", "note")]
    for name, field in sorted(FIELDS.items()):
        routes_of_field = "both" if len(field.urls) == 2 else routes[field.urls[0]]
        neutral = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral)
        rows.append((f"`{name}`", routes_of_field, *support[field.use], neutral, field.note))
    page = PAGE.read_text()
    table = "\n".join(markdown(rows)) + "\n"
    updated = re.sub(r"\| field \| of .*?\n(?=\n|\Z)", lambda _: table, page, flags=re.DOTALL)
    if os.environ.get("WRITE_DOCS"):
        PAGE.write_text(updated)
    assert PAGE.read_text() == updated, "docs/requests.md is out of date: make docs-requests"
