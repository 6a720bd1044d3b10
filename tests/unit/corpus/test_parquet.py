import datetime
import hashlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from peagle.corpus import scan as corpus
from peagle.corpus.cutting import Cut
from peagle.corpus.rows import WorkEstimate
from peagle.corpus.schema import to_table
from peagle.errors import InputError


def scan(path, **options):
    return corpus.scan(corpus.find_files(str(path)), Cut(rows_per_unit=700), None, WorkEstimate(), **options)


@pytest.fixture
def file_and_edited_copy(tmp_path):
    """A file, and a copy with one different character in the middle. Length and footer are the same."""
    prompts = [f"{n:06d} a prompt of some length" for n in range(5000)]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "a.parquet", compression="none", use_dictionary=False)
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(data.replace(b"002500 a prompt", b"002500 A prompt"))
    return tmp_path / "a.parquet", tmp_path / "b.parquet"


def test_fingerprint_covers_every_byte(file_and_edited_copy):
    original, edited = file_and_edited_copy
    assert original.stat().st_size == edited.stat().st_size
    assert pq.read_metadata(original).equals(pq.read_metadata(edited))
    assert pq.read_table(original) != pq.read_table(edited)
    assert scan(original)[2] != scan(edited)[2]
    assert scan(original)[2] == scan(original, earlier_fingerprint=scan(edited)[2])[2]


def test_fingerprint_in_the_old_format_is_recomputed_in_that_format(file_and_edited_copy):
    path, _ = file_and_edited_copy
    data = path.read_bytes()
    old_format = hashlib.sha256(b"parquet " + f"{len(data)} 5000 ".encode() + data[-65536:]).hexdigest()
    assert scan(path, earlier_fingerprint=old_format)[2] == old_format


@pytest.mark.parametrize("row_group_size", [3, 1000, 5000])
def test_parquet_spans_can_be_read_in_any_order(tmp_path, row_group_size):
    pq.write_table(pa.table({"n": list(range(5000))}), tmp_path / "a.parquet", row_group_size=row_group_size)
    spans, _, _ = corpus.scan(corpus.find_files(str(tmp_path)), Cut(rows_per_unit=700), None, WorkEstimate())
    for order in ([0, 1, 2, 3, 4, 5, 6, 7], [1, 4, 7], [6, 2, 3]):
        for index in order:
            rows = [row.columns["n"] for row in corpus.read_span(spans[index])]
            assert rows == list(range(index * 700, min(5000, index * 700 + 700)))


def latin_1(texts):
    """Return an Arrow string array whose bytes are Latin-1 instead of UTF-8, which Arrow does not check."""
    array = pa.array([text.encode("latin-1") for text in texts])
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers())


FAR_FUTURE = pa.array([0, 10**15, 1], pa.int64())  # the second value is 30 million years in seconds
TIMES_WITH_NANOSECONDS = pa.array([1_000_000_000, 1], pa.int64()).cast(pa.time64("ns"))


@pytest.mark.parametrize(
    "values",
    [
        FAR_FUTURE.cast(pa.timestamp("s")),
        pa.array([0, -(10**11), 1], pa.int64()).cast(pa.timestamp("s", "UTC")),
        pa.array([0, 4_000_000, 1], pa.int32()).cast(pa.date32()),
        FAR_FUTURE.cast(pa.duration("s")),
        pa.ListArray.from_arrays(pa.array([0, 1, 2, 3]), FAR_FUTURE.cast(pa.timestamp("ms"))),
        pa.array([0, 86_400 * 10**6, 1], pa.int64()).cast(pa.time64("us")),
        pa.StructArray.from_arrays([pa.array([0, -1, 1], pa.int32()).cast(pa.time32("ms"))], names=["t"]),
        pa.array([0, -(2**63), 1], pa.int64()).cast(pa.timestamp("ns", "UTC")),
        pa.array([0, -(2**63), 1], pa.int64()).cast(pa.duration("ns")),
        latin_1(["a", "\xe9", "c"]),
    ],
    ids=lambda values: str(values.type),
)
def test_row_with_unrepresentable_value_is_invalid(tmp_path, values):
    pq.write_table(pa.table({"n": list(range(3)), "x": values}), tmp_path / "a.parquet")
    spans, schema, _ = scan(tmp_path)
    good, bad, last = corpus.read_span(spans[0])
    assert (good.error, last.error, good.columns["n"], last.columns["n"]) == (None, None, 0, 2)
    assert (bad.columns, bad.reason) == ({"n": 1}, "invalid_row")
    assert f"a.parquet row 1 (counted from 0): column 'x', a {schema.field('x').type}, cannot be read: " in bad.error
    assert to_table([good, bad, last], schema).column("x").null_count == 1


def test_unreadable_row_is_named_by_number(tmp_path):
    times_s = [0] * 5000
    times_s[4321] = 10**15
    pq.write_table(
        pa.table({"at": pa.array(times_s).cast(pa.timestamp("s"))}), tmp_path / "a.parquet", row_group_size=3000
    )
    spans, _, _ = scan(tmp_path)
    errors = [row.error for span in reversed(spans) for row in corpus.read_span(span) if row.error]
    assert [error.partition(" (")[0] for error in errors] == [f"{tmp_path}/a.parquet row 4321"]


@pytest.mark.parametrize(
    ("arrays", "names", "duplicate"),
    [
        ([[1], [2]], ["a", "a"], "a"),
        ([[0], pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["b", "b"])], ["n", "a"], "a.b"),
    ],
)
def test_duplicate_columns_are_refused(tmp_path, arrays, names, duplicate):
    pq.write_table(pa.table([pa.array(array) for array in arrays], names=names), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=rf"a\.parquet: there are two columns '{duplicate}'"):
        scan(tmp_path)


@pytest.mark.parametrize(
    "nested",
    [
        lambda times: times,
        lambda times: pa.StructArray.from_arrays([times], names=["t"]),
        lambda times: pa.ListArray.from_arrays(pa.array([0, 1, 2]), times),
        lambda times: pa.MapArray.from_arrays(pa.array([0, 1, 2]), pa.array(["a", "b"]), times),
    ],
)
def test_nanosecond_times_are_refused_if_they_would_be_rounded(tmp_path, nested):
    pq.write_table(pa.table({"n": [1, 2], "x": nested(TIMES_WITH_NANOSECONDS)}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="column 'x' has times of day in nanoseconds"):
        scan(tmp_path)
    whole_microseconds = pa.array([1_000_000_000, 1000], pa.int64()).cast(pa.time64("ns"))
    table = pa.table({"n": [1, 2], "x": nested(whole_microseconds)})
    pq.write_table(table, tmp_path / "a.parquet")
    spans, schema, _ = scan(tmp_path)
    assert to_table(list(corpus.read_span(spans[0])), schema).equals(table)


YEAR_9999, YEAR_1 = datetime.datetime(9999, 12, 31, 23, 59, 59, 999_999), datetime.datetime(1, 1, 1)
NESTED = {
    "plain": lambda array: array,
    "in structs": lambda array: pa.StructArray.from_arrays([array], names=["t"]),
    "in lists": lambda array: pa.ListArray.from_arrays(pa.array(range(len(array) + 1)), array),
    "in maps": lambda array: pa.MapArray.from_arrays(pa.array(range(len(array) + 1)), ["k"] * len(array), array),
}


def write_int96(path, nest, values):
    """Write timestamps like Spark, Hive and Impala."""
    columns = {"prompt": ["a"] * len(values), "a.at": values, "at": nest(values)}
    pq.write_table(pa.table(columns), path, use_deprecated_int96_timestamps=True, store_schema=False, row_group_size=3)


@pytest.mark.parametrize("nest", NESTED.values(), ids=NESTED)
def test_int96_timestamps_are_exact_in_all_years(tmp_path, nest):
    times = [YEAR_9999, YEAR_1, datetime.datetime(2026, 1, 2, 3, 4, 5, 6)]
    write_int96(tmp_path / "a.parquet", nest, pa.array(times * 1000))
    spans, schema, _ = scan(tmp_path)
    table = to_table([row for span in spans for row in corpus.read_span(span)], schema)
    expected = nest(pa.array(times * 1000, pa.timestamp("us")))
    assert table.column("at").combine_chunks().equals(expected)
    assert table.column("a.at").to_pylist() == times * 1000


def test_int96_timestamps_keep_nanoseconds(tmp_path):
    times = pa.array([1, 1_000_000_001, None, 5_000], pa.int64()).cast(pa.timestamp("ns"))
    write_int96(tmp_path / "a.parquet", NESTED["plain"], times)
    spans, schema, _ = scan(tmp_path)
    assert to_table(list(corpus.read_span(spans[0])), schema).column("at").combine_chunks().equals(times)
