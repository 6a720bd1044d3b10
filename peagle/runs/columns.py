"""The columns of a unit's file: those of the input, then those of the output.

The input's columns keep their names. An output column whose name is taken has another name in the file. Names are
compared without regard to case, as DuckDB, Spark, Hive and BigQuery do. Inside peagle, output columns always have the
names of `OUTPUT_SCHEMA`, and an input column of such a name has the prefix `input_`. Older runs have these names in
their files.
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
        # Every response of a row that requested several or log-probabilities; otherwise null.
        ("completions", pa.list_(_COMPLETION)),
    ]
)


def names_in_file(inputs: Sequence[str], *, keeps_inputs: bool) -> list[str]:
    """Return the names of a file's columns.

    Args:
        keeps_inputs: whether input columns keep their names; False for older runs.

    >>> names_in_file(["ID", "task"], keeps_inputs=True)[:4]
    ['ID', 'task', 'row_id', 'response']
    >>> names_in_file(["id", "task"], keeps_inputs=False)[:4]
    ['input_id', 'task', 'id', 'response']
    """
    if not keeps_inputs:
        return [*_prefixed(inputs), *OUTPUT_SCHEMA.names]
    taken = {name.casefold() for name in inputs}
    outputs = []
    for name in OUTPUT_SCHEMA.names:
        stored = "row_id" if name == "id" and name in taken else name
        while stored.casefold() in taken:
            stored = f"peagle_{stored}"
        taken.add(stored.casefold())
        outputs.append(stored)
    return [*inputs, *outputs]


def plain_names(stored: Sequence[str]) -> list[str]:
    """Return the names of a file's columns inside peagle. A file with fewer columns is not a unit's, and keeps them.

    >>> plain_names(names_in_file(["id"], keeps_inputs=True))[:2]
    ['input_id', 'id']
    """
    if len(stored) < len(OUTPUT_SCHEMA):
        return list(stored)
    return [*_prefixed(stored[: -len(OUTPUT_SCHEMA)]), *OUTPUT_SCHEMA.names]


def _prefixed(inputs: Iterable[str]) -> list[str]:
    """Return the names of input columns, with a prefix if an output column has the same name."""
    taken = set(OUTPUT_SCHEMA.names)
    names = []
    for name in inputs:
        while name in taken:
            name = f"input_{name}"
        taken.add(name)
        names.append(name)
    return names
