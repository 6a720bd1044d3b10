"""Build a prompt's token ids from a row's columns. An invalid row becomes a `RowError`, not an exception."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from peagle.errors import ConfigError, InputError, did_you_mean
from peagle.requests.messages import convert_messages, expects_parts, kind_of, parse_messages
from peagle.requests.openai import Body
from peagle.requests.templates import Template


class PromptOptions(BaseModel):
    """The prompt options of commands that read a corpus."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    prompt_column: str | None = Field(None, description="column with the prompt; default: prompt")
    prompt_template: str | None = Field(
        None, description="Jinja2 template over the row's columns, instead of a prompt column"
    )
    messages_column: str | None = Field(
        None, description="column with chat messages (a list of role and content); default: messages, if it exists"
    )
    system_prompt: str | None = Field(None, description="system message before each prompt (chat only)")
    chat: bool | None = Field(None, description="apply the model's chat template; default: if the model has one")

    @model_validator(mode="after")
    def _single_source(self) -> "PromptOptions":
        given_names = [
            k for k in ("prompt_column", "prompt_template", "messages_column") if getattr(self, k) is not None
        ]
        if len(given_names) > 1:
            raise ValueError(f"{' and '.join(given_names)} cannot be combined: a row has one prompt")
        if self.messages_column and self.chat is False:
            raise ValueError("messages_column requires the chat template; remove `chat: false`")
        return self


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that `PromptBuilder` uses."""

    chat_template: Any

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def encode(self, text: str, **kwargs: Any) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowError:
    """Why a row failed: a machine-readable reason and a message."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpec:
    """The source of prompts: a column, the template, a column of messages, or a column of OpenAI request bodies."""

    column: str | None = None
    template: str | None = None
    messages_column: str | None = None
    body_column: str | None = None
    system_prompt: str | None = None
    chat: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the spec for the run's fingerprint."""
        return {name: getattr(self, name) for name in self.__slots__}


def resolve_prompts(
    options: PromptOptions,
    columns: list[str],
    has_chat_template: bool,
    *,
    body_column: str | None = None,
    where: str = "the corpus",
) -> PromptSpec:
    """Choose the source of prompts, before an engine starts.

    Args:
        body_column: the column with OpenAI bodies, if the corpus is a batch.
        where: the corpus's name, for errors.

    Raises:
        InputError: a named column does not exist, or none is named and the default columns do not exist.
        ConfigError: the prompt template is invalid, or a chat template is needed and the model has none.
    """
    if body_column is not None:
        for option in ("prompt_column", "prompt_template", "messages_column", "chat"):
            if getattr(options, option) is not None:
                raise ConfigError(
                    f"{option} cannot be used with an OpenAI batch: its prompts are in the bodies",
                    hint=f"remove {option}, or use --input-format jsonl to read the lines as plain rows",
                )
        return PromptSpec(body_column=body_column, system_prompt=options.system_prompt, chat=has_chat_template)
    messages_column = options.messages_column
    column = options.prompt_column
    if options.prompt_template is not None:
        Template(options.prompt_template).require_columns(columns)
    elif messages_column is None and column is None:
        if "messages" in columns:
            messages_column = "messages"
        elif "prompt" in columns:
            column = "prompt"
        else:
            hint = "set --prompt-column or --messages-column, or build prompts with --prompt-template"
            if {"custom_id", "body"}.issubset(columns):
                hint = "the rows look like an OpenAI batch: use --input-format openai-batch"
            raise InputError(f"{where} has no column 'prompt' or 'messages'; it has: {', '.join(columns)}", hint=hint)
    for name in (column, messages_column):
        if name is not None and name not in columns:
            raise InputError(f"{where} has no column {name!r}", hint=did_you_mean(name, columns))
    chat = has_chat_template if options.chat is None else options.chat
    if not has_chat_template and (chat or messages_column is not None):
        raise ConfigError("the model has no chat template", hint="use plain prompts, and chat: false")
    if options.system_prompt is not None and not chat:
        raise ConfigError("system_prompt requires a chat template", hint="put it into prompt_template instead")
    return PromptSpec(
        column=column,
        template=options.prompt_template,
        messages_column=messages_column,
        system_prompt=options.system_prompt,
        chat=chat or messages_column is not None,
    )


class PromptBuilder:
    """Converts rows to token ids. A prompt must leave room for at least one output token in `max_model_len`."""

    def __init__(self, spec: PromptSpec, tokenizer: Tokenizer, max_model_len: int) -> None:
        self.spec = spec
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._template = None if spec.template is None else Template(spec.template)

    def build(self, columns: Mapping[str, Any]) -> list[int] | RowError:
        """Return the token ids of a row, or why it is invalid."""
        content = self._content(columns)
        if isinstance(content, RowError):
            return content
        return self._tokenize(Body(content=content, is_chat=self.spec.chat))

    def build_from_body(self, body: Body) -> list[int] | RowError:
        """Return the token ids of an OpenAI request, or why it is invalid."""
        content = body.content
        if body.is_chat and not self.spec.chat:
            return RowError(reason="invalid", message="the model has no chat template")
        if body.is_chat:
            messages = self._messages(content, "body.messages", body.template.get("tools"))
            return messages if isinstance(messages, RowError) else self._tokenize(replace(body, content=messages))
        if isinstance(content, str):
            return self._tokenize(body)
        if isinstance(content, list) and content and all(type(item) is int and 0 <= item < 2**31 for item in content):
            return self._check_length(content)
        message = f"body.prompt must be text or token ids, not {kind_of(content)}"
        return RowError(reason="invalid_prompt", message=message)

    def _tokenize(self, body: Body) -> list[int] | RowError:
        # A chat template adds special tokens itself.
        adds_special_tokens = not body.is_chat if body.add_special_tokens is None else body.add_special_tokens
        # Passed only if necessary, because not every tokenizer has this argument.
        options = {} if adds_special_tokens else {"add_special_tokens": False}
        try:
            text = self._render_chat(body) if body.is_chat else body.content
            token_ids = list(self._tokenizer.encode(text, **options))
        except Exception as error:  # a template may reject roles, and its filters raise various errors
            # Clients of a batch see this: include the template's own message, but not Python's.
            reason = str(error) if type(error).__name__ == "TemplateError" else "unexpected value"
            return RowError(reason="template_error", message=f"the chat template failed: {reason}")
        return self._check_length(token_ids)

    def _check_length(self, token_ids: list[int]) -> list[int] | RowError:
        if not token_ids:
            return RowError(reason="empty_prompt", message="the prompt has no tokens")
        if len(token_ids) >= self._max_model_len:
            message = (
                f"the prompt has {len(token_ids)} tokens; the limit is {self._max_model_len}, including the response"
            )
            return RowError(reason="prompt_too_long", message=message)
        return token_ids

    def _content(self, columns: Mapping[str, Any]) -> str | list[dict[str, Any]] | RowError:
        spec = self.spec
        if spec.messages_column is not None:
            return self._messages(columns.get(spec.messages_column), f"column {spec.messages_column!r}")
        if self._template is not None:
            try:
                return self._template.render(columns)
            except Exception as error:  # filters raise various errors
                return RowError(reason="template_error", message=f"prompt_template: {error}")
        value = columns.get(spec.column or "")
        if not isinstance(value, str):
            return RowError(
                reason="invalid_prompt", message=f"column {spec.column!r} must be text, not {kind_of(value)}"
            )
        return value

    def _messages(self, value: Any, where: str, tools: Any = None) -> list[dict[str, Any]] | RowError:
        messages_or_error = parse_messages(value, keep_parts=expects_parts(self._chat_template(tools)))
        if isinstance(messages_or_error, str):  # such as ", message 0: ..."
            return RowError(reason="invalid_messages", message=f"{where}{messages_or_error}")
        return messages_or_error

    def _render_chat(self, body: Body) -> Any:
        content = body.content
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        if self.spec.system_prompt is not None:
            messages = [{"role": "system", "content": self.spec.system_prompt}, *messages]
        messages = convert_messages(messages, self._chat_template(body.template.get("tools")))
        template_arguments = {"add_generation_prompt": True, **body.template}
        return self._tokenizer.apply_chat_template(messages, tokenize=False, **template_arguments)

    def _chat_template(self, tools: Any) -> str:
        """Return the text of the chat template. A model may have a separate template for requests with tools."""
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use" if tools and "tool_use" in template else "default", "")
        return str(template)
