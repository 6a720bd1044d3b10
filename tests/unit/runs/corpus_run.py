"""A run that is planned, prepared, committed, exported and audited without Ray or an engine."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
from devices import MACHINE
from resolved_runs import resolve_run
from usage_records import unit_usage

from peagle.engine.interface import Generation
from peagle.runs.audit import audit_unit, expected_schema
from peagle.runs.export import export
from peagle.runs.plan import make_plan, unit_to_json
from peagle.runs.rows import PreparedUnit, decode_rows, require_storable
from peagle.storage import open_to_read
from pipelines.batch.config import GenerateConfig
from pipelines.batch.streaming import prepare_units

ANSWER = Generation(
    text="x", finish_reason="stop", num_prompt_tokens=2, num_cached_tokens=None, num_output_tokens=1, speculation=None,
    ttft_s=None, latency_s=1.0,
)  # fmt: skip


class CorpusRun:
    """A finished run over the corpus at `path`, in which every answer is "x"."""

    def __init__(self, path, output, **options):
        config = GenerateConfig(input=str(path), output=output, engine="fake", usd_per_hour=1, **options)
        plan = make_plan(config)
        require_storable(plan.schema)
        resolved = resolve_run(config, plan, MACHINE)
        self.run = resolved.directory
        self.run.create({"run_id": "r", "fingerprint": {"prompts": resolved.prompts.to_dict()}}, plan)
        self.plan = self.run.plan()
        batch = pa.table({"units": ["\n".join(map(unit_to_json, self.plan.units))]})
        self.prepared = [PreparedUnit(decode_rows(block)) for block in prepare_units(batch, run=resolved.for_stages())]
        for unit in self.prepared:
            self._commit(unit)

    def table(self):
        """Return the committed rows."""
        return pa.concat_tables(self._unit_table(unit.unit) for unit in self.plan.units)

    def export(self, output_format):
        """Export the run, and return the exported rows and dead letters."""
        export(self.run, output_format)
        folder = self.run.root / "export" / output_format
        dead_letters = parse_json_lines(folder / "errors.jsonl")
        if output_format == "parquet":
            with open_to_read(folder / "output.parquet") as file:
                return pq.read_table(file), dead_letters
        return parse_json_lines(folder / "output.jsonl"), dead_letters

    def findings(self):
        """Return the findings of an audit of the units."""
        schema = expected_schema(self.plan.schema, keeps_inputs=True)
        audits = [audit_unit(self.run, unit, schema, {}) for unit in self.plan.units]
        return [finding for audit in audits for finding in audit.findings]

    def _commit(self, unit):
        answers = {index: ANSWER for index, prompt in enumerate(unit.prompts) if prompt is not None}
        usage = unit_usage(
            num_rows=len(answers),
            num_failed_rows=len(unit.dead_letters),
            num_prompt_tokens=2 * len(answers),
            num_output_tokens=len(answers),
        )
        assert self.run.commit(unit.unit.unit, unit.output(answers, "m", None), usage, unit.dead_letter_records())

    def _unit_table(self, unit):
        with open_to_read(self.run.unit_path(unit)) as file:
            return pq.read_table(file)


def parse_json_lines(path):
    """Parse JSON lines, and refuse NaN and infinities, which are not JSON."""
    return [json.loads(line, parse_constant=_refuse) for line in path.read_bytes().splitlines()]


def _refuse(constant):
    raise ValueError(f"{constant} is not JSON")
