"""The first stage that Ray Data runs: read, template and tokenise a unit on a CPU.

A unit is one block. What the stage needs travels in one picklable job record. It knows neither engines nor the driver.
"""

import functools
from dataclasses import dataclass

import pyarrow as pa

from peagle.prompting import PromptBuilder, PromptSpec, Tokenizer
from peagle.requests import RequestBuilder, SamplingSpec
from pipelines.batch.corpus import read
from pipelines.batch.node import localize
from pipelines.batch.plan import unit_from_json
from pipelines.batch.rows import given_back, prepare
from pipelines.batch.rundir import RunDirectory


@dataclass(frozen=True, kw_only=True)
class PrepareJob:
    """What the CPU stage needs: a tokenizer's model (None for the fake engine's bytes), the requests, the schema."""

    run_dir: str
    model: str | None
    prompts: PromptSpec
    sampling: SamplingSpec
    schema: pa.Schema


def prepare_unit(batch: pa.Table, *, job: PrepareJob) -> pa.Table:
    """Read, template and tokenise one unit; `batch` has it in its one row."""
    unit = unit_from_json(batch.column("unit")[0].as_py())
    if RunDirectory(job.run_dir).stop_grace_s() is not None:
        return given_back(unit)
    prompts = PromptBuilder(job.prompts, load_tokenizer(job.model), job.sampling.limits.max_model_len)
    rows = list(read(unit.span))
    taken = rows if unit.rows is None else [rows[index] for index in unit.rows]
    return prepare(unit, taken, job.schema, RequestBuilder(prompts, job.sampling))


@functools.lru_cache(maxsize=2)
def load_tokenizer(model: str | None) -> Tokenizer:
    """The target's tokenizer, once a process; bytes where the fake engine has no model."""
    if model is None:
        from peagle.engine.fake_engine import ByteTokenizer

        return ByteTokenizer()
    from transformers import AutoTokenizer

    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(localize(model))
    return tokenizer
