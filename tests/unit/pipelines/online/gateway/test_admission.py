"""Tests of the limits of requests: media, messages, lists, constraints, and the maximum size of an answer."""

import json

import pytest

from peagle.requests.fields import CHAT_URL, COMPLETIONS_URL
from pipelines.online.errors import ApiError
from pipelines.online.gateway.admission import ServedModel, answer_shape, check_contents, check_request
from pipelines.online.gateway.keys import LOCAL


def refusal_of(values, media=None, domains=()):
    try:
        model = ServedModel(name="m", max_model_len=100, media=media, media_domains=frozenset(domains))
        check_contents(values, model)
    except ApiError as error:
        return error.status, error.code, error.param
    return None


def chat_with(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


TEXT = {"type": "text", "text": "hello"}
URL = "http://169.254.169.254/latest/meta-data"
MEDIA = [
    {"type": "image_url", "image_url": {"url": URL}},
    {"type": "image_url", "image_url": URL},
    {"image_url": URL},
    {"image_url": {"url": URL}},
    {"type": "text", "text": "x", "uuid": "1", "image_url": URL},
    {"type": "unknown", "uuid": "1", "image_url": URL},
    {"type": "text", "text": "x", "image_url": URL},
    {"type": "input_image", "image_url": URL},
    {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    {"type": "audio_url", "audio_url": {"url": URL}},
    {"audio_url": URL},
    {"type": "video_url", "video_url": {"url": URL}},
    {"video_url": URL},
    {"type": "file", "file": {"file_id": "f"}},
    {"type": "image_embeds", "image_embeds": "x"},
    {"type": "prompt_embeds", "data": "x"},
    {"prompt_embeds": "x"},
    {"type": "image_pil", "image_pil": "x"},
]


@pytest.mark.parametrize("part", MEDIA, ids=str)
@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_text_model_refuses_media(part, role):
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": role, "content": [TEXT, part]}]}
    assert refusal_of(body) == (400, "unsupported_content", "messages")


def test_text_contents_pass():
    assert refusal_of({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]}) is None
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "x"}]
    assert refusal_of({"messages": history}) is None
    assert (
        refusal_of(chat_with("plain", TEXT, {"type": "input_text", "text": "x"}, {"type": "refusal", "refusal": "no"}))
        is None
    )


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize(
    "url",
    [URL, "http://b.example/x", "http://a.example@b.example/x", "http://a.example.b.example/x", "file:///etc/passwd",
     "ftp://a.example/x", "//a.example/x", "a.example/x", "http://[::1", "", "http://a.example:80@b.example/x"],
)  # fmt: skip
@pytest.mark.parametrize("domains", [(), ("a.example",)])
def test_media_urls_must_be_in_allowed_domains(url, domains):
    assert refusal_of(chat_with(image(url)), {"image": 1}, domains) == (400, "media_not_allowed", "messages")


def test_every_url_of_a_part_is_checked():
    part = {"type": "video_url", "image_url": {"url": "data:x"}, "video_url": {"url": URL}}
    assert refusal_of(chat_with(part), {"video": 1, "image": 1}) == (400, "media_not_allowed", "messages")


def test_allowed_media_pass_up_to_their_limit():
    data = image("data:image/png;base64,AAAA")
    assert refusal_of(chat_with(data), {"image": 2}) is None
    assert refusal_of(chat_with(image("https://A.example/x.png"), data), {"image": 2}, ["a.example"]) is None
    assert refusal_of(chat_with(data, data, data), {"image": 2}) == (400, "too_many_media", "messages")
    assert (
        refusal_of(chat_with({"type": "video_url", "video_url": {"url": "data:x"}}), {"image": 2})[1]
        == "unsupported_content"
    )
    assert refusal_of(chat_with({"image_url": "data:x"}), {"image": 2})[1] == "unsupported_content"
    assert refusal_of(chat_with({**data, "uuid": "of another user"}), {"image": 2})[1] == "unsupported_content"
    assert (
        refusal_of(chat_with({"type": "image_embeds", "image_embeds": "x"}), {"image": 2})[1] == "unsupported_content"
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
    ],
)
def test_unsafe_template_arguments_are_refused(body, param):
    assert refusal_of(body) == (400, "unsupported_parameter", param)
    assert refusal_of(dict.fromkeys(body)) is None


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "tool", "tool_call_id": "1", "content": []},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f"}}]},
    ],
    ids=str,
)
def test_message_without_supported_content_is_refused_as_in_bulk_runs(message):
    assert refusal_of({"messages": [{"role": "user", "content": "x"}, message]}) == (400, "invalid_value", "messages")


def test_chat_template_arguments_pass():
    assert refusal_of({"chat_template_kwargs": {"enable_thinking": False}}) is None


@pytest.mark.parametrize(
    ("field", "max_items"),
    [("tools", 128), ("stop", 64), ("bad_words", 128), ("documents", 128), ("stop_token_ids", 1024)],
)
def test_lists_are_limited(field, max_items):
    assert refusal_of({field: [1] * (max_items + 1)}) == (400, "invalid_value", field)
    assert refusal_of({field: [1] * max_items}) is None


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_stop_strings_are_limited(field):
    assert refusal_of({field: ["x" * 5000] * 2}) == (400, "invalid_value", field)
    assert refusal_of({field: "x" * 9000}) == (400, "invalid_value", field)


def test_number_of_messages_is_limited_by_the_context():
    messages = [{"role": "user", "content": ""}] * 101
    assert refusal_of({"messages": messages}) == (400, "invalid_value", "messages")
    assert refusal_of({"messages": messages[1:]}) is None


def test_large_constraint_is_refused_with_its_field():
    assert refusal_of({"structured_outputs": {"regex": "a{999999}"}}) == (
        400, "constraint_too_large", "structured_outputs.regex",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["max_pattern_size", "min_count"])
def test_repetition_patterns_are_limited(name):
    allowed = {"max_pattern_size": 64, "min_count": 64}
    assert refusal_of({"repetition_detection": allowed}) is None
    for number in (65, 1e9, "100000"):
        body = {"repetition_detection": {**allowed, name: number}}
        assert refusal_of(body) == (400, "invalid_value", "repetition_detection")


# --- the maximum size of an answer

MIB = 2**20


def admit(path, body, max_model_len=8192, max_answer_mib=16):
    model = ServedModel(name="m", max_model_len=max_model_len, max_choices=4096, max_answer_bytes=max_answer_mib * MIB)
    return check_request(path, json.dumps(body).encode(), LOCAL, {"m": model}, max_output_tokens=None)


def is_refused(path, body):
    try:
        admit(path, body)
    except ApiError as error:
        return (error.status, error.code) == (400, "answer_too_large")
    return False


PROMPTS = ["word " * 800] * 250  # about 1 MiB
LONG_MESSAGES = [{"role": "user", "content": "x" * 6000}]


@pytest.mark.parametrize(
    "body",
    [{"prompt_logprobs": 20}, {"prompt_logprobs": 0}, {"prompt_logprobs": -1}, {"echo": True, "logprobs": 5},
     {"echo": True, "logprobs": 5, "max_tokens": 0}, {"logprobs": 20, "max_tokens": 500},
     {"prompt_logprobs": "20"}, {"return_token_ids": True}],
)  # fmt: skip
def test_many_prompts_with_logprobs_are_refused(body):
    assert is_refused(COMPLETIONS_URL, {"prompt": PROMPTS, "max_tokens": 1, **body})
    assert not is_refused(COMPLETIONS_URL, {"prompt": PROMPTS[:1], "max_tokens": 1, **body})
    assert not is_refused(COMPLETIONS_URL, {"prompt": PROMPTS, "max_tokens": 1})


def test_choices_multiply_the_prompt_in_the_answer():
    body = {"prompt": "x" * 6000, "max_tokens": 1, "prompt_logprobs": 1}
    assert not is_refused(COMPLETIONS_URL, body)
    assert is_refused(COMPLETIONS_URL, {**body, "n": 64})
    assert not is_refused(COMPLETIONS_URL, {**body, "n": 64, "prompt_logprobs": None})


def test_token_ids_are_counted():
    assert not is_refused(COMPLETIONS_URL, {"prompt": [1] * 4000, "prompt_logprobs": 20, "max_tokens": 1})
    assert is_refused(COMPLETIONS_URL, {"prompt": [[1] * 4000] * 8, "prompt_logprobs": 20, "max_tokens": 1})


@pytest.mark.parametrize("options", [{"top_logprobs": 20}, {"logprob_token_ids": list(range(128))}])
def test_chat_choices_and_logprobs_are_counted(options):
    body = {"messages": LONG_MESSAGES, "logprobs": True, "max_tokens": 500, **options}
    assert not is_refused(CHAT_URL, body)
    assert is_refused(CHAT_URL, {**body, "n": 64})
    assert not is_refused(CHAT_URL, {**body, "n": 64, "logprobs": False})


def test_answer_size_without_logprobs():
    assert is_refused(CHAT_URL, {"messages": LONG_MESSAGES, "n": 1024, "max_tokens": 8000})


def test_chat_with_echo_has_prompt_logprobs():
    shape = answer_shape({"echo": True}, 1000, is_chat=True, max_model_len=8192, num_choices=1)
    assert shape.prompt_logprobs == 1
    shape = answer_shape({"echo": True, "prompt": "x"}, 1000, is_chat=False, max_model_len=8192, num_choices=1)
    assert shape.prompt_logprobs == 0


def test_default_max_tokens_fit_the_answer_size():
    checked = admit(CHAT_URL, {"messages": [], "logprobs": True, "top_logprobs": 20}, max_model_len=131_072)
    assert checked.cap_tokens == 16 * MIB // (16 + 21 * 128)
    assert admit(CHAT_URL, {"messages": []}).cap_tokens is None


@pytest.mark.parametrize("value", ["x", [], {}, 1e400])
def test_wrong_types_are_left_to_later_validation(value):
    assert not is_refused(COMPLETIONS_URL, {"prompt": "a", "logprobs": value, "prompt_logprobs": value})
