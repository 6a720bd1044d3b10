import datetime

import pyarrow as pa
import pytest
from ray.data._internal.output_buffer import BlockOutputBuffer, OutputBlockSizeOption
from usage_records import unit_usage

from peagle.corpus.rows import RawRow, Span
from peagle.engine.fake import ByteTokenizer
from peagle.engine.interface import CompletionOutput, FunctionCall, Generation
from peagle.errors import InputError
from peagle.requests.builder import RequestBuilder, SamplingSpec
from peagle.requests.prompts import PromptBuilder, PromptSpec, RowError
from peagle.requests.sampling import SamplingLimits
from peagle.runs.columns import OUTPUT_SCHEMA, internal_names, names_in_file
from peagle.runs.directory import RunDirectory, read_rows
from peagle.runs.plan import WorkUnit
from peagle.runs.rows import (
    PreparedUnit,
    decode_rows,
    encode_rows,
    prepare_rows,
    require_storable,
)
from peagle.speculation import SpeculationStats

UNIT = WorkUnit(unit=3, first_id=40, span=Span(path="p", format="jsonl", first_row=4, num_rows=3, start=0, end=9))
USAGE = unit_usage(num_rows=0, num_failed_rows=2)
SCHEMA = pa.schema([("prompt", pa.string()), ("id", pa.int64())])


@pytest.fixture
def prepared_unit():
    prompts = PromptBuilder(PromptSpec(column="prompt", chat=False), ByteTokenizer(), 100)
    limits = SamplingLimits(max_model_len=100)
    base = {"temperature": 0.0, "max_tokens": 8}
    builder = RequestBuilder(prompts, SamplingSpec(base=base, column="sampling", limits=limits))
    rows = [RawRow({"prompt": "ab", "id": 7}), RawRow(raw="{bad", error="not valid JSON"), RawRow({"prompt": "c"})]
    return PreparedUnit(prepare_rows(UNIT, rows, SCHEMA, builder))


def make_generation(**changes):
    counts = {"num_prompt_tokens": 2, "num_cached_tokens": None, "num_output_tokens": 5, "speculation": None}
    values = {"text": "x", "finish_reason": "stop", **counts, "ttft_s": None, "latency_s": 1.0}
    return Generation(**{**values, **changes})


def test_prepared_unit_round_trip(prepared_unit):
    assert prepared_unit.unit == UNIT
    assert prepared_unit.prompts == [[97, 98], None, [99]]
    assert list(prepared_unit.dead_letters) == [1]


def test_output_has_input_and_output_columns(prepared_unit):
    drafts = SpeculationStats.from_histogram([1, 2], 3)
    table = prepared_unit.output({2: make_generation(), 0: make_generation(speculation=drafts)}, "m", "d")
    assert table.schema.names == ["prompt", "id", "row_id", *OUTPUT_SCHEMA.names[1:]]
    first, second = table.to_pylist()
    assert (first["row_id"], first["id"], first["prompt"]) == ("000000040", 7, "ab")
    assert (first["num_drafts"], first["num_draft_tokens"], first["num_accepted_tokens"]) == (3, 3, 2)
    assert (second["row_id"], second["num_drafts"], second["num_cached_tokens"]) == ("000000042", None, None)


def test_parsed_rows_have_reasoning_and_tool_calls(prepared_unit, tmp_path):
    unparsed = CompletionOutput(text="<think>a</think>b", finish_reason="stop", num_output_tokens=5)
    call = FunctionCall(id="1", name="f", arguments="{}")
    parsed = make_generation(text="b", completions=(unparsed,), reasoning="a", tool_calls=(call,))
    run = RunDirectory(tmp_path / "run")
    for folder in (run.data, run.failed):
        folder.mkdir(parents=True)
    run.commit(3, prepared_unit.output({0: parsed}, "m", None, is_parsed=True), USAGE, [])
    (batch,) = read_rows(run.unit_path(3), None)
    (row,) = batch.to_pylist()
    assert (row["id"], row["input_id"], row["response"], row["reasoning"]) == ("000000040", 7, "b", "a")
    assert row["tool_calls"] == [{"id": "1", "name": "f", "arguments": "{}"}]
    assert row["completions"][0]["text"] == "<think>a</think>b"


def test_unit_without_responses_keeps_its_columns(prepared_unit):
    table = prepared_unit.output({}, "m", None)
    assert table.num_rows == 0
    assert table.schema.field("num_drafts").type == pa.int32()


def test_dead_letters_have_row_unit_and_reason(prepared_unit):
    prepared_unit.refuse(0, RowError(reason="refused", message="no"))
    unit = {"unit": 3, "attempt": 1}
    refused = {"reason": "refused", "message": "no", "row": {"prompt": "ab", "id": 7}}
    invalid = {"reason": "invalid_row", "message": "not valid JSON", "row": "{bad"}
    assert prepared_unit.dead_letter_records() == [
        {"id": "000000040", **unit, **refused},
        {"id": "000000041", **unit, **invalid},
    ]


def test_dead_letters_have_the_input_row_as_json(tmp_path):
    moment = datetime.datetime(2026, 1, 1, 5)
    row = {"prompt": 7, "id": 7, "img": b"\x89PNG", "at": moment, "x": float("nan"), "m": [("a", float("inf"))]}
    expected = {"id": 7, "img": "iVBORw==", "at": "2026-01-01T05:00:00", "x": None, "m": [["a", None]]}
    types = [pa.string(), pa.int64(), pa.binary(), pa.timestamp("us"), pa.float64(), pa.map_(pa.string(), pa.float64())]
    schema = pa.schema(list(zip(row, types, strict=True)))
    prompts = PromptBuilder(PromptSpec(column="prompt", chat=False), ByteTokenizer(), 100)
    builder = RequestBuilder(prompts, SamplingSpec(base={}, limits=SamplingLimits(max_model_len=100)))
    without_prompt, good = RawRow({**row, "prompt": None}), RawRow({**row, "prompt": "p"})
    unit = PreparedUnit(decode_rows(encode_rows(prepare_rows(UNIT, [without_prompt, good], schema, builder))))
    unit.refuse(1, RowError(reason="time_limit", message=""))
    run = RunDirectory(tmp_path / "run")
    for folder in (run.data, run.failed):
        folder.mkdir(parents=True)
    run.commit(3, unit.output({}, "m", None), USAGE, unit.dead_letter_records())
    assert [letter["row"] for letter in run.letters_of_unit(3)] == [
        {"prompt": None, **expected},
        {"prompt": "p", **expected},
    ]


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (["task"], ["id", "response"]),
        (["id", "input_id"], ["row_id", "response"]),
        (["ID", "Row_Id"], ["peagle_row_id", "response"]),
        (["RESPONSE", "peagle_response"], ["id", "peagle_peagle_response"]),
    ],
)
def test_output_columns_are_renamed_if_an_input_column_has_their_name(inputs, outputs):
    stored = names_in_file(inputs, keeps_inputs=True)
    assert stored[: len(inputs) + 2] == [*inputs, *outputs]
    assert len({name.casefold() for name in stored}) == len(stored)
    file = pa.schema([(name, pa.string()) for name in stored])
    assert internal_names(file)[len(inputs) :] == OUTPUT_SCHEMA.names


def test_input_columns_are_prefixed_in_older_files():
    stored = names_in_file(["id", "input_id", "a"], keeps_inputs=False)
    assert stored == ["input_id", "input_input_id", "a", *OUTPUT_SCHEMA.names]
    assert internal_names(pa.schema([(name, pa.string()) for name in stored])) == stored


def test_encoded_unit_round_trip():
    table = pa.table({"x": [[1, 2], None], "y": ["a", "b"]}, metadata={"k": "v"})
    batch = encode_rows(table)
    assert batch.num_rows == 1
    assert decode_rows(batch).equals(table, check_metadata=True)
    assert decode_rows(encode_rows(table.slice(0, 0))).num_rows == 0


def test_ray_data_makes_one_block_per_row_if_the_block_size_is_one_byte():
    """`cluster.use_one_block_per_row` relies on this. Each row is an encoded unit."""
    buffer = BlockOutputBuffer(OutputBlockSizeOption.of(target_max_block_size=1))
    for num_rows in (3, 1, 5000):
        table = pa.table({"x": ["a" * 100] * num_rows})
        buffer.add_batch(encode_rows(table))
        assert [decode_rows(block) for block in buffer.iter_ready_blocks()] == [table]


def test_column_that_parquet_cannot_store_is_refused():
    require_storable(SCHEMA)
    deeply_nested = pa.int64()
    for _ in range(120):
        deeply_nested = pa.list_(deeply_nested)
    for column_type in (pa.struct([]), deeply_nested):
        with pytest.raises(InputError, match="column 'x' has a type that Parquet cannot store"):
            require_storable(SCHEMA.append(pa.field("x", column_type)))
