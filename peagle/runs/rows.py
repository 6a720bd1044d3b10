"""The tables of a run: prepared rows for an engine, and finished rows for a unit's file."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from peagle.corpus.extensions import cast_to_plain, to_values
from peagle.corpus.rows import RawRow
from peagle.corpus.schema import can_be_stored, to_table
from peagle.engine.interface import CompletionOutput, Generation
from peagle.errors import InputError
from peagle.plain_json import to_json
from peagle.requests.builder import Request, RequestBuilder
from peagle.requests.prompts import RowError
from peagle.runs.columns import names_in_file, output_schema
from peagle.runs.plan import WorkUnit, unit_from_json, unit_to_json

# The columns of a prepared unit after those of the input. They are accessed by position, since an input column may have
# the same name.
_REQUEST_COLUMNS = (
    ("prompt_token_ids", pa.list_(pa.int32())),
    ("sampling", pa.string()),
    ("parsing", pa.string()),
    ("error", pa.string()),
)
_UNIT = b"peagle.unit"  # key in the metadata of a prepared unit
_UNFINISHED = b"peagle.unfinished_unit"  # key in the metadata of a placeholder
_ENCODED = "unit"  # the column of `encode_rows`


def require_storable(schema: pa.Schema) -> None:
    """Raise InputError if Parquet cannot store a column of the corpus."""
    for column in schema:
        if not can_be_stored(pa.schema([column])):
            raise InputError(
                f"input: column {column.name!r} has a type that Parquet cannot store",
                hint="remove the column from the input; or use a new run directory, if an older version of peagle "
                "planned the run",
            )


def prepare_rows(unit: WorkUnit, rows: Sequence[RawRow], schema: pa.Schema, builder: RequestBuilder) -> pa.Table:
    """Return the input's columns and, for each row, its request or its dead letter."""
    prompts: list[list[int] | None] = []
    sampling: list[str | None] = []
    parsing: list[str | None] = []
    errors: list[str | None] = []
    for row in rows:
        outcome = builder.build(row.columns) if row.error is None else RowError(reason=row.reason, message=row.error)
        prompts.append(None if isinstance(outcome, RowError) else outcome.prompt_token_ids)
        sampling.append(json.dumps(outcome.sampling) if isinstance(outcome, Request) and outcome.sampling else None)
        parsing.append(
            None if isinstance(outcome, RowError) or outcome.parsing is None else json.dumps(outcome.parsing)
        )
        errors.append(to_json(_letter(outcome, row)) if isinstance(outcome, RowError) else None)
    table = to_table(rows, schema)
    table = table.replace_schema_metadata({_UNIT: unit_to_json(unit)})  # a unit may have no rows
    for (name, type_), values in zip(_REQUEST_COLUMNS, (prompts, sampling, parsing, errors), strict=True):
        table = table.append_column(name, pa.array(values, type_))
    return table


def unfinished_unit(unit: WorkUnit) -> pa.Table:
    """Return a placeholder for a unit that is not prepared because the run is being stopped."""
    return pa.table({}).replace_schema_metadata({_UNIT: unit_to_json(unit), _UNFINISHED: b""})


def is_unfinished(table: pa.Table) -> bool:
    return _UNFINISHED in table.schema.metadata


def encode_rows(table: pa.Table) -> pa.Table:
    """Return a table as a single row, because Ray Data may split and join tables of several rows."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.table({_ENCODED: pa.array([sink.getvalue().to_pybytes()], pa.large_binary())})


def decode_rows(batch: pa.Table) -> pa.Table:
    return cast_to_plain(pa.ipc.open_stream(batch.column(_ENCODED)[0].as_buffer()).read_all())


class PreparedUnit:
    """A prepared unit, as the engine actor reads it."""

    def __init__(self, table: pa.Table) -> None:
        self.unit = unit_from_json(table.schema.metadata[_UNIT])
        num_inputs = table.num_columns - len(_REQUEST_COLUMNS)
        prompts, sampling, parsing, errors = (column.to_pylist() for column in table.columns[num_inputs:])
        self.prompts: list[list[int] | None] = prompts  # token ids by row; None if the row is a dead letter
        # By row, the parameters that differ from the run's parameters.
        self.sampling: list[dict[str, Any]] = [json.loads(text) if text else {} for text in sampling]
        # By row, the request's fields that the response parser uses; None without a parser.
        self.parsing: list[dict[str, Any] | None] = [json.loads(text) if text else None for text in parsing]
        # By row index.
        self.dead_letters = {index: json.loads(text) for index, text in enumerate(errors) if text is not None}
        self._input = table.select(list(range(num_inputs))).replace_schema_metadata(None)

    def refuse(self, index: int, error: RowError) -> None:
        """Make row `index` a dead letter."""
        (batch,) = self._input.slice(index, 1).combine_chunks().to_batches()
        row = RawRow(to_values(batch)[0])
        self.dead_letters[index] = _letter(error, row)

    def dead_letter_records(self) -> list[dict[str, Any]]:
        """Return the dead letters with row id, unit and attempt."""
        return [
            {"id": self.unit.row_id(index), "unit": self.unit.unit, "attempt": self.unit.attempt, **letter}
            for index, letter in sorted(self.dead_letters.items())
        ]

    def output(
        self,
        generations: dict[int, Generation],
        model: str,
        drafter: str | None,
        *,
        keeps_inputs: bool = True,
        is_parsed: bool = False,
    ) -> pa.Table:
        """Return the rows to commit. `is_parsed`: whether vLLM's parsers have split the responses."""
        outputs = output_schema(is_parsed=is_parsed)
        indices = sorted(generations)
        rows = [self._output_row(index, generations[index], model, drafter) for index in indices]
        table = self._input.take(pa.array(indices, pa.int64()))
        names = names_in_file(table.column_names, keeps_inputs=keeps_inputs, outputs=outputs)
        for column in outputs:
            table = table.append_column(column, pa.array([row[column.name] for row in rows], column.type))
        return table.rename_columns(names).replace_schema_metadata(outputs.metadata)

    def _output_row(self, index: int, generation: Generation, model: str, drafter: str | None) -> dict[str, Any]:
        drafts = generation.speculation
        return {
            "id": self.unit.row_id(index),
            "response": generation.text,
            "finish_reason": generation.finish_reason,
            "num_prompt_tokens": generation.num_prompt_tokens,
            "num_cached_tokens": generation.num_cached_tokens,
            "num_output_tokens": generation.num_output_tokens,
            "num_drafts": drafts.num_drafts if drafts else None,
            "num_draft_tokens": drafts.num_draft_tokens if drafts else None,
            "num_accepted_tokens": drafts.num_accepted_tokens if drafts else None,
            "ttft_s": generation.ttft_s,
            "latency_s": generation.latency_s,
            "model": model,
            "drafter": drafter,
            "completions": list(map(completion_row, generation.completions)) or None,
            "reasoning": generation.reasoning,
            "tool_calls": [asdict(call) for call in generation.tool_calls] or None,
        }


def completion_row(completion: CompletionOutput) -> dict[str, Any]:
    """Return a response as an entry of the column `completions`."""
    logprobs = completion.logprobs and [
        {
            "token": token.token,
            "logprob": token.logprob,
            "top": [{"token": text, "logprob": logprob} for text, logprob in token.top],
        }
        for token in completion.logprobs
    ]
    return {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "num_output_tokens": completion.num_output_tokens,
        "logprobs": logprobs,
    }


def _letter(error: RowError, row: RawRow) -> dict[str, Any]:
    return {
        "reason": error.reason,
        "message": error.message,
        "row": row.columns if row.raw is None else row.raw,
    }
