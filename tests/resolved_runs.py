"""Make resolved runs for tests, with or without a corpus."""

import pyarrow as pa

from peagle import hardware
from peagle.corpus.rows import Span
from peagle.runs.directory import RunDirectory
from peagle.runs.plan import Plan, WorkUnit
from pipelines.batch.request import RunRequest
from pipelines.batch.resolve import resolve

COMMAND = ["peagle", "generate"]


def corpus_plan(columns=("prompt",), *, file_format="csv", num_units=1, rows_per_unit=3):
    """Return the plan of a corpus that does not exist."""
    span = Span(path="in.csv", format=file_format, first_row=0, num_rows=rows_per_unit)
    return Plan(
        units=tuple(WorkUnit(unit=n, first_id=rows_per_unit * n, span=span) for n in range(num_units)),
        rows_per_unit=rows_per_unit,
        schema=pa.schema([(name, pa.string()) for name in columns]),
        corpus_fingerprint="c",
    )


def resolve_run(config, plan=None, machine=None, *, num_nodes=1, **request):
    """Return the resolved run of a configuration, without writing anything."""
    return resolve(
        RunRequest(config=config, command=COMMAND, **request),
        RunDirectory(config.output),
        plan or corpus_plan(),
        machine or hardware.detect(),
        num_nodes=num_nodes,
        announce=lambda _: None,
    )
