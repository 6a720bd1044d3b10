"""The columns of a unit's file: the input's columns, then the output's.

In the file, the input's columns keep their names, and an output column is renamed if its name is already taken. Names
are compared without regard to case, as DuckDB, Spark, Hive and BigQuery do. In memory, output columns have the names
in `OUTPUT_SCHEMA`, and an input column with such a name gets the prefix `input_`. These are the internal names. Files
of older runs also use them.
"""

from collections.abc import Iterable, Sequence

import pyarrow as pa

_LOGPROB = pa.struct(
    [
        ("token", pa.string()),
        ("logprob", pa.float64()),
        ("top", pa.list_(pa.struct([("token", pa.string()), ("logprob", pa.float64())]))),
    ]
)
_COMPLETION = pa.struct(
    [
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("num_output_tokens", pa.int32()),
        ("logprobs", pa.list_(_LOGPROB)),
    ]
)
OUTPUT_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("response", pa.string()),
        ("finish_reason", pa.string()),
        ("num_prompt_tokens", pa.int32()),
        ("num_cached_tokens", pa.int32()),
        ("num_output_tokens", pa.int32()),
        ("num_drafts", pa.int32()),
        ("num_draft_tokens", pa.int32()),
        ("num_accepted_tokens", pa.int32()),
        ("ttft_s", pa.float64()),
        ("latency_s", pa.float64()),
        ("model", pa.string()),
        ("drafter", pa.string()),
        # All responses of a row if it requested log-probabilities or more than one response; otherwise null.
        ("completions", pa.list_(_COMPLETION)),
    ]
)

_TOOL_CALL = pa.struct([("id", pa.string()), ("name", pa.string()), ("arguments", pa.string())])
_PARSED_SCHEMA = pa.schema([*OUTPUT_SCHEMA, ("reasoning", pa.string()), ("tool_calls", pa.list_(_TOOL_CALL))])
_IS_PARSED = {b"peagle.parsed": b"1"}  # in the metadata of a file with parsed responses


def output_schema(*, is_parsed: bool) -> pa.Schema:
    """Return the output columns. If parsers separate reasoning and tool calls, `completions` has the full text."""
    return _PARSED_SCHEMA.with_metadata(_IS_PARSED) if is_parsed else OUTPUT_SCHEMA


def names_in_file(inputs: Sequence[str], *, keeps_inputs: bool, outputs: pa.Schema = OUTPUT_SCHEMA) -> list[str]:
    """Return the names of a file's columns.

    Args:
        keeps_inputs: whether input columns keep their names; False for older runs.
        outputs: from `output_schema`.

    >>> names_in_file(["ID", "task"], keeps_inputs=True)[:4]
    ['ID', 'task', 'row_id', 'response']
    >>> names_in_file(["id", "task"], keeps_inputs=False)[:4]
    ['input_id', 'task', 'id', 'response']
    """
    if not keeps_inputs:
        return [*_prefixed(inputs, outputs), *outputs.names]
    taken = {name.casefold() for name in inputs}
    renamed = []
    for name in outputs.names:
        name_in_file = "row_id" if name == "id" and name in taken else name
        while name_in_file.casefold() in taken:
            name_in_file = f"peagle_{name_in_file}"
        taken.add(name_in_file.casefold())
        renamed.append(name_in_file)
    return [*inputs, *renamed]


def internal_names(file: pa.Schema) -> list[str]:
    """Return the internal names of a file's columns, or the file's own names if output columns are missing.

    Example: the internal names of the file's columns `id`, `row_id` and `response` are `input_id`, `id` and `response`.
    """
    outputs = output_schema(is_parsed=_IS_PARSED.items() <= (file.metadata or {}).items())
    if len(file) < len(outputs):
        return list(file.names)
    return [*_prefixed(file.names[: -len(outputs)], outputs), *outputs.names]


def _prefixed(inputs: Iterable[str], outputs: pa.Schema) -> list[str]:
    """Return the names of input columns, with a prefix if an output column has the same name."""
    taken = set(outputs.names)
    names = []
    for name in inputs:
        while name in taken:
            name = f"input_{name}"
        taken.add(name)
        names.append(name)
    return names
