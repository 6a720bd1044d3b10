"""The first stage that Ray Data runs: read, template and tokenise units on a CPU.

A unit is one row, and goes on as soon as it is ready. What the stage needs travels in one picklable job record. It
knows neither engines nor the driver.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from peagle.catalog.targets import tokenizer_of
from peagle.corpus.scan import read
from peagle.prompting import PromptBuilder, PromptSpec
from peagle.requests.builder import RequestBuilder, SamplingSpec
from pipelines.batch.plan import WorkUnit, unit_from_json
from pipelines.batch.rows import given_back, packed, prepare
from pipelines.batch.rundir import RunDirectory


@dataclass(frozen=True, kw_only=True)
class PrepareJob:
    """What the CPU stage needs: a tokenizer's model (None for the fake engine's bytes), the requests, the schema.

    `revision` is of a model that is a hub id, None for the latest; `driver` the number of the lease of who runs it.
    """

    run_dir: str
    model: str | None
    prompts: PromptSpec
    sampling: SamplingSpec
    schema: pa.Schema
    revision: str | None = None
    driver: int = 0


def prepare_units(batch: pa.Table, *, job: PrepareJob) -> Iterator[pa.Table]:
    """Read, template and tokenise units one after the other; `batch` has them in its one row, a line each.

    Once the run is being stopped, one that is given back stands for all that follow.
    """
    run = RunDirectory(job.run_dir, driver=job.driver)
    for unit in map(unit_from_json, batch.column("units")[0].as_py().split("\n")):
        if run.stop.grace_s() is not None:
            yield packed(given_back(unit))
            return
        yield packed(prepare_unit(unit, job))


def prepare_unit(unit: WorkUnit, job: PrepareJob) -> pa.Table:
    """Read, template and tokenise one unit; `PreparedUnit` reads it."""
    prompts = PromptBuilder(job.prompts, tokenizer_of(job.model, job.revision), job.sampling.limits.max_model_len)
    rows = list(read(unit.span))
    taken = rows if unit.rows is None else [rows[index] for index in unit.rows]
    return prepare(unit, taken, job.schema, RequestBuilder(prompts, job.sampling))
