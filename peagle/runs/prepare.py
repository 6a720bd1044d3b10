"""Prepare units on a CPU: read, template, tokenise; plan retries; sample a corpus.

It is the first stage that Ray Data runs.

A unit is one row, and goes on as soon as it is ready. What the stage needs travels in one picklable job record. It
knows neither engines nor the driver.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from peagle.catalog.local import tokenizer_of
from peagle.corpus.scan import read
from peagle.requests.builder import RequestBuilder, SamplingSpec
from peagle.requests.prompts import PromptBuilder, PromptSpec
from peagle.runs.directory import RunDirectory
from peagle.runs.plan import Plan, Retry, WorkUnit, unit_from_json
from peagle.runs.rows import PreparedUnit, given_back, packed, prepare

_MOST_SAMPLED_ROWS = 200
_MOST_SAMPLED_UNITS = 20  # the file of each is opened, and a compressed one read from its beginning


@dataclass(frozen=True, kw_only=True)
class PrepareJob:
    """The needs of the CPU stage: tokenizer, requests, schema.

    The tokenizer's model is None for the fake engine's bytes.

    `revision` is the model's as its spec pins it, None for the latest of a hub id; `driver` the number of the lease of
    who runs it.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSample:
    """Prepared rows of a corpus, and what follows for all of them.

    Attributes:
        num_rows: rows of the corpus.
        num_sampled: rows that were prepared.
        num_failed: sampled rows that would be dead letters.
        prompt_tokens: of all rows, by the mean of the sampled ones.
        most_output_tokens: likewise, where every answer is as long as it may be.
        example: the message of a dead letter; empty where there is none.
    """

    num_rows: int
    num_sampled: int
    num_failed: int
    prompt_tokens: float
    most_output_tokens: float
    example: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether every row was prepared."""
        return self.num_sampled == self.num_rows


def sample_corpus(plan: Plan, job: PrepareJob) -> CorpusSample:
    """Prepare the first rows of some units, spread evenly over the corpus.

    Raises:
        InputError: a file of the corpus cannot be read.
    """
    units = [unit for unit in plan.units if unit.supersedes is None]
    if plan.num_rows > _MOST_SAMPLED_ROWS:
        units = units[:: -(-len(units) // _MOST_SAMPLED_UNITS)]
        each = -(-_MOST_SAMPLED_ROWS // len(units))
        units = [_beginning(unit, each) for unit in units]
    prepared = [PreparedUnit(prepare_unit(unit, job)) for unit in units]
    pairs = [pair for one in prepared for pair in zip(one.prompts, one.sampling, strict=True)]
    answered = [(len(prompt), {**job.sampling.base, **own}) for prompt, own in pairs if prompt is not None]
    letters = [letter for one in prepared for letter in one.dead_letters.values()]
    factor = plan.num_rows / len(pairs)
    return CorpusSample(
        num_rows=plan.num_rows,
        num_sampled=len(pairs),
        num_failed=len(letters),
        prompt_tokens=factor * sum(num_tokens for num_tokens, _ in answered),
        most_output_tokens=factor * sum(own["max_tokens"] * own["n"] for _, own in answered),
        example=letters[0]["message"] if letters else "",
    )


def _beginning(unit: WorkUnit, num_rows: int) -> WorkUnit:
    return replace(unit, rows=tuple(range(min(num_rows, unit.num_rows))))
