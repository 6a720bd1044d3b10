import pickle
from types import SimpleNamespace

import pytest
from pydantic import TypeAdapter, ValidationError
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens

from pipelines.online.bodies import ChatBody, CompletionBody
from pipelines.online.errors import ApiError

MESSAGES = [{"role": "user", "content": "x"}]


def chat(**changes):
    return TypeAdapter(ChatBody).validate_python({"model": "m", "messages": MESSAGES, **changes})


def test_a_request_is_vllms_own():
    assert chat(temperature=0.5).temperature == 0.5


def test_a_check_that_breaks_is_the_clients_fault():
    with pytest.raises(ApiError) as found:
        chat(structured_outputs=[])
    assert (found.value.status, found.value.code) == (422, "invalid_type")
    with pytest.raises(ApiError) as found:
        TypeAdapter(CompletionBody).validate_python({"model": "m"})
    assert (found.value.status, found.value.param) == (400, "prompt")


def test_a_wrong_type_still_says_where():
    with pytest.raises(ValidationError) as found:
        chat(temperature="hot")
    assert found.value.errors()[0]["loc"] == ("temperature",)


@pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning")  # vLLM reads it itself
def test_a_cap_is_no_number_of_tokens_that_the_context_must_hold_beside_the_prompt():
    """As vLLM counts, of a request as it comes to the engine's process."""

    def room_for_prompt(request):
        return request.build_tok_params(SimpleNamespace(max_model_len=8192)).max_input_tokens

    capped = chat()
    capped.cap(8000)
    capped = pickle.loads(pickle.dumps(capped))
    assert room_for_prompt(capped) == room_for_prompt(chat()) == 8192
    assert room_for_prompt(chat(max_tokens=8000)) == room_for_prompt(chat(max_completion_tokens=8000)) == 192
    for num_prompt_tokens, left in ((100, 8000), (1000, 7192)):
        assert get_max_tokens(8192, capped.max_completion_tokens, num_prompt_tokens, {}) == left


def test_lists_in_messages_can_be_sent_to_an_engine():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    request = chat(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
    )
    assert request.messages[0]["content"][0]["text"] == "x"
    assert isinstance(request.messages[0]["content"], list)
    assert isinstance(request.messages[1]["tool_calls"], list)
