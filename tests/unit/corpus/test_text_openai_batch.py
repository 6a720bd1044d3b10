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


def test_batch_is_detected_and_bodies_are_text(write):
    path = write("a.jsonl.gz", lines(request(), request("b", url="/v1/completions", body={"prompt": "x"})))
    spans, schema, _ = scan(path)
    assert {span.format for span in spans} == {"openai-batch"}
    table = to_table([row for span in spans for row in corpus.read(span)], schema)
    assert table.schema.names == ["custom_id", "method", "url", "body"]
    assert set(table.schema.types) == {pa.string()}
    assert json.loads(table.column("body")[0].as_py()) == request()["body"]


def test_repeated_custom_id_is_refused(write, tmp_path):
    write("a.jsonl", lines(*(request(f"id-{n}") for n in range(300))))
    write("b.jsonl", lines(request("x"), request("y"), request("id-7"), request("x")))
    with pytest.raises(InputError, match=r"b\.jsonl line 3: its custom_id is also in .*a\.jsonl line 8"):
        scan(str(tmp_path))
    assert scan(str(tmp_path), limit=302)


@pytest.mark.parametrize("first", [b"{bad\n", b"\n[1]\n", b"\xff\n", b"\xef\xbb\xbf\n// comment\n"])
def test_batch_with_invalid_first_line(write, first):
    path = write("a.jsonl", first + lines(request(), request("b")))
    spans, _, _ = scan(path)
    assert {span.format for span in spans} == {"openai-batch"}
    rows = [row for span in spans for row in corpus.read(span)]
    assert [row.columns.get("custom_id") for row in rows][-2:] == ["a", "b"]
    assert rows[0].error
    assert rows[0].reason == "invalid_row"
