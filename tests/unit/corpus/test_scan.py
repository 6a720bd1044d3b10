import json

import pyarrow as pa
import pytest

from peagle.corpus import scan as corpus
from peagle.corpus.cutting import Cut
from peagle.corpus.files import SourceFile
from peagle.corpus.rows import WorkEstimate
from peagle.corpus.scan import UniqueIds, read_span
from peagle.corpus.schema import to_table
from peagle.errors import InputError


def write_lines(path, lines):
    path.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))
    return path


def scan(paths, rows_per_span, limit):
    formats = {".parquet": "parquet", ".jsonl": "jsonl"}
    files = [SourceFile(path=str(path), format=formats[path.suffix], size=path.stat().st_size) for path in paths]
    return corpus.scan(files, Cut(rows_per_unit=rows_per_span), limit, WorkEstimate())


def rows_of(spans):
    return [row for span in spans for row in read_span(span)]


@pytest.mark.parametrize("rows_per_span", [1, 2, 3, 100])
def test_jsonl_spans_cover_every_row_once(tmp_path, rows_per_span):
    file = write_lines(tmp_path / "a.jsonl", [{"n": n, "text": "é\u2028" * n} for n in range(7)])
    spans, schema, _ = scan([file], rows_per_span, None)
    assert [row.columns["n"] for row in rows_of(spans)] == list(range(7))
    assert all(span.num_rows <= rows_per_span for span in spans)
    assert schema.names == ["n", "text"]


def test_blank_lines_and_a_missing_final_newline_are_accepted(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\n{"n": 1}\r\n\n  \n{"n": 2}')
    spans, _, _ = scan([file], 1, None)
    assert [row.columns["n"] for row in rows_of(spans)] == [1, 2]


def test_surrogate_pair_in_jsonl_is_one_character(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", [{"text": "\U0001f600"}])
    assert b"\\ud83d" in file.read_bytes()
    assert [row.columns for row in rows_of(scan([file], 1, None)[0])] == [{"text": "\U0001f600"}]


def test_columns_are_merged_and_numbers_widen(tmp_path):
    rows = [{"a": 1}, {"a": 2.5, "b": "x"}, {"c": None}]
    file = write_lines(tmp_path / "a.jsonl", rows)
    spans, schema, _ = scan([file], 10, None)
    assert dict(zip(schema.names, schema.types, strict=True)) == {
        "a": pa.float64(),
        "b": pa.string(),
        "c": pa.string(),
    }
    table = to_table(rows_of(spans), schema)
    assert table.to_pylist() == [
        {"a": 1.0, "b": None, "c": None},
        {"a": 2.5, "b": "x", "c": None},
        {"a": None, "b": None, "c": None},
    ]


def test_limit_can_end_within_a_file(tmp_path):
    files = [write_lines(tmp_path / f"{name}.jsonl", [{"n": n} for n in range(4)]) for name in "ab"]
    spans, _, _ = scan(files, 3, 6)
    assert [row.columns["n"] for row in rows_of(spans)] == [0, 1, 2, 3, 0, 1]


def test_file_that_changed_after_planning_is_refused(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", [{"n": 1}, {"n": 2}])
    spans, _, _ = scan([file], 10, None)
    write_lines(file, [{"n": 1}])
    with pytest.raises(InputError, match="changed after planning"):
        rows_of(spans)


def test_first_repeated_id_is_found_among_a_million():
    with UniqueIds() as ids:
        for n in range(1_000_000):
            ids.add(str(n), 0, n)
        assert ids.first_repeated() is None
        for value, line in (("999", 5), ("17", 2), ("17", 9)):
            ids.add(value, 1, line)
        assert ids.first_repeated() == ((0, 17), (1, 2))
