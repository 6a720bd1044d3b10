"""All column types of Parquet are kept by a run, in processes with and without Ray."""

import base64
import datetime
import decimal
import json
import subprocess
import sys
import uuid

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray.data.extensions import ArrowPythonObjectArray, ArrowTensorArray, ArrowVariableShapedTensorArray

from peagle.corpus.extensions import cast_to_plain
from peagle.corpus.text import BATCH_COLUMNS
from peagle.runs.columns import OUTPUT_SCHEMA, names_in_file
from tests.unit.runs.corpus_run import CorpusRun, parse_json_lines

ID = uuid.UUID(int=7)
LARGE_ARRAY = np.arange(8000.0).reshape(2, 4000)  # its repr is shortened
DAY = datetime.date(2026, 1, 2)


def extension_array(type_, *values):
    return pa.ExtensionArray.from_storage(type_, pa.array(values, type_.storage_type))


def struct_of(array):
    return pa.StructArray.from_arrays([array], ["k"])


def list_of(array):
    return pa.ListArray.from_arrays([0, *range(1, len(array) + 1)], array)


BOOL8, TENSOR = pa.bool8(), pa.fixed_shape_tensor(pa.float32(), (2, 2), dim_names=["x", "y"])
# Name -> (a column of three values, its values in a JSON export).
COLUMNS = {
    "bool8": (extension_array(BOOL8, 1, None, 0), [True, None, False]),
    "bool8 in structs": (struct_of(extension_array(BOOL8, 1, None, 0)), [{"k": True}, {"k": None}, {"k": False}]),
    "bool8 in lists": (list_of(extension_array(BOOL8, 1, None, 0)), [[True], [None], [False]]),
    "uuid": (extension_array(pa.uuid(), ID.bytes, None, ID.bytes), [str(ID), None, str(ID)]),
    "uuid in lists": (list_of(extension_array(pa.uuid(), *[ID.bytes] * 3)), [[str(ID)]] * 3),
    "json": (extension_array(pa.json_(), '{"a": 1}', None, "2"), ['{"a": 1}', None, "2"]),
    "opaque": (extension_array(pa.opaque(pa.int32(), "a", "b"), 1, None, 2), [1, None, 2]),
    "tensor": (extension_array(TENSOR, [1, 2, 3, 4], None, [0] * 4), [[1, 2, 3, 4], None, [0] * 4]),
    "tensor in structs": (struct_of(extension_array(TENSOR, *[[1, 2, 3, 4]] * 3)), [{"k": [1, 2, 3, 4]}] * 3),
    "Ray tensor": (ArrowTensorArray.from_numpy(np.stack([LARGE_ARRAY] * 3)), [LARGE_ARRAY.ravel().tolist()] * 3),
    "Ray ragged tensor": (
        ArrowVariableShapedTensorArray.from_numpy([np.ones((1, 2)), np.ones((2, 2)), np.ones((2, 1))]),
        [{"data": [1.0] * n, "shape": shape} for n, shape in ((2, [1, 2]), (4, [2, 2]), (2, [2, 1]))],
    ),
    "pandas period": (pa.array(pd.Series(pd.period_range("2026-01", periods=3, freq="M"))), [672, 673, 674]),
    "dictionary": (pa.array(["a", None, "b"]).dictionary_encode(), ["a", None, "b"]),
    "list view": (pa.array([[1], None, []], pa.list_view(pa.int64())), [[1], None, []]),
    "views in structs": (struct_of(pa.array(["a", None, "b"], pa.string_view())),
                         [{"k": "a"}, {"k": None}, {"k": "b"}]),
    "large list view": (pa.array([[1], None, []], pa.large_list_view(pa.int64())), [[1], None, []]),
    "fixed list": (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)), [[1, 2], None, [3, 4]]),
    "map": (pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())), [[["k", 1]], None, []]),
    "string view": (pa.array(["a", None, "b"], pa.string_view()), ["a", None, "b"]),
    "binary": (pa.array([b"\xff", None, b""], pa.large_binary()), [base64.b64encode(b"\xff").decode(), None, ""]),
    "half float": (pa.array([1.5, None, float("nan")], pa.float16()), [1.5, None, None]),
    "decimal": (pa.array([decimal.Decimal("1.50"), None, 2], pa.decimal32(5, 2)), ["1.50", None, "2.00"]),
    "duration": (
        pa.array([datetime.timedelta(1, 61, 5), None, datetime.timedelta(0)], pa.duration("us")),
        ["P1DT0H1M1.000005S", None, "P0DT0H0M0S"],
    ),
    "nanoseconds": (pa.array([1, None, 0], pa.duration("ns")),
                    ["P0DT0H0M0.000000001S", None, "P0DT0H0M0S"]),
    "date": (pa.array([DAY, None, DAY], pa.date64()), [DAY.isoformat(), None, DAY.isoformat()]),
    "big integers": (pa.array([2**64 - 1, None, 0], pa.uint64()), [2**64 - 1, None, 0]),
    "empty": (pa.nulls(3), [None] * 3),
}  # fmt: skip

# String views are read as strings, since Arrow cannot select rows of string views. Parquet stores both alike.
STORED_TYPES = {"string view": pa.string(), "views in structs": pa.struct([("k", pa.string())])}


def write_table(path, columns):
    pq.write_table(pa.table({"prompt": ["a", "b", None], **columns}), path)
    return path


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_all_types_are_exported_as_parquet_and_json(tmp_path, name):
    array, json_values = COLUMNS[name]
    path = write_table(tmp_path / "a.parquet", {"x": array})
    original = pq.read_table(path).column("x")
    expected_type = STORED_TYPES.get(name, original.type)
    run = CorpusRun(path, tmp_path / "run")
    assert run.findings() == []
    for table in (run.table(), run.export("parquet")[0]):
        assert table.column("x").type == expected_type
        assert repr(table.column("x").to_pylist()) == repr(original.slice(0, 2).to_pylist())
    # Rows must be sortable, since a retry reorders them.
    assert cast_to_plain(table).sort_by([("id", "descending")]).column("x")[0] == cast_to_plain(table).column("x")[1]
    rows, dead_letters = run.export("jsonl")
    assert [row["x"] for row in (*rows, *(letter["row"] for letter in dead_letters))] == json_values


EXPORT_AND_AUDIT = """
import sys
from peagle.runs.audit import audit_unit, expected_schema
from peagle.runs.export import export
from peagle.runs.directory import RunDirectory
run = RunDirectory(sys.argv[1])
plan = run.plan()
schema = expected_schema(plan.schema, keeps_inputs=True)
for output_format in ("jsonl", "parquet"):
    export(run, output_format)
print([f for unit in plan.units for f in audit_unit(run, unit, schema, {}).findings])
print("ray" in sys.modules)
"""


def test_extension_types_are_read_without_ray(tmp_path):
    path = write_table(tmp_path / "a.parquet", {name: array for name, (array, _) in COLUMNS.items()})
    run = CorpusRun(path, tmp_path / "run")
    (rows, _), (table, _) = run.export("jsonl"), run.export("parquet")
    process = subprocess.run([sys.executable, "-c", EXPORT_AND_AUDIT, tmp_path / "run"], capture_output=True, text=True)
    assert (process.stdout, process.stderr) == ("[]\nFalse\n", "")
    assert parse_json_lines(tmp_path / "run/export/jsonl/output.jsonl") == rows
    assert pq.read_table(tmp_path / "run/export/parquet/output.parquet").equals(table)


def test_ray_objects_are_copied_without_decoding(tmp_path):
    array = ArrowPythonObjectArray.from_objects([{"a": 1}, None, object])
    run = CorpusRun(write_table(tmp_path / "a.parquet", {"x": array}), tmp_path / "run")
    (table, _), (rows, _) = run.export("parquet"), run.export("jsonl")
    assert table.column("x")[0].as_py() == {"a": 1}
    assert isinstance(rows[0]["x"], str)


def test_columns_with_different_types_become_text(tmp_path):
    for name, array in (("a", COLUMNS["uuid"][0]), ("b", COLUMNS["bool8"][0]), ("c", COLUMNS["Ray tensor"][0])):
        write_table(tmp_path / f"{name}.parquet", {"x": array})
    run = CorpusRun(tmp_path, tmp_path / "run")
    values = [json.loads(text) for text in run.table().column("x").to_pylist() if text is not None]
    assert values == [str(ID), True, *[LARGE_ARRAY.ravel().tolist()] * 2]


DEAD_LETTER_KEYS = ["id", "unit", "attempt", "reason", "message", "row", "error"]
RESERVED_NAMES = dict.fromkeys(
    [
        *OUTPUT_SCHEMA.names, "prompt_token_ids", "sampling", "error", *DEAD_LETTER_KEYS, *BATCH_COLUMNS[:3],
        "input_id", "input_input_id", "unit", "usage", "peagle.unit", "peagle.usage", "peagle", "__peagle_error",
        "__peagle_prompt_token_ids", "__peagle_sampling", "__peagle_unit", "response.text", "completions.text",
        "", "a.b", "self", "loop", "range", "columns", "value", "name",
    ]
)  # fmt: skip


def write_corpus(folder, suffix):
    """Write two valid rows and one that becomes a dead letter. Values are named after their columns."""
    rows = [
        {"prompt": f"p{n}", **{name: f"{name}{n}" for name in RESERVED_NAMES if name != "sampling"}} for n in range(3)
    ]
    rows[2]["prompt"] = None
    path = folder / f"a{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, rows


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_input_columns_keep_their_names(tmp_path, suffix):
    path, rows = write_corpus(tmp_path, suffix)
    run = CorpusRun(path, tmp_path / "run")
    output_names = names_in_file(list(rows[0]), keeps_inputs=True)[len(rows[0]) :]
    names = dict(zip(OUTPUT_SCHEMA.names, output_names, strict=True))
    assert run.findings() == []
    (exported, dead_letters), (table, _) = run.export("jsonl"), run.export("parquet")
    for index, row in enumerate(rows[:2]):
        for name, value in row.items():
            assert (exported[index][name], table.column(name)[index].as_py()) == (value, value)
        assert (exported[index][names["id"]], exported[index][names["response"]]) == (f"{index:09d}", "x")
    (letter,) = dead_letters
    assert letter["row"] == rows[2]
    assert (letter["id"], letter["reason"]) == ("000000002", "invalid_prompt")
    batch, errors = run.export("openai-batch")
    assert [row["custom_id"] for row in (*batch, *errors)] == [f"custom_id{n}" for n in range(3)]


def test_input_column_with_peagle_metadata_keeps_its_type(tmp_path):
    columns = [pa.field("n", pa.int64(), metadata={"peagle": value}) for value in ("json", "wide")]
    for index, column in enumerate(columns):
        schema = pa.schema([("prompt", pa.string()), column])
        pq.write_table(pa.Table.from_pylist([{"prompt": "p", "n": 7}], schema), tmp_path / f"{index}.parquet")
        run = CorpusRun(tmp_path / f"{index}.parquet", tmp_path / f"run{index}")
        assert run.table().column("n").to_pylist() == [7]
