import asyncio
import math
from dataclasses import replace

import httpx
import pytest

from peagle.economics.ledger import write_batch
from peagle.requests.fields import CHAT_URL
from pipelines.online.batches.downloads import TransferLimit
from pipelines.online.batches.records import BatchProgress
from pipelines.online.batches.routes import ROUTES, Batches, BatchRoutes
from pipelines.online.batches.settings import MIB, KeyQuota
from pipelines.online.gateway.admission import ServedModel
from pipelines.online.gateway.gate import Gate, GateSettings
from pipelines.online.gateway.keys import new_key, write_keys
from pipelines.online.gateway.routes import guarded_app
from pipelines.online.ingress import install_error_handlers
from pipelines.online.serve.flow import UPLOAD_WINDOW_BYTES

PURPOSE = {"purpose": "batch"}


@pytest.fixture
def keys(tmp_path):
    keys_and_records = {
        "alice": new_key("alice"),
        "poor": new_key("poor", budget_usd=0.1),
        "slow": new_key("slow", requests_per_min=1),
    }
    write_keys(tmp_path / "keys.json", [record for _, record in keys_and_records.values()])
    return {name: key for name, (key, _) in keys_and_records.items()}


@pytest.fixture
def routes(settings, runner):
    batch_routes = BatchRoutes()
    batch_routes.batches = Batches(settings, runner, spent_usd=lambda key: 0.0)
    yield batch_routes
    batch_routes.batches.close()


@pytest.fixture
def send(routes, keys, tmp_path, settings):
    """Return a function that sends requests one after the other. Each is a function that takes the HTTP client."""
    app = guarded_app()
    install_error_handlers(app)
    models = (ServedModel(name="m", max_model_len=1000),)
    gate_settings = GateSettings(
        models=models,
        ledger=settings.ledger,
        key_file=tmp_path / "keys.json",
        max_upload_bytes=5000,
        max_body_bytes=2000,
        refusals_per_s=math.inf,
    )
    app.add_middleware(Gate, settings=gate_settings, routes=tuple(ROUTES.values()))
    for name, route in ROUTES.items():
        route(app)(getattr(routes, name))

    def send(*requests, key="alice"):
        async def run():
            headers = {"authorization": f"Bearer {keys[key]}"}
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://peagle/v1", headers=headers) as client:
                return [await request(client) for request in requests]

        answers = asyncio.run(run())
        return answers[0] if len(answers) == 1 else answers

    return send


def post_file(data=b"{}\n", fields=PURPOSE, name="in.jsonl"):
    return lambda client: client.post("/files", data=fields, files={"file": (name, data)})


def post_batch(**body):
    return lambda client: client.post("/batches", json=body)


def get(path):
    return lambda client: client.get(path)


def error_of(answer):
    return answer.status_code, answer.json()["error"]["code"]


def batch_body(file_id, **changes):
    return {"input_file_id": file_id, "endpoint": CHAT_URL, "completion_window": "24h", **changes}


def test_upload_can_be_read_listed_and_deleted(send):
    uploaded = send(
        post_file(b"x" * 4000, {**PURPOSE, "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})
    ).json()
    assert (uploaded["bytes"], uploaded["filename"], uploaded["purpose"]) == (4000, "in.jsonl", "batch")
    assert uploaded["expires_at"] == uploaded["created_at"] + 3600
    path = f"/files/{uploaded['id']}"
    read, content, listed, empty = send(
        get(path), get(path + "/content"), get("/files"), get("/files?purpose=batch_output")
    )
    assert read.json() == listed.json()["data"][0] == uploaded
    assert content.content == b"x" * 4000
    assert empty.json()["data"] == []
    deleted, missing = send(lambda client: client.delete(path), get(path))
    assert deleted.json() == {"id": uploaded["id"], "object": "file", "deleted": True}
    assert error_of(missing) == (404, "file_not_found")


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (post_file(fields={}), (400, "invalid_purpose")),
        (post_file(fields={"purpose": "fine-tune"}), (400, "invalid_purpose")),
        (post_file(b""), (400, "empty_file")),
        (post_file(b"x" * 5001), (413, "body_too_large")),
        (post_file(fields={**PURPOSE, "expires_after[anchor]": "created_at"}), (400, "invalid_value")),
        (lambda client: client.post("/files", data=PURPOSE), (400, "missing_file")),
        (lambda client: client.post("/files", json={}), (400, "missing_file")),
        (get("/files?limit=0"), (400, "invalid_value")),
        (get("/files?order=up"), (400, "invalid_value")),
        (get("/files?after=x"), (400, "invalid_value")),
        (get("/files/x"), (404, "file_not_found")),
        (get("/files/x/content"), (404, "file_not_found")),
        (get("/batches?limit=101"), (400, "invalid_value")),
        (get("/batches/x"), (404, "batch_not_found")),
        (lambda client: client.post("/batches/x/cancel"), (404, "batch_not_found")),
        (post_batch(**batch_body("file-x")), (400, "invalid_input_file")),
        (post_batch(**batch_body("file-x", completion_window="1h")), (400, "invalid_value")),
        (post_batch(**batch_body("file-x", endpoint="/v1/embeddings")), (400, "invalid_value")),
        (post_batch(**batch_body("file-x", metadata={"a": "x" * 513})), (400, "invalid_value")),
        (post_batch(**batch_body("file-x", metadata={str(n): "" for n in range(17)})), (400, "invalid_value")),
        (post_batch(**batch_body("file-x", unknown=1)), (422, "invalid_type")),
        (post_batch(**batch_body("x" * 2000)), (413, "body_too_large")),
    ],
)  # fmt: skip
def test_invalid_request_is_an_openai_error(send, request_, expected):
    assert error_of(send(request_)) == expected


def test_batch_can_be_listed_and_cancelled_once(send, routes):
    file_id = send(post_file()).json()["id"]
    first, second = (send(post_batch(**batch_body(file_id, metadata={"n": n}))).json() for n in "12")
    assert first["status"] == "validating"
    listed = send(get("/batches?limit=1")).json()
    assert (listed["data"][0]["id"], listed["has_more"]) == (second["id"], True)
    assert send(get(f"/batches?limit=1&after={second['id']}")).json()["data"][0]["metadata"] == {"n": "1"}
    cancel = f"/batches/{first['id']}/cancel"
    assert send(lambda client: client.post(cancel)).json()["status"] in ("cancelling", "cancelled")
    store = routes.batches.store
    routes.batches.close()
    store.save(first["id"], BatchProgress(status="cancelled"))
    assert error_of(send(lambda client: client.post(cancel))) == (400, "batch_ended")
    assert error_of(send(lambda client: client.delete(f"/files/{file_id}"))) == (400, "file_in_use")


@pytest.mark.parametrize("presigns", [True, False])
def test_downloads_are_redirected_to_s3_if_urls_are_presigned(s3, settings, runner, keys, routes, send, presigns):
    routes.batches.close()
    routes.batches = Batches(
        replace(settings, folder="s3://bucket/batches", presigns=presigns), runner, spent_usd=lambda key: 0.0
    )
    file_id = send(post_file(b"0123456789", name="a b.jsonl")).json()["id"]
    answer = send(get(f"/files/{file_id}/content"))
    if not presigns:
        assert answer.content == b"0123456789"
        return
    assert (answer.status_code, answer.headers["cache-control"]) == (307, "no-store")
    url = answer.headers["location"]
    assert url.startswith(s3.url)
    assert "X-Amz-Expires=300" in url
    from_s3 = httpx.get(url, headers={"range": "bytes=2-4"})
    assert from_s3.content == b"234"
    assert from_s3.headers["content-disposition"] == "attachment; filename*=UTF-8''a%20b.jsonl"
    stranger = send(get(f"/files/{file_id}/content"), key="poor")
    assert error_of(stranger) == (404, "file_not_found")


@pytest.fixture
def send_with_small_quota(routes, send):
    """Return `send` for routes with a small file quota."""
    batches = routes.batches
    batches.quota._limits = KeyQuota(max_stored_mib=1, max_stored_files=4)
    return send


def test_files_per_key_are_limited_including_outputs(send_with_small_quota, routes, make_batch_request, clock):
    store = routes.batches.store
    routes.batches.close()
    batch = store.add_batch(make_batch_request())
    output_id, _ = store.add_outputs(batch, ("export/openai-batch/output.jsonl", 5), 0, 1.0)
    first, *_, last = send_with_small_quota(*[post_file()] * 4)  # the output counts, so the last is the fifth file
    assert error_of(last) == (413, "storage_quota_exceeded")
    file_id = first.json()["id"]
    # No quota is left for the output of the batch.
    assert send_with_small_quota(post_batch(**batch_body(file_id))).status_code == 413
    assert send_with_small_quota(post_file(), key="slow").status_code == 200  # quotas are per key
    assert send_with_small_quota(lambda client: client.delete(f"/files/{output_id}")).status_code == 200
    assert send_with_small_quota(post_file()).status_code == 200


def test_concurrent_uploads_per_key_are_limited(send, routes):
    transfers = routes.batches.transfers = TransferLimit(
        max_bytes=2 * UPLOAD_WINDOW_BYTES, max_bytes_per_key=UPLOAD_WINDOW_BYTES
    )
    with transfers.hold("alice", 1):
        refused = send(post_file())
        assert error_of(refused) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) > 0
        assert send(post_file(), key="slow").status_code == 200
    assert send(post_file()).status_code == 200


def test_stored_bytes_per_key_are_limited(send_with_small_quota, upload, routes):
    upload(routes.batches.store, b"x" * (MIB - 4000))
    assert [answer.status_code for answer in send_with_small_quota(post_file(b"x" * 3000), post_file(b"x" * 3000))] == [
        200,
        413,
    ]


@pytest.mark.parametrize("has_length", [True, False])
def test_concurrent_uploads_stay_within_the_quota(send_with_small_quota, upload, routes, has_length):
    """An upload without a Content-Length counts as if it had the maximum size."""
    upload(routes.batches.store, b"x" * (MIB - 5000))

    async def body(request):
        for piece in (request.content[:500], request.content[500:]):
            await asyncio.sleep(0.05)
            yield piece

    async def post(client):
        form = client.build_request("POST", "/files", data=PURPOSE, files={"file": ("in.jsonl", b"x" * 3000)})
        form.read()
        headers = {"content-type": form.headers["content-type"]}
        if has_length:
            headers["content-length"] = form.headers["content-length"]
        return await client.post("/files", content=body(form), headers=headers)

    async def post_concurrently(client):
        return await asyncio.gather(*[post(client) for _ in range(6)])

    statuses = [answer.status_code for answer in send_with_small_quota(post_concurrently)]
    assert statuses.count(200) <= 1
    assert set(statuses) <= {200, 413}
    assert sum(file.num_bytes for file in routes.batches.store.files("alice")) <= MIB
    assert routes.batches.quota._arriving_bytes["alice"] == routes.batches.quota._arriving_files["alice"] == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\folder\\in.jsonl", "in.jsonl"),
        ("a/", "upload.jsonl"),
        ("x" * 300 + ".jsonl", "x" * 249 + ".jsonl"),
        ("é.jsonl", "é.jsonl"),
    ],
)
def test_file_name_is_sanitised(send, name, expected):
    assert send(post_file(name=name)).json()["filename"] == expected


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        ("multipart/form-data; boundary=x; charset=punycode", (415, "unsupported_charset")),
        ("multipart/form-data; boundary=x; charset=utf-7", (415, "unsupported_charset")),
        ("application/x-www-form-urlencoded", (400, "missing_file")),
        ("text/plain", (400, "missing_file")),
    ],
)
def test_other_content_types_and_charsets_are_refused(send, content_type, expected):
    """Other charsets could block the event loop for minutes. Other content types would be buffered completely."""
    answer = send(
        lambda client: client.post("/files", content=b"purpose=" * 100, headers={"content-type": content_type})
    )
    assert error_of(answer) == expected


@pytest.mark.parametrize("fields", [{**PURPOSE, "x": "y" * 2000}, {**PURPOSE, **{str(n): "" for n in range(8)}}])
def test_form_fields_are_limited(send, fields):
    assert send(post_file(fields=fields)).status_code == 400


@pytest.mark.parametrize(
    "request_",
    [get("/files?after=" + "x" * 3000), get("/files/" + "x" * 3000), post_file(fields={"purpose": "x" * 900})],
)
def test_errors_quote_only_a_short_part_of_the_request(send, request_):
    answer = send(request_)
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 400


def test_idempotency_key_header_creates_one_batch(send):
    file_id = send(post_file()).json()["id"]

    def create(**changes):
        body = batch_body(file_id, **changes)
        return lambda client: client.post("/batches", json=body, headers={"idempotency-key": "x"})

    first, repeated, different = send(create(), create(), create(metadata={"a": "b"}))
    assert first.json() == repeated.json()
    assert error_of(different) == (422, "idempotency_key_reused")
    assert len(send(get("/batches")).json()["data"]) == 1


def test_files_and_batches_are_private_to_their_key(send):
    file_id = send(post_file()).json()["id"]
    batch_id = send(post_batch(**batch_body(file_id))).json()["id"]
    assert send(get("/batches"), key="poor").json()["data"] == []
    assert send(get("/files"), key="poor").json()["data"] == []
    for request_ in (get(f"/files/{file_id}"), get(f"/batches/{batch_id}"), post_batch(**batch_body(file_id))):
        assert send(request_, key="poor").status_code in (400, 404)


def test_limits_and_budgets_of_keys_apply(send, settings, make_result):
    write_batch(settings.ledger, replace(make_result("batch_1").record, key="poor"))
    assert error_of(send(post_file(), key="poor")) == (429, "insufficient_quota")
    assert [answer.status_code for answer in send(post_file(), post_file(), key="slow")] == [200, 429]


def test_routes_are_404_without_batches(send, routes):
    routes.batches.close()
    batches, routes.batches = routes.batches, None
    try:
        for request_ in (post_file(), get("/files"), get("/batches"), post_batch(**batch_body("x")), get("/batches/x")):
            assert error_of(send(request_)) == (404, "batches_off")
    finally:
        routes.batches = batches
