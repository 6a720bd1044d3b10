import asyncio

import pytest

from pipelines.online.errors import ApiError
from pipelines.online.uploads import Upload


def read(pieces, *, max_bytes=10, piece_timeout_s=5.0, timeout_s=5.0, delay_s=0.0):
    async def receive():
        await asyncio.sleep(delay_s)
        return pieces.pop(0)

    async def run():
        upload, body = Upload(receive, max_bytes, piece_timeout_s, timeout_s), b""
        while True:
            message = await upload()
            body += message.get("body", b"")
            if not message.get("more_body"):
                return body, upload

    return asyncio.run(run())


def piece(body, *, more=True):
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_within_its_limits_is_passed_on():
    assert read([piece(b"x" * 6), piece(b"y" * 4, more=False)])[0] == b"xxxxxxyyyy"


def test_a_body_is_cut_at_the_limit_whatever_it_says_of_itself():
    with pytest.raises(ApiError) as caught:
        read([piece(b"x" * 6), piece(b"y" * 5), piece(b"", more=False)])
    assert caught.value.status == 413


@pytest.mark.parametrize("limits", [{"piece_timeout_s": 0.01}, {"timeout_s": 0.05}])
def test_a_body_that_trickles_in_is_given_up(limits):
    with pytest.raises(ApiError) as caught:
        read([piece(b"x") for _ in range(20)], max_bytes=100, delay_s=0.02, **limits)
    assert caught.value.status == 408


def test_what_the_client_does_later_has_no_limit():
    pieces = [piece(b"x", more=False), {"type": "http.disconnect"}]
    _, upload = read(pieces, timeout_s=0.5)
    assert asyncio.run(upload())["type"] == "http.disconnect"
