import json

import pytest

from peagle.requests.fields import CHAT_URL
from pipelines.online.batches import validation
from pipelines.online.batches.validation import BatchRules, check_input
from pipelines.online.gateway.admission import ServedModel

MODELS = tuple(ServedModel(name=name, max_model_len=100, can_seed=False) for name in ("a", "b"))


def line(custom_id="1", url=CHAT_URL, **changes):
    body = {"model": "a", "messages": [], **changes}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


@pytest.fixture
def check(tmp_path, make_key):
    def check(*lines, key=None, **changes):
        path = tmp_path / "in.jsonl"
        data = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
        path.write_bytes(data)
        return check_input(str(path), BatchRules(endpoint=CHAT_URL, key=key or make_key(), models=MODELS, **changes))

    return check


def test_valid_input_is_counted(check):
    result = check(line("1"), "", line("2", max_tokens=50))
    assert (result.num_requests, result.model, result.errors) == (2, "a", ())
    assert (result.prompt_tokens, result.output_tokens) == (200, 150), (
        "prompt and output each count as at most the context length"
    )


@pytest.mark.parametrize(
    ("invalid_line", "code", "param"),
    [
        ("{", "invalid_json_line", None),
        ("[1]", "invalid_json_line", None),
        ('{"custom_id": "a", "body": {"temperature": NaN}}', "invalid_json_line", None),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None),
        (line("\ud83d"), "invalid_json_line", None),
        (line("2").replace("POST", "\\udc00"), "invalid_json_line", None),
        (line("2", messages=[{"role": "user", "content": "\udfff"}]), "invalid_json_line", None),
        (line("2", **{"\ud800": 1}), "invalid_json_line", None),
        (line("2").encode().replace(b'"2"', b'"\xed\xa0\x80"'), "invalid_json_line", None),
        (line("2").encode("utf-16-be"), "invalid_json_line", None),
        ('{"custom_id": "2"}', "invalid_request", None),
        (line("1"), "duplicate_custom_id", "custom_id"),
        (line("2", url="/v1/completions"), "mismatched_endpoint", "url"),
        (line("2", url="/v1/embeddings"), "invalid_request", None),
        (line("2", model="b"), "mismatched_model", "body.model"),
        (line("2", model="c"), "model_not_found", "body.model"),
        (line("2", model=None), "missing_model", "body.model"),
        (line("2", max_tokens=101), "max_tokens_too_large", "body.max_tokens"),
        (line("2", seed=1), "unsupported_value", "body.seed"),
        (line("2", top_k=10**21), "invalid_value", None),
    ],
)
def test_errors_have_line_numbers(check, invalid_line, code, param):
    result = check(line("1"), invalid_line, line("3"))
    assert [(error["code"], error["param"], error["line"]) for error in result.errors] == [(code, param, 2)]
    assert result.num_requests == 3


def test_model_allowlist_of_the_key_applies_to_batches(check, make_key):
    (error,) = check(line("1"), key=make_key(models=("b",))).errors
    assert error["code"] == "model_not_allowed"


def test_max_output_tokens_apply_to_batches(check):
    (error,) = check(line("1", max_tokens=60), max_output_tokens=50).errors
    assert error["code"] == "max_tokens_too_large"


@pytest.mark.parametrize(
    ("lines", "code"), [((), "empty_file"), (("", " "), "empty_file"), ((b"PAR1",), "invalid_file")]
)
def test_file_without_requests_is_refused(check, lines, code):
    (error,) = check(*lines).errors
    assert (error["code"], error["line"]) == (code, None)


def test_error_for_a_missing_file_hides_its_path(tmp_path, make_key):
    path = tmp_path / "gone.jsonl"
    (error,) = check_input(str(path), BatchRules(endpoint=CHAT_URL, key=make_key(), models=MODELS)).errors
    assert error["code"] == "invalid_file"
    assert str(tmp_path) not in error["message"]


def test_requests_and_errors_are_limited(check, monkeypatch):
    assert len(check(*["{"] * 150).errors) == 100
    monkeypatch.setattr(validation, "MAX_REQUESTS", 2)
    (error,) = check(*(line(str(n)) for n in range(3))).errors
    assert error["code"] == "too_many_requests"


def test_long_line_is_refused(check):
    """The limit exists because parsed JSON takes many times the memory of its text."""
    long_line = line("2", messages=[{"role": "user", "content": "x" * 2000}])
    result = check(line("1"), long_line, max_line_bytes=2000)
    (error,) = result.errors
    assert (error["code"], error["line"]) == ("line_too_large", 2)
    assert check(line("1"), long_line, max_line_bytes=3000).errors == ()


@pytest.mark.parametrize(
    "invalid_line",
    [line("1" * 5000), line("2", url="/v1/" + "x" * 5000), line("2", model="x" * 5000), '{"' + "x" * 5000 + '": 1}'],
)
def test_errors_quote_at_most_a_short_part_of_the_request(check, invalid_line):
    result = check(invalid_line, invalid_line)
    assert result.errors
    assert all(len(error["message"]) < 500 for error in result.errors)
