"""Prepare units on a CPU: read, template, tokenise; and plan retries.

It is the first stage that Ray Data runs.

A unit is one row, and goes on as soon as it is ready. What the stage needs travels in one picklable job record. It
knows neither engines nor the driver.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from peagle.catalog.targets import tokenizer_of
from peagle.corpus.scan import read
from peagle.requests.builder import RequestBuilder, SamplingSpec
from peagle.requests.prompts import PromptBuilder, PromptSpec
from peagle.runs.directory import RunDirectory
from peagle.runs.plan import Plan, Retry, WorkUnit, unit_from_json
from peagle.runs.rows import given_back, packed, prepare


@dataclass(frozen=True, kw_only=True)
class PrepareJob:
    """The needs of the CPU stage: tokenizer, requests, schema.

    The tokenizer's model is None for the fake engine's bytes.

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
    """Read, template and tokenise units one after the other.

    `batch` has them in its one row, a line each.

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


def plan_retry(run: RunDirectory, plan: Plan) -> Plan:
    """Plan new units for all dead letters.

    From now on these units answer for those rows.

    Returns:
        `plan` with the new units behind its own, or as it is if there is no dead letter.

    Raises:
        RunInUse: another driver has planned a retry since `plan` was read.
    """
    superseded, committed = run.superseded(), run.committed()
    number = max(unit.unit for unit in plan.units)
    retries = []
    for unit in plan.units:
        if unit.unit in superseded or unit.unit not in committed:
            continue
        if rows := tuple(int(letter["id"]) - unit.first_id for letter in run.letters(unit.unit)):
            number += 1
            retries.append(Retry(unit=number, supersedes=unit.unit, rows=rows))
    if not retries:
        return plan
    run.add_retries(retries, number=plan.num_retries + 1)
    return plan.with_retries(retries)
