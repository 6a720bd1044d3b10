import inspect
import json
import pickle
import time
from types import SimpleNamespace

import pytest
from pydantic import TypeAdapter, ValidationError
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens

from pipelines.online.errors import ApiError
from pipelines.online.serve.request_types import ChatBody, CompletionBody

TEXT = {"model": "m", "prompt": "x"}
MESSAGES = [{"role": "user", "content": "x"}]


def chat(**changes):
    return TypeAdapter(ChatBody).validate_python({"model": "m", "messages": MESSAGES, **changes})


def test_valid_chat_is_accepted():
    assert chat(temperature=0.5).temperature == 0.5


def test_crash_of_rays_validator_is_a_client_error():
    with pytest.raises(ApiError) as error:
        chat(structured_outputs=[])
    assert (error.value.status, error.value.code) == (422, "invalid_type")
    with pytest.raises(ApiError) as error:
        TypeAdapter(CompletionBody).validate_python({"model": "m"})
    assert (error.value.status, error.value.param) == (400, "prompt")


def test_rays_types_still_need_peagles_validation():
    """If a part of this fails, its work-around in `request_types.py` can be removed."""
    with pytest.raises(AttributeError):
        ChatCompletionRequest.model_validate({"model": "m", "messages": MESSAGES, "structured_outputs": []})
    lazy = ChatCompletionRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": [1]}]})
    assert not isinstance(lazy.messages[0]["content"], list)  # an iterator, whose items have not been validated
    with pytest.raises(ValidationError) as error:
        CompletionRequest.model_validate({"model": "m", "prompt": "x", "bad_words": [1] * 1000})
    assert len(error.value.errors()) >= 1000


@pytest.mark.parametrize("body_type", [ChatBody, CompletionBody])
@pytest.mark.parametrize("field", ["response_format", "structured_outputs"])
def test_structural_tags_are_not_compiled_in_the_ingress(body_type, field):
    """xgrammar 0.2.8 takes eight seconds to compile this tag, and minutes for larger ones."""
    patterns = {f"^a{{1,{1000 + number}}}$": {"type": "string"} for number in range(20)}
    schema = {"type": "object", "patternProperties": patterns}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    value = tag if field == "response_format" else {"structural_tag": json.dumps(tag)}
    started_at = time.process_time()
    TypeAdapter(body_type).validate_python({**TEXT, "messages": MESSAGES, field: value})
    assert time.process_time() - started_at < 4


def test_vllm_compiles_structural_tags():
    """If this fails, `skip_tag_validation` can be removed."""
    from vllm.entrypoints.generate.base import protocol
    from vllm.v1.structured_output import backend_xgrammar

    check = inspect.getsource(protocol).partition("def validate_structural_tag_payload(")[2].partition("\ndef ")[0]
    assert "validate_xgrammar_grammar(" in check
    assert "Grammar.from_structural_tag(so_params.structural_tag)" in inspect.getsource(
        backend_xgrammar.validate_xgrammar_grammar
    )


def test_validation_error_has_its_location():
    with pytest.raises(ValidationError) as error:
        chat(temperature="hot")
    assert error.value.errors()[0]["loc"] == ("temperature",)


@pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning")  # vLLM's own parsing triggers it
def test_cap_does_not_reserve_context():
    """The test uses vLLM's calculation, and pickles the request as Ray does."""

    def room_for_prompt(request):
        return request.build_tok_params(SimpleNamespace(max_model_len=8192)).max_input_tokens

    capped = chat()
    capped.cap(8000)
    capped = pickle.loads(pickle.dumps(capped))
    assert room_for_prompt(capped) == room_for_prompt(chat()) == 8192
    assert room_for_prompt(chat(max_tokens=8000)) == room_for_prompt(chat(max_completion_tokens=8000)) == 192
    for num_prompt_tokens, max_tokens in ((100, 8000), (1000, 7192)):
        assert get_max_tokens(8192, capped.max_completion_tokens, num_prompt_tokens, {}) == max_tokens


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


@pytest.mark.parametrize(
    ("body", "changes"),
    [
        (ChatBody, {"messages": [{}] * 3000}), (ChatBody, {"messages": [1] * 100_000}),
        (ChatBody, {"messages": [*MESSAGES * 3000, {"role": 1}]}),
        (ChatBody, {"messages": [{"role": "user", "content": [1] * 1000}]}),
        (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [1] * 100_000}]}),
        (ChatBody, {"messages": MESSAGES, "tools": [{}] * 3000}),
        (ChatBody, {"messages": MESSAGES, "bad_words": [1] * 100_000}),
        (CompletionBody, {"prompt": [-1] * 100_000}), (CompletionBody, {"prompt": [1] * 100_000 + ["x"]}),
        (CompletionBody, {"prompt": "x", "bad_words": [1] * 100_000}),
    ],
    ids=range(10),
)  # fmt: skip
def test_only_first_error_of_a_list_is_reported(body, changes):
    """By default, Pydantic collects fifteen errors for each invalid message, which takes minutes."""
    started_at = time.process_time()
    with pytest.raises(ValidationError) as error:
        TypeAdapter(body).validate_python({"model": "m", **changes})
    assert len(error.value.errors()) < 100
    assert time.process_time() - started_at < 10


def test_number_of_parts_is_limited():
    part = {"type": "text", "text": "x"}
    assert len(chat(messages=[{"role": "user", "content": [part] * 1024}]).messages[0]["content"]) == 1024
    with pytest.raises(ApiError, match="has 1025 parts"):
        chat(messages=[{"role": "user", "content": [part] * 1025}])


def test_validated_body_is_not_validated_again():
    for body, request in ((ChatBody, chat()), (CompletionBody, TypeAdapter(CompletionBody).validate_python(TEXT))):
        assert TypeAdapter(body).validate_python(request) is request
