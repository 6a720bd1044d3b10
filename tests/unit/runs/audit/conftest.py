"""Runs of the fake engine without Ray."""

import asyncio
from dataclasses import replace

import pytest
from resolved_runs import COMMAND, resolve_run
from usage_records import engine_session, unit_usage

from peagle.engine.fake import FakeEngine
from peagle.requests.prompts import RowError
from peagle.runs.plan import make_plan
from peagle.runs.prepare import prepare_unit
from peagle.runs.rows import PreparedUnit
from peagle.speculation import SpeculationStats
from pipelines.batch.config import GenerateConfig
from pipelines.batch.request import RunRequest
from pipelines.batch.run import manifest

SESSION = engine_session("engine", busy_s=9.0)


class FakeRun:
    """A run of the fake engine. Tests choose which units are generated."""

    def __init__(self, config):
        self.plan = make_plan(config)
        self.resolved = resolve_run(config, self.plan)
        self.run = self.resolved.directory
        self.run.create(manifest(RunRequest(config=config, command=COMMAND), self.resolved), self.plan)
        drafter = self.resolved.spec.drafter
        self.engine = FakeEngine(num_speculative_tokens=drafter.num_speculative_tokens if drafter else 0)

    def generate(self, *units, refusing=()):
        """Generate and commit these units, or all units of the plan. The rows with the ids `refusing` are refused."""
        plan = self.run.plan()
        for unit in plan.units if not units else [unit for unit in plan.remaining_units(()) if unit.unit in units]:
            self._commit(unit, refusing)
        num_output_tokens = sum(usage.num_output_tokens for usage in self.run.usages())
        self.run.write_session(replace(SESSION, num_output_tokens=num_output_tokens))
        return self.run

    def _commit(self, unit, refusing):
        prepared = PreparedUnit(prepare_unit(unit, self.plan.schema, self.resolved.request_builder()))
        for index in range(unit.num_rows):
            if unit.row_id(index) in refusing:
                prepared.refuse(index, RowError(reason="refused", message="no"))
        generations = asyncio.run(self._generations(prepared))
        drafts = [generation.speculation for generation in generations.values() if generation.speculation]
        usage = unit_usage(
            "engine",
            num_rows=len(generations),
            num_failed_rows=len(prepared.dead_letters),
            num_prompt_tokens=sum(generation.num_prompt_tokens for generation in generations.values()),
            num_output_tokens=sum(generation.num_output_tokens for generation in generations.values()),
            speculation=sum(drafts, start=SpeculationStats.empty()),
        )
        table = prepared.output(generations, self.resolved.model.name, self.resolved.drafter.name)
        assert self.run.commit(unit.unit, table, usage, prepared.dead_letter_records())

    async def _generations(self, prepared):
        base = self.resolved.sampling.base
        return {
            index: await self.engine.generate(str(index), prompt, {**base, **prepared.sampling[index]})
            for index, prompt in enumerate(prepared.prompts)
            if index not in prepared.dead_letters
        }


@pytest.fixture
def plan_run(write_jsonl, tmp_path):
    """Return a function that plans a run in units of two rows. By default, six rows are valid and one is invalid."""

    def plan(rows=None, name="run", **options):
        rows = [*({"prompt": f"say {n}", "id": n} for n in range(6)), "{bad"] if rows is None else rows
        corpus = write_jsonl(rows, f"{name}.jsonl")
        options = {"input": str(corpus), "num_speculative_tokens": 3, "rows_per_unit": 2, **options}
        return FakeRun(GenerateConfig(output=tmp_path / name, engine="fake", usd_per_hour=1, **options))

    return plan


@pytest.fixture
def finished_run(plan_run):
    """A finished run of four units."""
    return plan_run().generate()
