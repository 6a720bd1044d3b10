import json

import pytest

from pipelines.online.errors import ApiError
from pipelines.online.wire import Context, encoded, error_event, error_response, events, header, with_headers

FULL_CONTEXT = Context(
    request_id="r", key="alice", account="alice 1.5", num_choices=3, cap_tokens=7, shown_usage="each",
    first_asked_at=0.5,
)  # fmt: skip


@pytest.mark.parametrize("context", [FULL_CONTEXT, Context(request_id="r", key="local")])
def test_context_round_trip(context):
    assert Context.of(context.headers()) == context
    assert context.headers()["x-request-id"] == "r"  # Ray and vLLM read this header
    json.dumps(context.headers()).encode("ascii")


def test_no_context_without_gateway_header():
    assert Context.of({"x-request-id": "r", "x-peagle-key": "alice"}) is None


def test_with_headers_replaces_all_spellings():
    headers = with_headers(
        [(b"X-Request-ID", b"theirs"), (b"a", b"b"), (b"x-request-id", b"theirs")], {"x-request-id": "é"}
    )
    assert headers == [(b"a", b"b"), (b"x-request-id", "é".encode("latin-1"))]
    assert header({"headers": headers}, "x-request-id") == "é"
    assert header({"headers": headers}, "b") is header({}, "b") is None
    assert encoded({"a": "\u20ac"}) == [(b"a", b"?")]


def test_error_as_response_and_event():
    error = ApiError(429, "é \ud800", code="rate_limit_exceeded", retry_after_s=1.5)
    headers, body = error_response(error)
    assert json.loads(body) == error.body()
    assert headers == {"content-type": "application/json", "content-length": str(len(body)), "retry-after": "2"}
    assert list(events(error_event(error).encode().decode())) == [error.body()]
