import json

import pytest

from peagle.corpus import scan as corpus
from peagle.corpus.cutting import Cut
from peagle.corpus.rows import WorkEstimate
from peagle.errors import InputError

LINES = b"\n".join([b'{"prompt": "a"}', b"", b"{bad", b'{"prompt": "\xc3\xa9"}', b"[1]", b'{"prompt": "z"}'])
CSV = b'\xef\xbb\xbfprompt,n\r\n"two\nlines, quoted ""so""",1\r\n\r\nplain,2\r\nshort\r\n\xff,4\r\nlast,5'


def scan(path, rows_per_span, limit=None, input_format="auto"):
    return corpus.scan(corpus.find(path, input_format), Cut(rows_per_unit=rows_per_span), limit, WorkEstimate())


def rows_of(spans):
    return [row for span in spans for row in corpus.read(span)]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("rows_per_span", [1, 2, 100])
def test_units_are_the_same_rows_in_any_order_of_reading(write, suffix, rows_per_span):
    data = b"".join(json.dumps({"n": n, "text": "x" * (n % 50)}).encode() + b"\n" for n in range(200))
    spans, schema, fingerprint = scan(write(f"a.jsonl{suffix}", data), rows_per_span)
    assert [row.columns["n"] for row in rows_of(spans)] == list(range(200))
    for some in (spans[::-1][:5], spans[::3]):
        expected = [n for span in some for n in range(span.first_row, span.first_row + span.num_rows)]
        assert [row.columns["n"] for row in rows_of(some)] == expected
    assert schema.names == ["n", "text"]
    assert fingerprint == scan(write("plain.jsonl", data), rows_per_span)[2]


@pytest.mark.parametrize("rows_per_span", [1, 2, 100])
def test_a_bad_line_is_named_by_its_file_and_line(write, rows_per_span):
    path = write("a.jsonl.gz", LINES)
    rows = rows_of(scan(path, rows_per_span)[0])
    assert [row.columns.get("prompt") for row in rows] == ["a", None, "é", None, "z"]
    assert rows[1].error.startswith(f"{path} line 3: not valid JSON")
    assert (rows[1].raw, rows[1].reason) == ("{bad", "invalid_row")
    assert rows[3].error == f"{path} line 5: a JSON list, not an object"


@pytest.mark.parametrize("suffix", ["", ".zst"])
@pytest.mark.parametrize("rows_per_span", [1, 2, 100])
def test_csv_rows_hold_newlines_and_are_text(write, suffix, rows_per_span):
    path = write(f"a.csv{suffix}", CSV)
    spans, schema, _ = scan(path, rows_per_span)
    rows = rows_of(spans)
    assert schema.names == ["prompt", "n"]
    assert rows[0].columns == {"prompt": 'two\nlines, quoted "so"', "n": "1"}
    assert rows[1].columns == {"prompt": "plain", "n": "2"}
    assert rows[2].error == f"{path} line 6: 1 fields where the header has 2"
    assert rows[3].error == f"{path} line 7: not valid UTF-8"
    assert rows[4].columns == {"prompt": "last", "n": "5"}
    assert sum(span.num_rows for span in spans) == 5


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"prompt\nfine\n'fine\n\"never ends\nno\n", r"a\.csv line 4: not valid CSV"),
        (b'prompt\n"a"b\n', r"a\.csv line 2: not valid CSV"),
        (b"prompt,prompt\nx,y\n", r"a\.csv line 1: the header names column 'prompt' twice"),
        (b"prompt,Gr\xf6\xdfe\nx,1\n", r"a\.csv line 1: the name of column 2 is not valid UTF-8"),
        (b"prompt,\nx,y\n", "column 2 of the header has no name"),
        (b"\n\n", "no header line"),
        (b"prompt\n", "no row in it"),
    ],
)
def test_csv_that_cannot_be_cut_into_rows_is_refused(write, data, message):
    with pytest.raises(InputError, match=message):
        scan(write("a.csv", data), 10)


def test_text_is_a_prompt_a_line(write):
    path = write("a.txt", b"\xef\xbb\xbf one \r\n\n{two}\n\xff\nlast")
    rows = rows_of(scan(path, 2)[0])
    assert [row.columns.get("prompt") for row in rows] == [" one ", "{two}", None, "last"]
    assert rows[2].error.startswith(f"{path} line 4: not valid UTF-8")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_damaged_compressed_file_is_named(write, tmp_path, suffix):
    path = write(f"a.jsonl{suffix}", b'{"prompt": "abcdefghijklmnop"}\n' * 5000)
    whole = (tmp_path / f"a.jsonl{suffix}").read_bytes()
    (tmp_path / f"a.jsonl{suffix}").write_bytes(whole[: len(whole) * 3 // 4])
    with pytest.raises(InputError, match=rf"a\.jsonl\{suffix}: damaged"):
        scan(path, 10)
    (tmp_path / f"a.jsonl{suffix}").write_bytes(b'{"prompt": "not compressed"}\n')
    with pytest.raises(InputError, match=rf"a\.jsonl\{suffix}: damaged, or not"):
        scan(path, 10)


@pytest.mark.parametrize("magic", [b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"PAR1"])
def test_a_binary_file_under_a_name_of_text_is_refused(write, magic):
    with pytest.raises(InputError, match="not text"):
        scan(write("a.jsonl", magic + b"\n1\n"), 10)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-16-le"])
def test_utf_16_is_never_taken_for_rows(write, encoding):
    mark = b"" if encoding == "utf-16" else "\ufeff".encode(encoding)
    with pytest.raises(InputError, match="this is UTF-16"):
        scan(write("a.jsonl", mark + '{"prompt": "a"}\n'.encode(encoding)), 10)


@pytest.mark.parametrize("encoding", ["utf-16-be", "utf-16-le"])
def test_utf_16_without_a_mark_gives_no_row_either(write, encoding):
    with pytest.raises(InputError, match="no row in it is valid"):
        scan(write("a.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n'.encode(encoding)), 10)


def test_a_byte_order_mark_of_utf_8_is_no_part_of_the_first_row(write):
    path = write("a.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [row.columns for row in rows_of(scan(path, 1)[0])] == [{"prompt": "a"}, {"prompt": "b"}]


def test_a_line_without_end_is_refused_before_it_fills_the_memory(write, monkeypatch):
    monkeypatch.setattr("peagle.corpus.lines.MAX_LINE_BYTES", 100)
    with pytest.raises(InputError, match=r"a\.txt line 2: longer than"):
        scan(write("a.txt", b"short\n" + b"x" * 300), 10)


def test_the_same_bytes_in_another_format_are_another_corpus(write):
    path = write("a.jsonl", b'{"prompt": "a"}\n')
    assert scan(path, 1)[2] != scan(path, 1, input_format="text")[2]


def test_counting_stops_where_more_rows_make_no_difference(write):
    files = corpus.find(write("a.txt.gz", b"x\n" * 1000))
    assert corpus.count_rows(files, 10) == 10
    assert corpus.count_rows(files, 5000) == 1000
