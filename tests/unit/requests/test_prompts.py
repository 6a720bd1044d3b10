import pytest

from peagle.errors import ConfigError
from peagle.requests.prompts import PromptBuilder, PromptSpec, RowError, resolve_prompts
from pipelines.batch.config import GenerateConfig


class WordTokenizer:
    """One token per word, with a plain chat template."""

    chat_template = "plain"

    def encode(self, text, add_special_tokens=True):
        return list(range(len(text.split()))) + ([99] if add_special_tokens else [])

    def apply_chat_template(self, conversation, tokenize, add_generation_prompt):
        assert add_generation_prompt
        if [m["role"] for m in conversation][-1] == "assistant":
            raise ValueError("the last message is the assistant's")
        return " ".join(f"<{m['role']}> {m['content']}" for m in conversation) + " <assistant>"


def make_config(**options):
    return GenerateConfig(input="x", output="y", **options)


def build(spec, columns, max_model_len=100):
    return PromptBuilder(spec, WordTokenizer(), max_model_len).build(columns)


def test_messages_column_is_preferred_to_the_prompt_column():
    assert resolve_prompts(make_config(), ["prompt", "messages"], True).messages_column == "messages"
    assert resolve_prompts(make_config(), ["prompt"], True).column == "prompt"


def test_prompt_column_is_tokenized_with_or_without_chat_template():
    assert build(PromptSpec(column="prompt", chat=True), {"prompt": "a b"}) == list(range(4))
    assert build(PromptSpec(column="prompt", chat=False), {"prompt": "a b"}) == [0, 1, 99]


def test_system_prompt_is_added():
    assert len(build(PromptSpec(column="prompt", chat=True, system_prompt="be brief"), {"prompt": "a"})) == 6


def test_prompt_template_is_rendered():
    spec = resolve_prompts(make_config(prompt_template="{{ a }} and {{ b }}"), ["a", "b"], False)
    assert build(spec, {"a": "x", "b": 3}) == [0, 1, 2, 99]


@pytest.mark.parametrize("options", [{"chat": True}, {"messages_column": "m"}, {"system_prompt": "s"}])
def test_chat_options_need_a_chat_template(options):
    with pytest.raises(ConfigError, match="chat template"):
        resolve_prompts(make_config(**options), ["prompt", "m"], False)


@pytest.mark.parametrize(
    ("spec", "columns", "reason"),
    [
        (PromptSpec(column="prompt", chat=True), {"prompt": None}, "invalid_prompt"),
        (PromptSpec(column="prompt", chat=True), {"prompt": 7}, "invalid_prompt"),
        (PromptSpec(column="prompt", chat=True), {}, "invalid_prompt"),
        (PromptSpec(column="prompt", chat=True), {"prompt": "w " * 200}, "prompt_too_long"),
        (PromptSpec(template="{{ a.b.c }}", chat=False), {"a": 1}, "template_error"),
        (PromptSpec(template="{{ 1 / a }}", chat=False), {"a": 0}, "template_error"),
        (PromptSpec(template="{{ a.__class__ }}", chat=False), {"a": 0}, "template_error"),
        (PromptSpec(template="{{ a | dictsort }}", chat=False), {"a": "not a dictionary"}, "template_error"),
        (
            PromptSpec(template="{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(a) }}", chat=False),
            {"a": 1},
            "template_error",
        ),
        (PromptSpec(messages_column="m", chat=True), {"m": None}, "invalid_messages"),
        (PromptSpec(messages_column="m", chat=True), {"m": []}, "invalid_messages"),
        (PromptSpec(messages_column="m", chat=True), {"m": "hello"}, "invalid_messages"),
        (PromptSpec(messages_column="m", chat=True), {"m": ["hello"]}, "invalid_messages"),
        (PromptSpec(messages_column="m", chat=True), {"m": [{"role": "user"}]}, "invalid_messages"),
        (
            PromptSpec(messages_column="m", chat=True),
            {"m": [{"role": "assistant", "content": "x"}]},
            "template_error",
        ),
    ],
)
def test_invalid_rows_become_row_errors(spec, columns, reason):
    result = build(spec, columns)
    assert isinstance(result, RowError)
    assert result.reason == reason


def test_prompt_without_tokens_is_a_row_error():
    class WithoutSpecialTokens(WordTokenizer):
        def encode(self, text, add_special_tokens=True):
            return list(range(len(text.split())))

    result = PromptBuilder(PromptSpec(column="prompt", chat=False), WithoutSpecialTokens(), 10).build({"prompt": " "})
    assert result.reason == "empty_prompt"


def test_prompt_must_leave_room_for_one_token():
    spec = PromptSpec(column="prompt", chat=False)
    assert isinstance(build(spec, {"prompt": "a b c"}, max_model_len=4), RowError)
    assert build(spec, {"prompt": "a b c"}, max_model_len=5) == [0, 1, 2, 99]
