"""vLLM's parsers of reasoning and tool calls, for rows in bulk. The endpoint's server applies the same parsers."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from peagle.engine.interface import CompletionOutput, FunctionCall, Generation, RequestFailed, RequestRefused
from peagle.errors import ConfigError

PARSER_KEYS = ("tool_call_parser", "reasoning_parser")


def has_parser(config: Mapping[str, Any]) -> bool:
    """Whether a configuration names a parser."""
    return any(config.get(key) for key in PARSER_KEYS)


def check_parsers(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if vLLM does not have these parsers. vLLM itself reports this only in the engine's log."""
    if not has_parser(config):
        return
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for key, manager in zip(PARSER_KEYS, (ToolParserManager, ReasoningParserManager), strict=True):
        names = manager.list_registered()
        if config.get(key) and config[key] not in names:
            raise ConfigError(
                f"{key} {config[key]!r}: vLLM does not have this parser", hint=f"choose from {', '.join(names)}"
            )


class ResponseParser:
    """Divides the text of a chat response into reasoning, tool calls and content; `tokenizer` is the target's."""

    def __init__(self, tokenizer: Any, *, tool_call_parser: str | None, reasoning_parser: str | None) -> None:
        from peagle.engine.vllm_internals import parser_class

        self._tokenizer = tokenizer
        self._calls_tools = tool_call_parser is not None
        self._parser_class = parser_class(tool_call_parser, reasoning_parser)

    def sampling(self, parsing: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sampling parameters of the parsers: constraints of tools, and whether to keep special tokens.

        Args:
            parsing: the request's fields that the parsers use, such as `tools`.

        Raises:
            RequestRefused: a tool is invalid.
        """
        request, parser = self._request(parsing)
        adjusted = parser.adjust_request(request)
        sampling: dict[str, Any] = {} if adjusted.skip_special_tokens else {"skip_special_tokens": False}
        if adjusted.structured_outputs is not None:
            constraint = asdict(adjusted.structured_outputs)
            constraints = {key: value for key, value in constraint.items() if key in _CONSTRAINTS and value is not None}
            sampling |= {"structured_outputs": constraints, "json_schema": None}
        return sampling

    def parse(self, generation: Generation, parsing: Mapping[str, Any]) -> Generation:
        """Return the generation with its text divided; `parsing` as for `sampling`."""
        from peagle.engine.vllm_internals import tool_call_id

        request, parser = self._request(parsing)
        try:
            reasoning, content, calls = parser.parse(generation.text, request, enable_auto_tools=self._calls_tools)
        except Exception as error:  # vLLM's parsers raise anything for a text that they do not expect
            raise RequestFailed(f"the parser failed on this response: {error!r}") from error
        undivided = CompletionOutput(
            text=generation.text,
            finish_reason=generation.finish_reason,
            num_output_tokens=generation.num_output_tokens,
        )
        is_call = bool(calls) and (request.tool_choice in (None, "auto", "required"))
        return replace(
            generation,
            text=content or "",
            finish_reason="tool_calls" if is_call else generation.finish_reason,
            completions=generation.completions or (undivided,),
            reasoning=reasoning if request.include_reasoning else None,
            tool_calls=tuple(
                FunctionCall(id=call.id or tool_call_id(), name=call.name, arguments=call.arguments)
                for call in calls or ()
            ),
        )

    def _request(self, parsing: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return vLLM's request and parser for these fields."""
        from peagle.engine.vllm_internals import chat_request

        try:
            request = chat_request(parsing)
        except ValueError as error:  # pydantic's, and vLLM's own
            raise RequestRefused(f"tools: {error}") from error
        kwargs = request.chat_template_kwargs or {}
        return request, self._parser_class(self._tokenizer, request.tools, chat_template_kwargs=kwargs)


_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
