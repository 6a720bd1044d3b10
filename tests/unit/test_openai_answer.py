import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from peagle.openai_answer import error_line, output_line

LOGPROBS = [
    {"token": "é", "logprob": -0.5, "top": [{"token": "é", "logprob": -0.5}, {"token": "e", "logprob": -1.0}]},
    {"token": " x", "logprob": -0.1, "top": []},
]
COMPLETIONS = [
    {"text": "é x", "finish_reason": "stop", "num_output_tokens": 2, "logprobs": LOGPROBS},
    {"text": "y", "finish_reason": "length", "num_output_tokens": 1, "logprobs": LOGPROBS[1:]},
]


def row(**changes):
    values = {
        "id": "000000007", "response": "hello", "finish_reason": "stop", "num_prompt_tokens": 5,
        "num_cached_tokens": 2, "num_output_tokens": 3, "model": "m", "completions": None,
    }  # fmt: skip
    return values | changes


def line(row, *, is_chat):
    return output_line(row, custom_id="mine", is_chat=is_chat, created=1_700_000_000, run_id="r")


def parsed(kind, body):
    """The body as the client's own type, which must know every key of it."""
    found = kind.model_validate(body, strict=True)
    assert not found.model_extra
    return found


def test_a_chat_is_what_an_openai_client_expects():
    found = line(row(), is_chat=True)
    assert list(found) == ["id", "custom_id", "response", "error"]
    assert (found["custom_id"], found["error"]) == ("mine", None)
    assert (found["response"]["status_code"], set(found["response"])) == (200, {"status_code", "request_id", "body"})
    chat = parsed(ChatCompletion, found["response"]["body"])
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("hello", "stop")
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens) == (5, 3, 8)
    assert chat.usage.prompt_tokens_details.cached_tokens == 2
    assert (chat.created, chat.model) == (1_700_000_000, "m")


def test_a_completion_is_what_an_openai_client_expects():
    text = parsed(Completion, line(row(num_cached_tokens=None), is_chat=False)["response"]["body"])
    assert (text.object, text.choices[0].text, text.usage.total_tokens) == ("text_completion", "hello", 8)


def test_several_choices_and_their_logprobs():
    chat = parsed(ChatCompletion, line(row(completions=COMPLETIONS), is_chat=True)["response"]["body"])
    choices = [(c.index, c.message.content, c.finish_reason) for c in chat.choices]
    assert choices == [(0, "é x", "stop"), (1, "y", "length")]
    first = chat.choices[0].logprobs.content[0]
    assert (first.token, first.bytes, first.logprob) == ("é", [195, 169], -0.5)
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("é", -0.5), ("e", -1.0)]
    text = parsed(Completion, line(row(completions=COMPLETIONS), is_chat=False)["response"]["body"])
    logprobs = text.choices[0].logprobs
    assert (logprobs.tokens, logprobs.text_offset, logprobs.token_logprobs) == (["é", " x"], [0, 1], [-0.5, -0.1])
    assert logprobs.top_logprobs == [{"é": -0.5, "e": -1.0}, {}]


def test_ids_follow_the_run_and_the_row_alone():
    assert line(row(), is_chat=True) == line(row(), is_chat=True)
    other = output_line(row(), custom_id="mine", is_chat=True, created=1, run_id="another")
    assert other["id"] != line(row(), is_chat=True)["id"] != line(row(id="000000008"), is_chat=True)["id"]


@pytest.mark.parametrize("reason", ["invalid", "prompt_too_long", "refused"])
def test_a_bad_request_is_answered_with_400(reason):
    found = error_line({"id": "1", "reason": reason, "message": "no"}, custom_id="mine", run_id="r")
    assert (found["custom_id"], found["error"], found["response"]["status_code"]) == ("mine", None, 400)
    assert found["response"]["body"]["error"]["code"] == reason
    assert found["response"]["body"]["error"]["message"] == "no"


def test_what_was_not_the_requests_fault_is_an_error_without_a_response():
    found = error_line({"id": "1", "reason": "engine_died", "message": "no"}, custom_id=None, run_id="r")
    assert (found["response"], found["error"]) == (None, {"code": "engine_died", "message": "no"})
