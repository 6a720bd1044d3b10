import pytest

from peagle.drafter.data import build_samples, id_of, row_text


class Tokenizer:
    eos_token_id = 0

    def apply_chat_template(self, messages, **_):
        if messages[0]["role"] == "tool":
            raise ValueError("no role 'tool'")
        return "".join("<" + m["content"] + ">" for m in messages)

    def __call__(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [ord(c) for c in text]}


ROW = {"id": "a", "prompt": "hi", "response": "yo", "finish_reason": "stop"}


def _sample_or_reason(**changes):
    samples, rejected = build_samples([{**ROW, **changes}], Tokenizer(), max_tokens=12)
    return samples[0] if samples else rejected[0].reason


def test_the_loss_is_on_the_response_and_its_end_of_turn():
    sample = _sample_or_reason()
    assert sample.token_ids == (*map(ord, "<hi>yo"), 0)
    assert sample.loss_mask == [False] * 4 + [True] * 3


def test_a_response_cut_by_its_length_has_no_end_of_turn():
    assert _sample_or_reason(finish_reason="length").token_ids == tuple(map(ord, "<hi>yo"))


def test_messages_have_priority_over_the_prompt():
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]
    assert _sample_or_reason(messages=messages).num_prompt_tokens == len("<x><y>")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}],
        '[{"role": "user", "content": "x\\ny"}]',
    ],
)
def test_messages_are_read_from_content_parts_and_json_text(messages):
    sample = _sample_or_reason(messages=messages)
    assert sample.token_ids == (*map(ord, "<x\ny>yo"), 0)
    assert row_text({"messages": messages, "response": "r"}, "prompt") == "x\ny\n\nr"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"response": ""}, "no response"),
        ({"response": None}, "no response"),
        ({"response": 5}, "the response must be text, not int"),
        ({"messages": "hi"}, "column 'messages' must be a list of messages, not str"),
        ({"messages": ["hi"]}, "column 'messages', message 0: it needs a role and text content"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": None}]},
            "column 'messages', message 1: it needs a role and text content",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "the chat template rejects the row: no role 'tool'"),
        ({"prompt": None}, "neither 'messages' nor text in 'prompt'"),
        ({"prompt": "x" * 10}, "the prompt has 12 tokens, which leaves no room for a response within 12"),
    ],
)
def test_rejected_rows_have_a_reason(changes, reason):
    assert _sample_or_reason(**changes) == reason


def test_null_values_are_ignored():
    assert row_text({"prompt": None, "response": "r"}, "prompt").split() == ["r"]
    assert [id_of({"id": None}, 3), id_of({}, 3), id_of({"id": 0}, 3)] == ["3", "3", "0"]
