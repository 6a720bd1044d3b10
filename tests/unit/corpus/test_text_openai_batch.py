import json

import pyarrow as pa
import pytest

from peagle.corpus import scan as corpus
from peagle.corpus.cutting import Cut
from peagle.corpus.rows import WorkEstimate
from peagle.corpus.schema import to_table
from peagle.errors import InputError


def request(custom_id="a", **changes):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body, **changes}


def lines(*requests):
    return b"".join(json.dumps(r).encode() + b"\n" for r in requests)


def scan(path, limit=None):
    return corpus.scan(corpus.find(path), Cut(rows_per_unit=2), limit, WorkEstimate())


def test_a_batch_is_told_by_its_columns_and_its_bodies_are_carried_as_text(write):
    path = write("a.jsonl.gz", lines(request(), request("b", url="/v1/completions", body={"prompt": "x"})))
    spans, schema, _ = scan(path)
    assert {span.format for span in spans} == {"openai-batch"}
    table = to_table([row for span in spans for row in corpus.read(span)], schema)
    assert table.schema.names == ["custom_id", "method", "url", "body"]
    assert set(table.schema.types) == {pa.string()}
    assert json.loads(table.column("body")[0].as_py()) == request()["body"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "/v1/embeddings"}, "url must be /v1/chat/completions or /v1/completions, not '/v1/embeddings'"),
        ({"method": "GET"}, "method must be POST, not 'GET'"),
        ({"body": "text"}, "body must be a JSON object, not a str"),
        ({"body": None}, "the request has no body"),
        ({"custom_id": 7}, "custom_id must be text that is not empty, not 7"),
        ({"priority": 1}, "unknown key 'priority'"),
    ],
)
def test_a_bad_request_is_a_row_that_names_its_file_and_line(write, changes, message):
    path = write("a.jsonl", lines(request(), {**request("b"), **changes}))
    spans, schema, _ = scan(path)
    rows = [row for span in spans for row in corpus.read(span)]
    assert rows[1].error.startswith(f"{path} line 2: {message}")
    assert rows[1].reason == "invalid"
    assert to_table(rows, schema).column("custom_id").to_pylist() == ["a", None]


def test_a_file_of_bad_requests_alone_is_refused_at_once(write):
    with pytest.raises(InputError, match=r"no row in it is valid; the first is .*line 1: url must be"):
        scan(write("a.jsonl", lines(request(url="/v1/embeddings"), request("b", url="/v1/embeddings"))))


def test_a_custom_id_that_is_there_twice_is_refused_with_both_places(write, tmp_path):
    write("a.jsonl", lines(*(request(f"id-{n}") for n in range(300))))
    write("b.jsonl", lines(request("x"), request("y"), request("id-7"), request("x")))
    with pytest.raises(InputError, match=r"b\.jsonl line 3: its custom_id is that of .*a\.jsonl line 8"):
        scan(str(tmp_path))
    assert scan(str(tmp_path), limit=302)


def test_a_batch_beside_what_is_none_is_refused(write, tmp_path):
    write("a.jsonl", lines(request()))
    write("b.jsonl", lines({"prompt": "x"}))
    with pytest.raises(InputError, match=r"b\.jsonl is no OpenAI batch, and .*a\.jsonl is one"):
        scan(str(tmp_path))


@pytest.mark.parametrize("first", [b"{bad\n", b"\n[1]\n", b"\xff\n", b"\xef\xbb\xbf\n// comment\n"])
def test_a_batch_whose_first_line_is_no_json_object_is_still_one(write, first):
    path = write("a.jsonl", first + lines(request(), request("b")))
    spans, _, _ = scan(path)
    assert {span.format for span in spans} == {"openai-batch"}
    rows = [row for span in spans for row in corpus.read(span)]
    assert [row.columns.get("custom_id") for row in rows][-2:] == ["a", "b"]
    assert rows[0].error
    assert rows[0].reason == "invalid_row"
