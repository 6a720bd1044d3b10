import json

import pyarrow as pa
import pytest

from peagle.corpus import scan as corpus
from peagle.corpus.cutting import Cut
from peagle.corpus.rows import WorkEstimate
from peagle.corpus.schema import to_table
from peagle.errors import InputError

LINES = b"\n".join([b'{"prompt": "a"}', b"", b"{bad", b'{"prompt": "\xc3\xa9"}', b"[1]", b'{"prompt": "z"}'])
CSV = b'\xef\xbb\xbfprompt,n\r\n"two\nlines, quoted ""so""",1\r\n\r\nplain,2\r\nshort\r\n\xff,4\r\nlast,5'


def scan(path, rows_per_span=2, limit=None, input_format="auto"):
    return corpus.scan(corpus.find_files(path, input_format), Cut(rows_per_unit=rows_per_span), limit, WorkEstimate())


def rows_of(spans):
    return [row for span in spans for row in corpus.read_span(span)]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("rows_per_span", [1, 2, 100])
def test_spans_can_be_read_in_any_order(write, suffix, rows_per_span):
    data = b"".join(json.dumps({"n": n, "text": "x" * (n % 50)}).encode() + b"\n" for n in range(200))
    spans, schema, fingerprint = scan(write(f"a.jsonl{suffix}", data), rows_per_span)
    assert [row.columns["n"] for row in rows_of(spans)] == list(range(200))
    for some_spans in (spans[::-1][:5], spans[::3]):
        expected = [n for span in some_spans for n in range(span.first_row, span.first_row + span.num_rows)]
        assert [row.columns["n"] for row in rows_of(some_spans)] == expected
    assert schema.names == ["n", "text"]
    assert fingerprint == scan(write("plain.jsonl", data), rows_per_span)[2]


@pytest.mark.parametrize("rows_per_span", [1, 2, 100])
def test_error_of_an_invalid_line_names_file_and_line(write, rows_per_span):
    path = write("a.jsonl.gz", LINES)
    rows = rows_of(scan(path, rows_per_span)[0])
    assert [row.columns.get("prompt") for row in rows] == ["a", None, "é", None, "z"]
    assert rows[1].error.startswith(f"{path} line 3: not valid JSON")
    assert (rows[1].raw, rows[1].reason) == ("{bad", "invalid_row")
    assert rows[3].error == f"{path} line 5: a JSON list, not an object"


@pytest.mark.parametrize("suffix", ["", ".zst"])
@pytest.mark.parametrize("rows_per_span", [1, 2, 100])
def test_csv_rows_and_invalid_rows_are_read(write, suffix, rows_per_span):
    path = write(f"a.csv{suffix}", CSV)
    spans, schema, _ = scan(path, rows_per_span)
    rows = rows_of(spans)
    assert schema.names == ["prompt", "n"]
    assert rows[0].columns == {"prompt": 'two\nlines, quoted "so"', "n": "1"}
    assert rows[1].columns == {"prompt": "plain", "n": "2"}
    assert rows[2].error == f"{path} line 6: 1 fields, but the header has 2"
    assert rows[3].error == f"{path} line 7: not valid UTF-8"
    assert rows[4].columns == {"prompt": "last", "n": "5"}
    assert sum(span.num_rows for span in spans) == 5


def test_text_lines_are_prompts(write):
    path = write("a.txt", b"\xef\xbb\xbf one \r\n\n{two}\n\xff\nlast")
    rows = rows_of(scan(path, 2)[0])
    assert [row.columns.get("prompt") for row in rows] == [" one ", "{two}", None, "last"]
    assert rows[2].error.startswith(f"{path} line 4: not valid UTF-8")


def test_utf_8_bom_is_removed(write):
    path = write("a.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [row.columns for row in rows_of(scan(path, 1)[0])] == [{"prompt": "a"}, {"prompt": "b"}]


def test_too_long_line_is_refused(write, monkeypatch):
    monkeypatch.setattr("peagle.corpus.lines.MAX_LINE_BYTES", 100)
    with pytest.raises(InputError, match=r"a\.txt line 2: longer than"):
        scan(write("a.txt", b"short\n" + b"x" * 300), 10)


def test_fingerprint_depends_on_format(write):
    path = write("a.jsonl", b'{"prompt": "a"}\n')
    assert scan(path, 1)[2] != scan(path, 1, input_format="text")[2]


def test_count_rows_stops_at_limit(write):
    files = corpus.find_files(write("a.txt.gz", b"x\n" * 1000))
    assert corpus.count_rows(files, 10) == 10
    assert corpus.count_rows(files, 5000) == 1000


def request(custom_id="a", **changes):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body, **changes}


def lines(*requests):
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


def test_batch_is_detected_and_bodies_are_text(write):
    path = write("a.jsonl.gz", lines(request(), request("b", url="/v1/completions", body={"prompt": "x"})))
    spans, schema, _ = scan(path)
    assert {span.format for span in spans} == {"openai-batch"}
    table = to_table(rows_of(spans), schema)
    assert table.schema.names == ["custom_id", "method", "url", "body"]
    assert set(table.schema.types) == {pa.string()}
    assert json.loads(table.column("body")[0].as_py()) == request()["body"]


def test_repeated_custom_id_is_refused(write, tmp_path):
    write("a.jsonl", lines(*(request(f"id-{n}") for n in range(300))))
    write("b.jsonl", lines(request("x"), request("y"), request("id-7"), request("x")))
    with pytest.raises(InputError, match=r"b\.jsonl line 3: its custom_id is also in .*a\.jsonl line 8"):
        scan(str(tmp_path))
    assert scan(str(tmp_path), limit=302)


@pytest.mark.parametrize("first_lines", [b"{bad\n", b"\n[1]\n", b"\xff\n", b"\xef\xbb\xbf\n// comment\n"])
def test_batch_with_invalid_first_line_is_detected(write, first_lines):
    path = write("a.jsonl", first_lines + lines(request(), request("b")))
    spans, _, _ = scan(path)
    assert {span.format for span in spans} == {"openai-batch"}
    rows = rows_of(spans)
    assert [row.columns.get("custom_id") for row in rows][-2:] == ["a", "b"]
    assert rows[0].error
    assert rows[0].reason == "invalid_row"
