"""Try the lossless promise: generate a sample of rows again, without drafter.

On the same engine settings.

The engine runs in this process, without Ray. Prompts are made from the input again, as the run made them; a row whose
input is gone, or whose response was drawn by lot, cannot be compared and is said to be skipped.
"""

import asyncio
import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peagle import hardware
from peagle.bench.engine import Start, with_engine
from peagle.catalog.local import tokenizer_of
from peagle.catalog.targets import resolve_model
from peagle.corpus.scan import read
from peagle.engine.interface import CompletionOutput, Engine, RequestRefused
from peagle.engine.lossless import NUM_LIKELIEST, Comparison, Response, compare, tie_margin
from peagle.engine.spec import EngineSpec, spec_precision
from peagle.engine.steps import max_num_batched_tokens
from peagle.errors import ConfigError, InputError
from peagle.parquet_table import read_table
from peagle.requests.builder import RequestBuilder, SamplingSpec
from peagle.requests.prompts import PromptBuilder, PromptSpec, RowError
from peagle.requests.sampling import SamplingLimits
from peagle.runs.directory import RunDirectory
from peagle.runs.files import is_stand_in
from peagle.runs.plan import WorkUnit
from peagle.storage import open_to_read

_READ = ("id", "response", "finish_reason", "num_prompt_tokens", "num_output_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedEngine:
    """The engine of a run, without its drafter.

    Attributes:
        spec: the run's own engine, drafter included; its models as the run names them.
        is_fake: whether the fake engine answered.
        max_tie: as `peagle.engine.lossless.tie_margin` says.
    """

    spec: EngineSpec
    is_fake: bool
    precision: str
    max_tie: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAudit:
    """One row of the sample: its verdict, or why it was skipped."""

    id: str
    verdict: Comparison | None = None
    skipped: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        if self.verdict is None:
            return {"id": self.id, "outcome": "skipped", "reason": self.skipped}
        return {"id": self.id, **self.verdict.to_dict()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampled:
    """A row of the sample with what it was asked."""

    id: str
    committed: Response
    prompt_token_ids: list[int]
    sampling: dict[str, Any]


def require_target(manifest: dict[str, Any], max_tie: float | None) -> AuditedEngine:
    """The run's target, if it can run here as it did there.

    Raises:
        ConfigError: this machine computes in another precision, or the model is not the one that answered.
    """
    spec = EngineSpec.from_dict(manifest["engine"])
    stated = manifest["fingerprint"]["precision"]
    if is_stand_in(manifest):
        return AuditedEngine(spec=spec, is_fake=True, precision="the fake engine", max_tie=0.0)
    precision = spec_precision(spec, hardware.detect())
    if precision.describe() != stated:
        raise ConfigError(
            f"the run computed in {stated}, and this machine computes in {precision.describe()}",
            hint="audit it on hardware like its own, or its files alone with --no-regenerate",
        )
    if resolve_model(spec.model, commits=spec.commits).fingerprint != manifest["fingerprint"]["model"]["weights"]:
        raise ConfigError(
            f"the model {spec.model} is not the one that answered: its weights differ",
            hint="audit it where that model is, or its files alone with --no-regenerate",
        )
    tie = tie_margin(precision) if max_tie is None else max_tie
    return AuditedEngine(spec=spec, is_fake=False, precision=stated, max_tie=tie)


def choose(rows_of: dict[int, int], num_rows: int, seed: int) -> dict[int, list[int]]:
    """A sample without repetition: by unit, the positions of its rows in its file.

    >>> choose({0: 2, 3: 1}, 8, seed=0)
    {0: [0, 1], 3: [0]}
    """
    total = sum(rows_of.values())
    chosen = sorted(random.Random(seed).sample(range(total), min(num_rows, total)))
    positions: defaultdict[int, list[int]] = defaultdict(list)
    first = 0
    for unit, count in rows_of.items():
        positions[unit] = [row - first for row in chosen if first <= row < first + count]
        first += count
    return {unit: rows for unit, rows in positions.items() if rows}


def audit_rows(
    run: RunDirectory,
    manifest: dict[str, Any],
    target: AuditedEngine,
    positions: dict[int, list[int]],
    announce: Callable[[str], None],
    start: Start,
) -> list[RowAudit]:
    """Generate the chosen rows again and compare each with what is committed.

    Args:
        start: the target on this machine, for a run of vLLM's.

    Raises:
        EngineError: the engine did not start or died.
    """
    units = {unit.unit: unit for unit in run.plan().units}
    builder = _builder(manifest, target)
    base = {k: v for k, v in manifest["fingerprint"]["sampling"].items() if k not in ("column", "seed")}
    outcomes: list[RowAudit | _Sampled] = []
    for number, rows in positions.items():
        with open_to_read(run.unit_path(number)) as file:
            table = read_table(file, columns=list(_READ)).take(rows)
        outcomes += _requests(units[number], table.to_pylist(), builder, base, target.is_fake)
    sampled = [one for one in outcomes if isinstance(one, _Sampled)]
    verdicts = _regenerate(sampled, target, announce, start) if sampled else {}
    return [one if isinstance(one, RowAudit) else verdicts[one.id] for one in outcomes]


def _builder(manifest: dict[str, Any], target: AuditedEngine) -> RequestBuilder:
    spec, fingerprint = target.spec, manifest["fingerprint"]
    assert spec.max_model_len is not None, "compose_engine() sets it"
    tokenizer = tokenizer_of(None if target.is_fake else spec.model, spec.revision)
    prompts = PromptBuilder(PromptSpec(**fingerprint["prompts"]), tokenizer, spec.max_model_len)
    sampling = dict(fingerprint["sampling"])
    column = sampling.pop("column")
    limits = SamplingLimits(max_model_len=spec.max_model_len)
    return RequestBuilder(prompts, SamplingSpec(base=sampling, column=column, limits=limits))


def _requests(
    unit: WorkUnit, rows: Sequence[dict[str, Any]], builder: RequestBuilder, base: dict[str, Any], is_fake: bool
) -> list[RowAudit | _Sampled]:
    """The rows of one unit with what they were asked, or why they cannot be compared."""
    try:
        source = list(read(unit.span))
    except InputError as error:
        return [RowAudit(id=row["id"], skipped=f"its input cannot be read: {error.message}") for row in rows]
    outcomes: list[RowAudit | _Sampled] = []
    for row in rows:
        raw = source[int(row["id"]) - unit.first_id]
        request = RowError(reason=raw.reason, message=raw.error) if raw.error else builder.build(raw.columns)
        if isinstance(request, RowError) or len(request.prompt_token_ids) != row["num_prompt_tokens"]:
            outcomes.append(RowAudit(id=row["id"], skipped="its input gives another prompt now"))
            continue
        sampling = base | {key: value for key, value in request.sampling.items() if key != "seed"}
        if sampling["temperature"] > 0 and not is_fake:
            # With a seed too: verifying drafts draws other random numbers, for the same distribution.
            outcomes.append(RowAudit(id=row["id"], skipped="sampled (temperature above 0): drawn by lot"))
            continue
        committed = Response(
            text=row["response"], finish_reason=row["finish_reason"], num_output_tokens=row["num_output_tokens"]
        )
        outcomes.append(
            _Sampled(id=row["id"], committed=committed, prompt_token_ids=request.prompt_token_ids, sampling=sampling)
        )
    return outcomes


def _regenerate(
    sampled: Sequence[_Sampled], target: AuditedEngine, announce: Callable[[str], None], start: Start
) -> dict[str, RowAudit]:
    announce(f"starting {target.spec.model} without a drafter, {target.precision}")
    if target.is_fake:
        from peagle.engine.fake import FakeEngine

        return asyncio.run(_ask_all(FakeEngine(), sampled, target, announce))

    async def use(engine: Engine, _: float) -> dict[str, RowAudit]:
        return await _ask_all(engine, sampled, target, announce)

    with tempfile.TemporaryDirectory() as folder:
        return with_engine(_alone(target.spec), hardware.detect(), start, Path(folder) / "engine.log", use)


def _alone(spec: EngineSpec) -> EngineSpec:
    """The run's engine without its drafter, on this machine alone."""
    return replace(
        spec,
        drafter=None,
        num_nodes=1,
        # As the run had it with its drafter, so that prompts are prefilled in the same pieces.
        max_num_batched_tokens=spec.max_num_batched_tokens or max_num_batched_tokens(spec, hardware.detect()),
        # What the choice was made from, with penalties and schemas; the raw ones are from before these.
        extra={**spec.extra, "logprobs_mode": "processed_logprobs"},
    )


async def _ask_all(
    engine: Engine, sampled: Sequence[_Sampled], target: AuditedEngine, announce: Callable[[str], None]
) -> dict[str, RowAudit]:
    slots = asyncio.Semaphore(target.spec.max_num_seqs)
    tokenizer: Any = tokenizer_of(None if target.is_fake else target.spec.model, target.spec.revision)
    specials = tuple(getattr(tokenizer, "all_special_tokens", ()))

    async def ask(one: _Sampled) -> RowAudit:
        asked = {**one.sampling, "logprobs": NUM_LIKELIEST}
        async with slots:
            try:
                generation = await engine.generate(f"audit-{one.id}", one.prompt_token_ids, asked)
            except RequestRefused as error:
                return RowAudit(id=one.id, skipped=f"refused without the drafter: {error}")
        ends = (*specials, *(one.sampling.get("stop") or ()))
        again: CompletionOutput = generation.completions[0]
        if len(generation.completions) > 1:  # a row of the fake engine: its count is of all responses
            again = replace(again, num_output_tokens=generation.num_output_tokens)
        return RowAudit(id=one.id, verdict=compare(one.committed, again, ends=ends, max_tie=target.max_tie))

    audits = await asyncio.gather(*map(ask, sampled))
    counts = Counter(audit.verdict.outcome if audit.verdict else "skipped" for audit in audits)
    announce(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    return {audit.id: audit for audit in audits}
