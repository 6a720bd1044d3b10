"""Uses of vLLM 0.29's private names (docs/upstream.md), except those in `vllm_plugin.py` and `vllm_drafts.py`.

vLLM is imported in functions, after the environment variables that it reads have been set.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from peagle.engine.startup import TIMEOUT_PATTERN
from peagle.errors import EngineError
from peagle.speculation import SpeculationStats


def engine_dead_error() -> type[Exception]:
    """Return the exception that every request raises after vLLM's core has died."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return EngineDeadError  # type: ignore[no-any-return]


def request_error() -> type[Exception]:
    """Return the exception that vLLM raises if one request fails and the engine survives."""
    from vllm.v1.engine.exceptions import EngineGenerateError

    return EngineGenerateError  # type: ignore[no-any-return]


def generation_error() -> type[Exception]:
    """Return the exception of vLLM's API server for a response that ended with an engine error."""
    from vllm.exceptions import GenerationError

    return GenerationError  # type: ignore[no-any-return]


def refusal_of(field: str | None, message: str) -> Exception:
    """Return vLLM's exception for an invalid request, which its API server answers with 400."""
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError(message, parameter=field)  # type: ignore[no-any-return]


def refusal_errors() -> tuple[type[Exception], ...]:
    """Return vLLM's exceptions for an invalid request: its own classes in 0.29, ValueError in 0.24."""
    import vllm.exceptions

    classes = (getattr(vllm.exceptions, name, None) for name in ("VLLMClientError", "GracefulHTTPError"))
    return (ValueError, *filter(None, classes))


def client_text(error: BaseException) -> str:
    """Return the text of vLLM's exception for an invalid request, or a generic text if it would not help the client."""
    import vllm.exceptions

    if not hasattr(vllm.exceptions, "VLLMClientError"):  # vLLM 0.24 raises a ValueError
        return str(error)
    if isinstance(error, vllm.exceptions.VLLMError):
        return str(error)
    # vLLM 0.29 turns any exception of a chat template into a ValueError.
    template_error = error.__cause__ if type(error) is ValueError else error
    if type(template_error).__name__ == "TemplateError":
        return str(template_error)
    # Other exceptions have Python's text ("tuple indices must be integers"), which does not help a client.
    return "the engine cannot process this request: a field has an unexpected value"


def counters() -> list[Any]:
    """Return vLLM's Prometheus counters in this process, each with a `name` and a `value` or `values`."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    return list(get_metrics_snapshot())


def drafts_of(sequence: Any) -> SpeculationStats | None:
    """Return the draft statistics of a finished sequence, or None if vLLM does not report them (0.24)."""
    drafts = getattr(sequence, "spec_decode_metrics", None)
    if drafts is None:
        return None
    # `vllm_drafts` stores its own counts in `per_step_drafted`.
    return SpeculationStats.from_histogram(drafts.histogram, drafts.num_draft_tokens, drafts.per_step_drafted)


def model_runner(client: Any) -> str | None:
    """Return the model runner of an `AsyncLLM`, "V1" or "V2"; None if vLLM has only one."""
    is_v2 = getattr(client.vllm_config, "use_v2_model_runner", None)
    if is_v2 is None:
        return None
    return "V2" if is_v2 else "V1"


def before_each_request(client: Any, check: Callable[[Any, Any], Awaitable[None]]) -> None:
    """Make an `AsyncLLM` check each request before it reaches the engine core.

    vLLM has no hook that bulk runs and the endpoint share.

    Args:
        check: takes the prompt and the sampling parameters, and raises vLLM's exception to refuse the request.
    """
    add_request = client.add_request

    async def add_checked_request(request_id: str, prompt: Any, params: Any, *arguments: Any, **options: Any) -> Any:
        await check(prompt, params)
        return await add_request(request_id, prompt, params, *arguments, **options)

    client.add_request = add_checked_request


def vocabulary(vllm_config: Any, tokenizer: Any) -> str:
    """Return the vocabulary of vLLM's xgrammar backend, in xgrammar's JSON."""
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
    from vllm.v1.structured_output.utils import maybe_wrap_mistral_common_tokenizer

    backend = XgrammarBackend(
        vllm_config,
        tokenizer=maybe_wrap_mistral_common_tokenizer(tokenizer),
        vocab_size=vllm_config.model_config.get_vocab_size(),
    )
    # Every compiled grammar contains the vocabulary.
    serialized: str = backend.compiler.compile_regex("a").tokenizer_info.serialize_json()
    return serialized


def choices_to_grammar(choices: list[str]) -> str:
    from vllm.v1.structured_output.utils import choice_as_grammar

    return str(choice_as_grammar(choices))


def as_ebnf(grammar: str) -> str:
    """Return a grammar as vLLM passes it to xgrammar, which does not support Lark."""
    from vllm.v1.structured_output.utils import convert_lark_to_ebnf, grammar_is_likely_lark

    if not grammar_is_likely_lark(grammar):
        return grammar
    try:
        return str(convert_lark_to_ebnf(grammar))
    except ValueError:
        return grammar  # vLLM refuses it with its own message


def follow(arguments: Mapping[str, Any]) -> None:
    """Run this node's ranks until one of them ends, like `vllm serve --headless`.

    The ranks might not notice that the leader has ended. Raises EngineError if the ranks do not start.
    """
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    try:
        config = AsyncEngineArgs(**arguments).create_engine_config(
            usage_context=UsageContext.ENGINE_CONTEXT, headless=True
        )
        executor = MultiprocExecutor(config, monitor_workers=False)
    except Exception as error:  # vLLM raises any type
        raise EngineError(f"vLLM did not start: {error}") from error
    executor.start_worker_monitor(inline=True)


# --- facts that only vLLM's log contains


def compile_seconds(log: str) -> float:
    """Return the seconds of profiling, compiling and warming up from vLLM's start log.

    >>> compile_seconds("init engine (profile, create kv cache, warmup model) took 64.75 s")
    64.75
    """
    return sum(float(seconds) for seconds in re.findall(r"init engine \([^)]*\) took ([\d.]+) s", log))


def root_cause(log: str) -> str | None:
    """Return the first error that vLLM's processes logged; the exception of `AsyncLLM` does not contain it.

    >>> root_cause("(EngineCore pid=7) ERROR 11-21 11:36:04 [core.py:1374] ValueError: the KV cache is too small")
    'ValueError: the KV cache is too small'
    """
    error_line = re.search(r"^\((?:EngineCore|Worker)[^)]*\).*?\] (\w+(?:Error|Exception): .*)$", log, re.MULTILINE)
    return error_line[1] if error_line else None


def with_root_cause(error: EngineError, log: str) -> EngineError:
    """Return the error of a failed start with the cause that vLLM logged, if any."""
    cause = root_cause(log)
    if cause is None:
        return error
    timeout = re.search(TIMEOUT_PATTERN, error.message)
    return EngineError(f"{timeout[0] if timeout else 'vLLM did not start'}: {cause}", hint=error.hint)


_WARNING = re.compile(r"^(?:\([^)]*\) )?WARNING [\d-]+ [\d:]+ \[[^\]]*\] (.*)$", re.MULTILINE)
_COSTLY = re.compile(
    r"perform|slow|degrad|accura|incorrect|unreliable|again|fall(?:s|ing)? ?back|sub-?optimal", re.IGNORECASE
)
# Warnings that do not matter here, or that peagle's own decisions cause.
_HARMLESS = (
    "max_num_scheduled_tokens is set to",  # `arguments.py` sizes a step for drafts
    "Failed to create oneDNN linear",  # for `lm_head`; torch's own kernel is used instead
    "is not found in LD_PRELOAD",  # `peagle doctor` advises about libraries
)
_MAX_WARNING_CHARS = 400
_MAX_WARNINGS = 10


def costly_warnings(log: str) -> list[str]:
    """Return the first unique warnings of a start that concern speed or correctness.

    >>> costly_warnings("(Worker pid=7) WARNING 11-25 08:22:20 [kv_cache.py:9] scaling factor 1.0: accuracy issues")
    ['scaling factor 1.0: accuracy issues']
    """
    warnings = []
    for warning in _WARNING.findall(log):
        if _COSTLY.search(warning) and not any(text in warning for text in _HARMLESS):
            warnings.append(warning if len(warning) <= _MAX_WARNING_CHARS else f"{warning[:_MAX_WARNING_CHARS]}...")
    return list(dict.fromkeys(warnings))[:_MAX_WARNINGS]


class ServeArguments:
    """The arguments of `vllm serve`, parsed by vLLM's own parser.

    Attributes:
        names: all arguments, with underscores; `no_x` turns the switch `x` off.
        engine_fields: the arguments of the engine (`AsyncEngineArgs`); the others belong to the API server.
    """

    def __init__(self) -> None:
        from vllm import AsyncEngineArgs
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        self._parser = make_arg_parser(FlexibleArgumentParser(add_help=False, exit_on_error=False))
        flags = {flag: action for flag, action in self._parser._option_string_actions.items() if flag.startswith("--")}
        self._actions = {flag.removeprefix("--").replace("-", "_"): action for flag, action in flags.items()}
        self.names = frozenset(self._actions)
        self.engine_fields = frozenset(field.name for field in dataclasses.fields(AsyncEngineArgs))

    def destination(self, name: str) -> str:
        """Return the name of the field that the argument sets: `x` for `no_x`."""
        return str(self._actions[name].dest)

    def default(self, name: str) -> Any:
        return self._actions[name].default

    def is_switch(self, name: str) -> bool:
        """Whether the argument takes no value."""
        return bool(self._actions[name].nargs == 0)

    def parse(self, name: str, values: Sequence[str]) -> Any:
        """Return an argument's value as plain data; raises ValueError if vLLM rejects it.

        Args:
            values: the words after the flag on a command line; empty for a switch.
        """
        from vllm.engine.arg_utils import _expand_json_human_readable_numbers

        flag = f"--{name.replace('_', '-')}"
        # A value may begin with a hyphen.
        words = [f"{flag}={values[0]}"] if len(values) == 1 else [flag, *values]
        try:
            parsed, unparsed = argparse.ArgumentParser.parse_known_args(self._parser, words)
        except (argparse.ArgumentError, argparse.ArgumentTypeError) as error:
            raise ValueError(str(error)) from None
        if unparsed or parsed.model_tag:  # a second value would be parsed as the model
            raise ValueError(f"argument {flag}: expected one value")
        value = getattr(parsed, self.destination(name))
        if value is None or isinstance(value, bool | int | float | str | dict):
            return value
        if isinstance(value, list | tuple | set):
            return list(value)
        # The engine's arguments take vLLM's configuration objects as JSON.
        return json.loads(_expand_json_human_readable_numbers(values[0]))


def parser_class(tool_call_parser: str | None, reasoning_parser: str | None) -> Any:
    """Return vLLM's class that divides a response into reasoning, content and tool calls."""
    from vllm.parser import ParserManager

    return ParserManager.get_parser(
        tool_parser_name=tool_call_parser,
        reasoning_parser_name=reasoning_parser,
        enable_auto_tools=tool_call_parser is not None,
    )


def chat_request(fields: Mapping[str, Any]) -> Any:
    """Return vLLM's request with `fields` and a placeholder message; raises ValueError for invalid fields."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(messages=[{"role": "user", "content": ""}], **fields)


def tool_call_id() -> str:
    from vllm.entrypoints.chat_utils import make_tool_call_id

    return str(make_tool_call_id())
