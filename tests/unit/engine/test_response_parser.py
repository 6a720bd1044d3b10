"""Reasoning and tool calls of rows, with vLLM's own parsers."""

import json

import pytest

from peagle.engine.interface import CompletionOutput, Generation, RequestRefused
from peagle.engine.response_parser import ResponseParser, check_parsers
from peagle.errors import ConfigError

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def generation(text):
    return Generation(
        text=text, finish_reason="stop", num_prompt_tokens=3, num_cached_tokens=0, num_output_tokens=9,
        speculation=None,
        ttft_s=None, latency_s=None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(chat_target):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chat_target)
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def test_tool_calls_are_separated_from_text(tokenizer):
    parser = ResponseParser(tokenizer, tool_call_parser="hermes", reasoning_parser=None)
    parsed = parser.parse(generation(f"Let me see. {CALL}"), {"tools": [TOOL]})
    (call,) = parsed.tool_calls
    assert (call.name, json.loads(call.arguments), bool(call.id)) == ("weather", {"city": "Paris"}, True)
    assert (parsed.text.strip(), parsed.finish_reason, parsed.reasoning) == ("Let me see.", "tool_calls", None)
    assert parsed.completions == (
        CompletionOutput(text=f"Let me see. {CALL}", finish_reason="stop", num_output_tokens=9),
    )


@pytest.mark.parametrize("options", [{}, {"tools": [TOOL], "tool_choice": "none"}])
def test_text_is_unchanged_if_no_tool_may_be_called(tokenizer, options):
    parser = ResponseParser(tokenizer, tool_call_parser="hermes", reasoning_parser=None)
    parsed = parser.parse(generation(CALL), options)
    assert (parsed.text, parsed.tool_calls, parsed.finish_reason) == (CALL, (), "stop")
    assert "structured_outputs" not in parser.sampling(options)


def test_required_tools_are_a_constraint(tokenizer):
    parser = ResponseParser(tokenizer, tool_call_parser="hermes", reasoning_parser=None)
    options = {"tools": [TOOL], "tool_choice": "required"}
    sampling = parser.sampling(options)
    assert "weather" in json.dumps(sampling["structured_outputs"])
    assert sampling["json_schema"] is None
    parsed = parser.parse(generation(CALL), options)
    assert [call.name for call in parsed.tool_calls] == ["weather"]
    assert (parsed.text, parsed.finish_reason) == ("", "tool_calls")


def test_reasoning_is_separated(tokenizer):
    parser = ResponseParser(tokenizer, tool_call_parser=None, reasoning_parser="deepseek_r1")
    text = "<think>2 and 2</think>4"
    assert (parser.parse(generation(text), {}).reasoning, parser.parse(generation(text), {}).text) == ("2 and 2", "4")
    hidden = parser.parse(generation(text), {"include_reasoning": False})
    assert (hidden.reasoning, hidden.text) == (None, "4")


def test_invalid_tools_are_refused(tokenizer):
    parser = ResponseParser(tokenizer, tool_call_parser="hermes", reasoning_parser=None)
    with pytest.raises(RequestRefused, match="tools: "):
        parser.sampling({"tools": [{"type": "function"}]})


@pytest.mark.parametrize("key", ["tool_call_parser", "reasoning_parser"])
def test_unknown_parser_is_refused(key):
    check_parsers({"tool_call_parser": "hermes", "reasoning_parser": "qwen3"})
    check_parsers({})
    with pytest.raises(ConfigError, match=f"{key} 'hermess': vLLM does not have this parser") as info:
        check_parsers({key: "hermess"})
    assert "qwen3" in info.value.hint
