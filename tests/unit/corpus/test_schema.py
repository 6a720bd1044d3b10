import datetime
import io
import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from peagle.corpus import scan as corpus
from peagle.corpus.cutting import Cut
from peagle.corpus.files import SourceFile
from peagle.corpus.rows import WorkEstimate
from peagle.corpus.scan import read_span
from peagle.corpus.schema import to_table


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def round_trip(*paths):
    """Return the rows of a corpus after a round trip through a unit's file."""
    formats = {".parquet": "parquet", ".jsonl": "jsonl"}
    files = [SourceFile(path=str(path), format=formats[path.suffix], size=path.stat().st_size) for path in paths]
    spans, schema, _ = corpus.scan(files, Cut(rows_per_unit=10_000), None, WorkEstimate())
    sink = io.BytesIO()
    pq.write_table(to_table([row for span in spans for row in read_span(span)], schema), sink)
    return pq.read_table(io.BytesIO(sink.getvalue())).to_pylist()


def nested(levels, wrap=lambda value: [value]):
    value = 1
    for _ in range(levels):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": {}},
        [{}],
        nested(60),
        nested(200),
        nested(499),
        nested(499, lambda value: {"a": value}),
        {"a": 1, "b": [{"c": {}}]},
    ],
    ids=lambda value: str(value)[:20],
)
def test_values_unsupported_by_parquet_become_text(tmp_path, value):
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": "p", "x": value}, {"prompt": "p", "x": None}])
    first, second = round_trip(file)
    assert (json.loads(first["x"]), second["x"]) == (value, None)


def test_empty_object_has_the_type_of_the_other_objects(tmp_path):
    files = [write_lines(tmp_path / f"{i}.jsonl", [{"x": x}]) for i, x in enumerate([{}, {"a": 1}])]
    assert [row["x"] for row in round_trip(*files)] == [{"a": None}, {"a": 1}]


def test_nan_and_infinity_are_preserved(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", [{"x": float("nan"), "y": float("-inf")}, {"x": "t", "y": 0.0}, {"x": []}])
    rows = round_trip(file)
    assert [row["x"] for row in rows] == ["NaN", "t", "[]"]
    assert [row["y"] for row in rows] == [float("-inf"), 0.0, None]


LARGE_INTEGER = 2**60 + 1


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (LARGE_INTEGER, 1.5, (str(LARGE_INTEGER), "1.5")),
        (1.5, LARGE_INTEGER, ("1.5", str(LARGE_INTEGER))),
        ([LARGE_INTEGER], [1.5], (f"[{LARGE_INTEGER}]", "[1.5]")),
        ({"a": LARGE_INTEGER}, {"a": 1.5}, (f'{{"a": {LARGE_INTEGER}}}', '{"a": 1.5}')),
        (2**53, 1.5, (float(2**53), 1.5)),
        ({"id": LARGE_INTEGER, "n": 1.5}, {"id": 1, "n": 2.5}, ({"id": LARGE_INTEGER, "n": 1.5}, {"id": 1, "n": 2.5})),
        (2**63 + 5, -1, (str(2**63 + 5), "-1")),
    ],
    ids=str,
)
@pytest.mark.parametrize("in_two_files", [False, True])
def test_large_integers_are_never_rounded(tmp_path, first, last, expected, in_two_files):
    if in_two_files:
        files = [write_lines(tmp_path / f"{i}.jsonl", [{"x": x}]) for i, x in enumerate([first, last])]
    else:
        files = [write_lines(tmp_path / "a.jsonl", [{"x": first}, *[{"x": None}] * 5000, {"x": last}])]
    rows = round_trip(*files)
    assert (rows[0]["x"], rows[-1]["x"]) == expected


YEAR_9999 = datetime.datetime(9999, 12, 31)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (pa.array([Decimal("1.50")]), pa.array([1.25]), ['"1.50"', "1.25"]),
        (pa.array([Decimal("1.50")]), pa.array(["x"]), ['"1.50"', "x"]),
        (pa.array([YEAR_9999]), pa.array(["x"]), ['"9999-12-31T00:00:00"', "x"]),
        (
            pa.array([YEAR_9999]),
            pa.array([10**18], pa.timestamp("ns")),
            ['"9999-12-31T00:00:00"', '"2001-09-09T01:46:40"'],
        ),
        (pa.array([datetime.date(2020, 1, 1)]), pa.array([YEAR_9999]), ['"2020-01-01"', '"9999-12-31T00:00:00"']),
        (pa.array([b"a"]), pa.array([1]), ['"YQ=="', "1"]),
        (pa.array([{"a": YEAR_9999}]), pa.array(["x"]), ['{"a": "9999-12-31T00:00:00"}', "x"]),
        (pa.array([LARGE_INTEGER]), pa.array([1.5]), [str(LARGE_INTEGER), "1.5"]),
        (pa.array([3]), pa.array([1.5]), [3.0, 1.5]),
        (pa.array([None], pa.int64()), pa.array([1.5]), [None, 1.5]),
        (pa.array([[LARGE_INTEGER]]), pa.array([[1.5]]), [f"[{LARGE_INTEGER}]", "[1.5]"]),
        (pa.array([LARGE_INTEGER]), pa.array([7], pa.int32()), [LARGE_INTEGER, 7]),
        (pa.array([LARGE_INTEGER]), pa.array([Decimal("1.50")]), [str(LARGE_INTEGER), '"1.50"']),
        (pa.array([7]), pa.array([Decimal("1.50")]), [Decimal("7.00"), Decimal("1.50")]),
        (pa.array([2**63 + 5], pa.uint64()), pa.array([-1]), [str(2**63 + 5), "-1"]),
        (pa.array([b"\xff"]), pa.array(["a"]), [b"\xff", b"a"]),
    ],
    ids=str,
)
def test_conflicting_parquet_types_are_merged_without_loss(tmp_path, first, second, expected):
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for file, values in zip(files, (first, second), strict=True):
        pq.write_table(pa.table({"prompt": ["p"], "x": values}), file)
    assert [row["x"] for row in round_trip(*files)] == expected


def test_missing_required_column_is_null(tmp_path):
    required = pa.schema([pa.field("prompt", pa.string()), pa.field("x", pa.int64(), nullable=False)])
    pq.write_table(pa.table({"prompt": ["p"], "x": [1]}, required), tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": ["q"]}), tmp_path / "b.parquet")
    assert [row["x"] for row in round_trip(tmp_path / "a.parquet", tmp_path / "b.parquet")] == [1, None]


def test_parquet_columns_without_statistics_are_merged_as_text(tmp_path):
    for name, values in (("a", [3]), ("b", [1.5])):
        pq.write_table(pa.table({"x": values}), tmp_path / f"{name}.parquet", write_statistics=False)
    assert [row["x"] for row in round_trip(tmp_path / "a.parquet", tmp_path / "b.parquet")] == ["3", "1.5"]


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("levels", [500, 800, 960, 985, 990, 5000])
def test_too_deep_row_is_invalid(tmp_path, opening, levels):
    closing = "]" if opening == "[" else "}"
    file = tmp_path / "a.jsonl"
    file.write_text('{"x": "p"}\n{"x": ' + opening * levels + "1" + closing * levels + "}\n")
    assert round_trip(file) == [{"x": "p"}, {"x": None}]
