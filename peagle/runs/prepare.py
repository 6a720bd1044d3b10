"""Prepare units on a CPU (read, apply the template, tokenise), plan retries, and estimate a corpus's tokens."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from peagle.corpus.scan import read_span
from peagle.requests.builder import RequestBuilder
from peagle.runs.directory import RunDirectory
from peagle.runs.plan import Plan, Retry, WorkUnit
from peagle.runs.rows import PreparedUnit, prepare_rows

_MAX_SAMPLED_ROWS = 200
_MAX_SAMPLED_UNITS = 20  # each unit's file is opened, and a compressed file is read from its beginning


def prepare_unit(unit: WorkUnit, schema: pa.Schema, builder: RequestBuilder) -> pa.Table:
    """Read one unit, apply its template and tokenise it. The result is for `PreparedUnit`."""
    rows = list(read_span(unit.span))
    if unit.rows is not None:
        rows = [rows[index] for index in unit.rows]
    return prepare_rows(unit, rows, schema, builder)


def plan_retry(run: RunDirectory, plan: Plan) -> Plan:
    """Plan new units for all dead letters, and return the new plan; without dead letters, return the same plan."""
    superseded, committed = run.superseded(), run.committed()
    number = max(unit.unit for unit in plan.units)
    retries = []
    for unit in plan.units:
        if unit.unit in superseded or unit.unit not in committed:
            continue
        if rows := tuple(int(letter["id"]) - unit.first_id for letter in run.letters_of_unit(unit.unit)):
            number += 1
            retries.append(Retry(unit=number, supersedes=unit.unit, rows=rows))
    if not retries:
        return plan
    run.add_retries(retries, number=plan.num_retries + 1)
    return plan.with_retries(retries)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSample:
    """An estimate of a corpus from a sample of its rows."""

    num_rows: int  # rows of the corpus
    num_sampled: int
    num_failed: int  # sampled rows that would be dead letters
    prompt_tokens: float  # estimate for all rows
    max_output_tokens: float  # estimate for all rows, if every answer has its maximum length
    example: str = ""  # the message of a dead letter; empty if there are none

    @property
    def is_whole(self) -> bool:
        """Whether all rows were sampled."""
        return self.num_sampled == self.num_rows


def sample_corpus(plan: Plan, builder: RequestBuilder) -> CorpusSample:
    """Prepare the first rows of some units, spread evenly over the corpus."""
    units = [unit for unit in plan.units if unit.supersedes is None]
    if plan.num_rows > _MAX_SAMPLED_ROWS:
        units = units[:: math.ceil(len(units) / _MAX_SAMPLED_UNITS)]
        rows_per_unit = math.ceil(_MAX_SAMPLED_ROWS / len(units))
        units = [replace(unit, rows=tuple(range(min(rows_per_unit, unit.num_rows)))) for unit in units]
    num_sampled, num_prompt_tokens, num_output_tokens = 0, 0, 0
    letters: list[dict[str, Any]] = []
    for unit in units:
        prepared = PreparedUnit(prepare_unit(unit, plan.schema, builder))
        letters += prepared.dead_letters.values()
        for prompt, row_sampling in zip(prepared.prompts, prepared.sampling, strict=True):
            num_sampled += 1
            if prompt is not None:
                sampling = {**builder.sampling.base, **row_sampling}
                num_prompt_tokens += len(prompt)
                num_output_tokens += sampling["max_tokens"] * sampling["n"]
    factor = plan.num_rows / num_sampled
    return CorpusSample(
        num_rows=plan.num_rows,
        num_sampled=num_sampled,
        num_failed=len(letters),
        prompt_tokens=factor * num_prompt_tokens,
        max_output_tokens=factor * num_output_tokens,
        example=letters[0]["message"] if letters else "",
    )
