"""Generate a sample of a run's rows again without the drafter, to verify that the drafter was lossless.

The engine has the run's settings and runs in this process, without Ray. Prompts are rebuilt from the input. A row is
skipped, with a reason, if its input is missing or its response was sampled.
"""

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peagle import hardware
from peagle.bench.engine import StartEngine, with_engine
from peagle.catalog.local import tokenizer_of
from peagle.catalog.targets import resolve_model
from peagle.corpus.scan import read_span
from peagle.engine.interface import CompletionOutput, Engine, RequestRefused
from peagle.engine.lossless import NUM_LIKELIEST, Comparison, Response, compare, tie_margin
from peagle.engine.response_parser import PARSER_KEYS, ResponseParser, has_parser
from peagle.engine.spec import EngineSpec, spec_precision
from peagle.engine.steps import max_num_batched_tokens
from peagle.errors import ConfigError, InputError
from peagle.parquet_table import read_table
from peagle.requests.builder import RequestBuilder, SamplingSpec
from peagle.requests.prompts import PromptBuilder, PromptSpec, RowError
from peagle.requests.sampling import SamplingLimits
from peagle.runs.columns import internal_names
from peagle.runs.directory import RunDirectory, uses_fake_engine
from peagle.runs.plan import WorkUnit
from peagle.storage import open_to_read


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedEngine:
    """The engine of a run, to be started without its drafter."""

    spec: EngineSpec  # spec of the run's engine, including its drafter
    is_fake: bool
    precision: str
    max_tie: float  # the difference of log-probabilities that counts as a tie (`peagle.engine.lossless.tie_margin`)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAudit:
    """One row of the sample: the result, or why the row was skipped."""

    id: str
    verdict: Comparison | None = None
    skipped: str = ""

    @property
    def outcome(self) -> str:
        return self.verdict.outcome if self.verdict else "skipped"

    def to_dict(self) -> dict[str, Any]:
        if self.verdict is None:
            return {"id": self.id, "outcome": "skipped", "reason": self.skipped}
        return {"id": self.id, **self.verdict.to_dict()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowToRegenerate:
    """A committed row with its request."""

    id: str
    committed: Response
    prompt_token_ids: list[int]
    sampling: dict[str, Any]


def audited_engine(manifest: dict[str, Any], max_tie: float | None) -> AuditedEngine:
    """Return the engine for the sample; raises ConfigError if this machine has another precision or other weights."""
    spec = EngineSpec.from_dict(manifest["engine"])
    run_precision = manifest["fingerprint"]["precision"]
    if uses_fake_engine(manifest):
        return AuditedEngine(spec=spec, is_fake=True, precision="the fake engine", max_tie=0.0)
    precision = spec_precision(spec, hardware.detect())
    if precision.describe() != run_precision:
        raise ConfigError(
            f"the run computed in {run_precision}, but this machine computes in {precision.describe()}",
            hint="audit the run on the same hardware, or only its files with --no-regenerate",
        )
    if resolve_model(spec.model, commits=spec.commits).fingerprint != manifest["fingerprint"]["model"]["weights"]:
        raise ConfigError(
            f"the weights of {spec.model} differ from those of the run",
            hint="audit the run where the same weights are available, or only its files with --no-regenerate",
        )
    tie = tie_margin(precision) if max_tie is None else max_tie
    return AuditedEngine(spec=spec, is_fake=False, precision=run_precision, max_tie=tie)


def sample_rows(rows_by_unit: dict[int, int], num_rows: int, seed: int) -> dict[int, list[int]]:
    """Return a random sample of rows: for each unit, the positions of the sampled rows in its file.

    >>> sample_rows({0: 2, 3: 1}, 8, seed=0)
    {0: [0, 1], 3: [0]}
    """
    total = sum(rows_by_unit.values())
    chosen = sorted(random.Random(seed).sample(range(total), min(num_rows, total)))
    positions: dict[int, list[int]] = {}
    first = 0
    for unit, count in rows_by_unit.items():
        if unit_positions := [row - first for row in chosen if first <= row < first + count]:
            positions[unit] = unit_positions
        first += count
    return positions


def audit_rows(
    run: RunDirectory,
    manifest: dict[str, Any],
    audited: AuditedEngine,
    positions: dict[int, list[int]],
    announce: Callable[[str], None],
    start: StartEngine,
) -> list[RowAudit]:
    """Generate the rows at `positions` again, and compare them with the committed rows."""
    units = {unit.unit: unit for unit in run.plan().units}
    builder = _builder(manifest, audited)
    parser = None if audited.is_fake else _parser(manifest["config"], audited.spec)
    run_sampling = manifest["fingerprint"]["sampling"]
    base_sampling = {name: value for name, value in run_sampling.items() if name not in ("column", "seed")}
    columns = ["id", "response", "finish_reason", "num_prompt_tokens", "num_output_tokens", "completions"]
    audits_or_samples: list[RowAudit | _RowToRegenerate] = []
    for unit_number, unit_positions in positions.items():
        with open_to_read(run.unit_path(unit_number)) as file:
            table = read_table(file)
        table = table.rename_columns(internal_names(table.schema)).select(columns).take(unit_positions)
        committed_rows = table.to_pylist()
        audits_or_samples += _samples(
            units[unit_number], committed_rows, builder, base_sampling, parser, is_fake=audited.is_fake
        )
    samples = [item for item in audits_or_samples if isinstance(item, _RowToRegenerate)]
    audits = _regenerate(samples, audited, announce, start) if samples else {}
    return [item if isinstance(item, RowAudit) else audits[item.id] for item in audits_or_samples]


def _builder(manifest: dict[str, Any], audited: AuditedEngine) -> RequestBuilder:
    spec, fingerprint = audited.spec, manifest["fingerprint"]
    assert spec.max_model_len is not None, "compose_engine() sets it"
    tokenizer = tokenizer_of(None if audited.is_fake else spec.model, spec.revision)
    prompts = PromptBuilder(PromptSpec(**fingerprint["prompts"]), tokenizer, spec.max_model_len)
    sampling = dict(fingerprint["sampling"])
    column = sampling.pop("column")
    limits = SamplingLimits(max_model_len=spec.max_model_len)
    config = manifest["config"]
    sampling_spec = SamplingSpec(
        base=sampling,
        column=column,
        limits=limits,
        has_tool_parser=config.get("tool_call_parser") is not None,
        has_parser=has_parser(config),
    )
    return RequestBuilder(prompts, sampling_spec)


def _parser(config: dict[str, Any], spec: EngineSpec) -> ResponseParser | None:
    if not has_parser(config):
        return None
    parsers = {key: config.get(key) for key in PARSER_KEYS}
    return ResponseParser(tokenizer_of(spec.model, spec.revision), **parsers)


def _samples(
    unit: WorkUnit,
    rows: Sequence[dict[str, Any]],
    builder: RequestBuilder,
    base_sampling: dict[str, Any],
    parser: ResponseParser | None,
    *,
    is_fake: bool,
) -> list[RowAudit | _RowToRegenerate]:
    """Return the rows of one unit with their requests, or why they cannot be compared."""
    try:
        raw_rows = list(read_span(unit.span))
    except InputError as error:
        return [RowAudit(id=row["id"], skipped=f"the input cannot be read: {error.message}") for row in rows]
    audits_or_samples: list[RowAudit | _RowToRegenerate] = []
    for row in rows:
        raw = raw_rows[int(row["id"]) - unit.first_id]
        request = RowError(reason=raw.reason, message=raw.error) if raw.error else builder.build(raw.columns)
        if isinstance(request, RowError) or len(request.prompt_token_ids) != row["num_prompt_tokens"]:
            audits_or_samples.append(RowAudit(id=row["id"], skipped="the input now yields a different prompt"))
            continue
        sampling = base_sampling | {key: value for key, value in request.sampling.items() if key != "seed"}
        answer = row
        if parser is not None and request.parsing is not None:
            sampling |= parser.sampling(request.parsing)
            answer = {**row["completions"][0], "response": row["completions"][0]["text"]}
        if sampling["temperature"] > 0 and not is_fake:
            # A seed does not help: with a drafter, other random numbers are drawn from the same distribution.
            audits_or_samples.append(RowAudit(id=row["id"], skipped="sampled (temperature above 0)"))
            continue
        committed = Response(
            text=answer["response"],
            finish_reason=answer["finish_reason"],
            num_output_tokens=row["num_output_tokens"],
        )
        audits_or_samples.append(
            _RowToRegenerate(
                id=row["id"], committed=committed, prompt_token_ids=request.prompt_token_ids, sampling=sampling
            )
        )
    return audits_or_samples


def _regenerate(
    samples: Sequence[_RowToRegenerate], audited: AuditedEngine, announce: Callable[[str], None], start: StartEngine
) -> dict[str, RowAudit]:
    announce(f"starting {audited.spec.model} without a drafter, {audited.precision}")
    if audited.is_fake:
        from peagle.engine.fake import FakeEngine

        return asyncio.run(_generate_all(FakeEngine(), samples, audited, announce))

    async def use(engine: Engine, _: float) -> dict[str, RowAudit]:
        return await _generate_all(engine, samples, audited, announce)

    spec = replace(
        audited.spec,
        drafter=None,
        num_nodes=1,
        # The run's value with the drafter, so that prompts are prefilled in the same chunks.
        max_num_batched_tokens=audited.spec.max_num_batched_tokens
        or max_num_batched_tokens(audited.spec, hardware.detect()),
        # The log-probabilities after penalties and constraints, from which the token was chosen.
        extra={**audited.spec.extra, "logprobs_mode": "processed_logprobs"},
    )
    with tempfile.TemporaryDirectory() as folder:
        return with_engine(spec, hardware.detect(), start, Path(folder) / "engine.log", use)


async def _generate_all(
    engine: Engine, samples: Sequence[_RowToRegenerate], audited: AuditedEngine, announce: Callable[[str], None]
) -> dict[str, RowAudit]:
    slots = asyncio.Semaphore(audited.spec.max_num_seqs)
    tokenizer: Any = tokenizer_of(None if audited.is_fake else audited.spec.model, audited.spec.revision)
    special_tokens = tuple(getattr(tokenizer, "all_special_tokens", ()))

    async def generate(sample: _RowToRegenerate) -> RowAudit:
        sampling = {**sample.sampling, "logprobs": NUM_LIKELIEST}
        async with slots:
            try:
                generation = await engine.generate(f"audit-{sample.id}", sample.prompt_token_ids, sampling)
            except RequestRefused as error:
                return RowAudit(id=sample.id, skipped=f"refused without the drafter: {error}")
        end_texts = (*special_tokens, *(sample.sampling.get("stop") or ()))
        completion: CompletionOutput = generation.completions[0]
        if len(generation.completions) > 1:  # only with the fake engine; the row has the tokens of all responses
            completion = replace(completion, num_output_tokens=generation.num_output_tokens)
        verdict = compare(sample.committed, completion, ends=end_texts, max_tie=audited.max_tie)
        return RowAudit(id=sample.id, verdict=verdict)

    audits = await asyncio.gather(*map(generate, samples))
    counts = Counter(audit.outcome for audit in audits)
    announce(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    return {audit.id: audit for audit in audits}
