import pytest

from peagle.engine.fake import ByteTokenizer
from peagle.requests.builder import Request, RequestBuilder, SamplingSpec
from peagle.requests.prompts import PromptBuilder, PromptSpec, RowError
from peagle.requests.sampling import SamplingLimits, SamplingOptions

CHAT = "/v1/chat/completions"
BODY_PROMPTS = PromptSpec(body_column="body", chat=True)


def build(columns, *, prompts=BODY_PROMPTS, column=None):
    """Build the request of a row, where `column` is the column with sampling parameters."""
    limits = SamplingLimits(max_model_len=300, can_seed=False, vocab_size=256)
    spec = SamplingSpec(base=SamplingOptions().model_dump(), column=column, limits=limits)
    return RequestBuilder(PromptBuilder(prompts, ByteTokenizer(), 300), spec).build(columns)


def test_chat_template_applies_only_to_chats():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = build({"url": CHAT, "body": {"messages": [{"role": "user", "content": parts}], "max_tokens": 3}})
    assert chat == Request(prompt_token_ids=list(b"user: a\nb\nassistant: "), sampling={"max_tokens": 3})
    assert build({"url": "/v1/completions", "body": {"prompt": "ab"}}) == Request(prompt_token_ids=[97, 98])
    assert build({"url": "/v1/completions", "body": {"prompt": [7, 8]}}) == Request(prompt_token_ids=[7, 8])


@pytest.mark.parametrize("prompt", [["ab"], [[97, 98]]])
def test_list_with_one_prompt_is_accepted(prompt):
    assert build({"url": "/v1/completions", "body": {"prompt": prompt}}) == Request(prompt_token_ids=[97, 98])


def test_constraint_of_a_row_replaces_the_constraint_of_the_run():
    sampling = build({"url": "/v1/completions", "body": {"prompt": "a", "structured_outputs": {"regex": "x"}}}).sampling
    assert sampling == {"json_schema": None, "structured_outputs": {"regex": "x"}}


class RecordingTokenizer(ByteTokenizer):
    """Records the arguments of its chat template and of `encode`."""

    chat_template = "role: content"

    def apply_chat_template(self, conversation, **variables):
        self.template_arguments = conversation, variables
        return super().apply_chat_template(conversation)

    def encode(self, text, **options):
        self.encode_options = options
        return super().encode(text)


def test_chat_template_gets_the_template_fields_of_the_body():
    tokenizer = RecordingTokenizer()
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "none",
        "documents": [{"title": "t", "text": "d"}],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"own": 1},
        "add_generation_prompt": False,
        "continue_final_message": True,
        "add_special_tokens": True,
    }
    limits = SamplingLimits(max_model_len=300)
    spec = SamplingSpec(base=SamplingOptions().model_dump(), limits=limits)
    RequestBuilder(PromptBuilder(BODY_PROMPTS, tokenizer, 300), spec).build({"url": CHAT, "body": body})
    assert tokenizer.template_arguments == (
        [{"role": "user", "content": "x"}],
        {
            "tokenize": False,
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "description": None, "parameters": {"type": "object"}},
                }
            ],
            "documents": [{"title": "t", "text": "d"}],
            "reasoning_effort": "low",
            "enable_thinking": True,
            "own": 1,
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    )
    assert tokenizer.encode_options == {}


@pytest.mark.parametrize(
    ("url", "body", "reason", "message"),
    [
        (CHAT, {"messages": []}, "invalid_messages", "body.messages must be a list of messages, not an empty list"),
        (CHAT, {"messages": [{"role": "user"}]}, "invalid_messages", "body.messages, message 0: it needs a role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "invalid_messages", "body.mess"),
        (
            "/v1/completions",
            {"prompt": ["a", "b"]},
            "invalid",
            "body.prompt: has 2 prompts instead of one",
        ),
        (
            "/v1/completions",
            {"prompt": []},
            "invalid_prompt",
            "body.prompt must be text or token ids, not an empty list",
        ),
        ("/v1/completions", {"prompt": ["a", 1]}, "invalid", "body.prompt: has 2 prompts"),
        ("/v1/completions", {"prompt": [2**31]}, "invalid_prompt", "body.prompt"),
        (
            "/v1/completions",
            {"prompt": [255, 256]},
            "invalid_prompt",
            "prompt has the token id 256, but the model only",
        ),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [256]}, "invalid", "stop_token_ids has the token id"),
        ("/v1/completions", {"prompt": "x" * 300}, "prompt_too_long", "the prompt has 300 tokens"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 301}, "invalid", "max_tokens: 301 exceeds the context"),
        ("/v1/completions", {"prompt": "x", "seed": 1, "temperature": 1}, "invalid", "seed: vLLM on CPU"),
    ],
)
def test_invalid_body_is_a_row_error(url, body, reason, message):
    error = build({"url": url, "body": body})
    assert isinstance(error, RowError)
    assert error.reason == reason
    assert error.message.startswith(message)


def test_chat_is_refused_without_a_chat_template():
    error = build({"url": CHAT, "body": {"messages": [{"role": "user", "content": "x"}]}},
                  prompts=PromptSpec(body_column="body", chat=False))  # fmt: skip
    assert (error.reason, error.message) == ("invalid", "the model has no chat template")


def test_sampling_column_is_used_only_if_named():
    plain = PromptSpec(column="prompt", chat=False)
    row = {"prompt": "a", "sampling": {"temperature": 0.5, "n": 2}}
    assert build(row, prompts=plain, column="sampling").sampling == {"temperature": 0.5, "n": 2}
    assert build(row, prompts=plain).sampling == {}
    assert build({"prompt": "a"}, prompts=plain, column="sampling").sampling == {}
    error = build({"prompt": "a", "sampling": {"n": 2}}, prompts=plain, column="sampling")
    assert (error.reason, error.message.split(":")[0]) == ("invalid", "n")
    error = build({"prompt": "a", "sampling": {"top_q": 2}}, prompts=plain, column="sampling")
    assert error.message == "column 'sampling': unknown parameter 'top_q': did you mean top_p or top_k?"
