"""Input columns may have any name, including those of a run's own columns, keys and records."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from peagle.corpus.text import BATCH_COLUMNS
from peagle.runs.rows import OUTPUT_SCHEMA, output_names
from tests.unit.runs.corpus_run import CorpusRun

LETTER_KEYS = ["id", "unit", "attempt", "reason", "message", "row", "error"]
RESERVED = dict.fromkeys(
    [
        *OUTPUT_SCHEMA.names, "prompt_token_ids", "sampling", "error", *LETTER_KEYS, *BATCH_COLUMNS[:3], "input_id",
        "input_input_id", "unit", "usage", "peagle.unit", "peagle.usage", "peagle", "__peagle_error",
        "__peagle_prompt_token_ids", "__peagle_sampling", "__peagle_unit", "response.text", "completions.text",
        "", "a.b", "self", "loop", "range", "columns", "value", "name",
    ]
)  # fmt: skip


def corpus(folder, suffix):
    """Two good rows and one that becomes a dead letter; each value is its column's name."""
    rows = [{"prompt": f"p{n}", **{name: f"{name}{n}" for name in RESERVED if name != "sampling"}} for n in range(3)]
    rows[2]["prompt"] = None
    path = folder / f"a{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, rows


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_reserved_names_of_input_columns_are_renamed(tmp_path, suffix):
    path, rows = corpus(tmp_path, suffix)
    run = CorpusRun(path, tmp_path / "run")
    names = output_names(list(rows[0]))
    assert run.findings() == []
    (exported, letters), (table, _) = run.export("jsonl"), run.export("parquet")
    for index, row in enumerate(rows[:2]):
        for name, value in row.items():
            assert (exported[index][names[name]], table.column(names[name])[index].as_py()) == (value, value)
        assert (exported[index]["id"], exported[index]["response"]) == (f"{index:09d}", "x")
    (letter,) = letters
    assert letter["row"] == rows[2]
    assert (letter["id"], letter["reason"]) == ("000000002", "invalid_prompt")
    batch, errors = run.export("openai-batch")
    assert [row["custom_id"] for row in (*batch, *errors)] == [f"custom_id{n}" for n in range(3)]


def test_column_with_peagle_metadata_keeps_its_type(tmp_path):
    marked = [pa.field("n", pa.int64(), metadata={"peagle": mark}) for mark in ("json", "wide")]
    for index, column in enumerate(marked):
        schema = pa.schema([("prompt", pa.string()), column])
        pq.write_table(pa.Table.from_pylist([{"prompt": "p", "n": 7}], schema), tmp_path / f"{index}.parquet")
        run = CorpusRun(tmp_path / f"{index}.parquet", tmp_path / f"run{index}")
        assert run.table().column("n").to_pylist() == [7]
