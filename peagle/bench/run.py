"""A benchmark, from its configuration to its report.

One engine runs after another; each finished pass is kept at once.

    config -> plan and prompts -> passes left -> (engine, its passes) for each visit -> report

    bench.json     what is measured, on what (written once), the fingerprint that every pass shares
    cells/*.json   a finished pass each
    report.json  report.md  tokens-per-second.svg  drafting-cost.svg       of the last command
    logs/          what the engines print

It knows neither Ray nor HTTP: the engine runs in this process, so that a GPU host needs vLLM and nothing else.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from peagle import hardware
from peagle.bench.closed_loop import run_loop
from peagle.bench.config import BenchConfig
from peagle.bench.engine import Listener, PeakMemory, Start, memory_reader, reported, with_engine
from peagle.bench.folder import MeasurementFolder, default_folder, digest
from peagle.bench.plan import Pass, Plan, Setup, Visit, make_plan, visits
from peagle.bench.prompts import Dataset, Prompt, build_dataset, read_dataset
from peagle.bench.record import PassRecord, make_record
from peagle.bench.report import SCHEMA, caveats, labels, make_report, require_prompts
from peagle.bench.tables import cost_plot, markdown_tables, speed_plot
from peagle.bench.target import announce
from peagle.catalog.targets import resolve_model
from peagle.economics.report.figures import in_words_s
from peagle.engine.interface import Engine
from peagle.engine.vllm import start_engine
from peagle.errors import EngineError
from peagle.files import write_atomic, write_json
from peagle.requests.prompts import Tokenizer
from peagle.requests.tokenizer import load_tokenizer


def time_left_s(done: Sequence[PassRecord], left: Sequence[Pass], *, is_up: bool) -> float | None:
    """Seconds until the last pass ends; None before the first pass did.

    A pass is taken to last as long as those finished at its concurrency, else as the mean of all.

    Args:
        is_up: the engine of the next pass is up already.
    """
    if not done:
        return None
    num_starts = len(visits(left)) - (1 if is_up and left else 0)
    start_s = statistics.mean(record.start_s for record in done)
    return num_starts * start_s + sum(_pass_s(done, one.concurrency) for one in left)


def next_s(done: Sequence[PassRecord], one: Pass, *, is_up: bool) -> float:
    """Estimated seconds of a pass, its engine's start included.

    0 before anything is known.

    Args:
        is_up: its engine is up already.
    """
    if not done:
        return 0.0
    start_s = 0.0 if is_up else statistics.mean(record.start_s for record in done)
    return start_s + _pass_s(done, one.concurrency)


def _pass_s(done: Sequence[PassRecord], concurrency: int) -> float:
    alike = [record.wall_s for record in done if record.concurrency == concurrency]
    return statistics.mean(alike or [record.wall_s for record in done])


DEFAULT_FOLDER = Path("runs/bench")


def bench(
    config: BenchConfig,
    listener: Listener,
    *,
    start: Start = start_engine,
    tokenizer_of: Callable[[str, str | None], Tokenizer] = load_tokenizer,
) -> tuple[dict[str, Any], Path]:
    """Run the missing passes within the time limit; return the report and folder.

    Args:
        start: starts an engine.
        tokenizer_of: the tokenizer of a folder, or of a hub id and its revision.

    Raises:
        ConfigError: bad usage; no engine was started.
        EngineError: no engine at all could be measured. One that fails beside others is named in the report.
    """
    rows = read_dataset(config)
    model = resolve_model(config.model, announce=listener.say)
    plan = make_plan(config, hardware.detect(), model)
    assert plan.spec.max_model_len is not None, "make_plan() sets it"
    dataset = build_dataset(config, rows, tokenizer_of(model.path, model.revision), plan.spec.max_model_len)
    require_prompts(config, len(dataset.prompts))
    fingerprint = plan.fingerprint(dataset)
    root = config.output or default_folder(DEFAULT_FOLDER, fingerprint)
    folder = MeasurementFolder(root, name="bench", schema=SCHEMA, fingerprint=fingerprint)
    run = _Run(plan, dataset, folder, listener, start)
    run.announce()
    return reported(run, folder.root, listener, parts="passes"), folder.root


class _Run:
    """The passes of one command: those that are done, and engines for the others."""

    def __init__(
        self, plan: Plan, dataset: Dataset, folder: MeasurementFolder, listener: Listener, start: Start
    ) -> None:
        self._plan, self._dataset, self._folder = plan, dataset, folder
        self._listener, self._start = listener, start
        self._read_memory = memory_reader(plan.hardware)
        self._began, self._num_run = time.monotonic(), 0
        found = {one: folder.find(pass_name(one), PassRecord.from_dict) for one in plan.passes}
        self.done = {one: record for one, record in found.items() if record is not None}
        self.failed: dict[Setup, EngineError] = {}

    def left(self) -> list[Pass]:
        """The passes that this command has still to do, in their order.

        None of an engine that failed.
        """
        return [one for one in self._plan.passes if one not in self.done and one.setup not in self.failed]

    def announce(self) -> None:
        """Announce the passes to measure and those that exist already."""
        plan, say = self._plan, self._listener.say
        known = [*labels(plan), *plan.notes, *caveats(plan, self._dataset, list(self.done.values()))]
        announce(say, self._dataset, plan.model, plan.precision, plan.hardware, known)
        left = self.left()
        say(f"  {len(left)} passes in {len(visits(left))} engine starts; {len(self.done)} passes are done already")

    def has_time_for(self, one: Pass, *, is_up: bool) -> bool:
        """Whether a pass is likely to end within the budget.

        Each command runs one at least, so that it gets on.
        """
        budget_s = self._plan.config.time_budget_s
        if budget_s is None or not self._num_run:
            return True
        return time.monotonic() - self._began + next_s(list(self.done.values()), one, is_up=is_up) <= budget_s

    def measure(self) -> None:
        """Measure every visit within the time limit.

        This command does not start an engine again that failed.

        Raises:
            EngineError: it failed, and so did all others, and nothing was measured by earlier commands.
        """
        for visit in visits(self.left()):
            if visit.setup in self.failed or not self.has_time_for(visit.passes[0], is_up=False):
                continue
            try:
                self._visit(visit)
            except EngineError as error:
                self._listener.say(f"  {visit.setup.label} is left out: {error.message}")
                self.failed[visit.setup] = error
                if not self.done and not self.left():
                    raise

    def write_report(self) -> dict[str, Any]:
        """The report of all cells so far, by this command and earlier ones.

        It is written to the folder too.
        """
        records = [self.done[one] for one in self._plan.passes if one in self.done]
        failed = {setup.label: error.message for setup, error in self.failed.items()}
        report = make_report(self._plan, self._dataset, records, failed)
        _write(self._folder.root, report)
        return report

    def _visit(self, visit: Visit) -> None:
        """Start the engine and run its passes."""
        self._listener.say(f"{visit.setup.label}: starting the engine")

        async def use(engine: Engine, start_s: float) -> None:
            for one in visit.passes:
                if self.has_time_for(one, is_up=True):
                    await self._measure(engine, one, start_s)

        log = self._folder.log(setup_name(visit.setup))
        with_engine(self._plan.engine_spec(visit.setup), self._plan.hardware, self._start, log, use)

    async def _measure(self, engine: Engine, one: Pass, start_s: float) -> None:
        with PeakMemory(self._read_memory) as peak:
            loop = await run_loop(
                engine,
                self._prompts(one),
                sampling=self._plan.config.sampling(),
                concurrency=one.concurrency,
                progress=self._listener.progress,
                num_warm_up=one.concurrency,
            )
        record = make_record(one, loop, engine, start_s=start_s, peak_memory_gib=peak.gib)
        self._folder.keep(pass_name(one), record.to_dict())
        self.done[one] = record
        self._num_run += 1
        self._tell(one, record)

    def _prompts(self, one: Pass) -> list[Prompt]:
        prompts, per_slot = self._dataset.prompts, self._plan.config.requests_per_slot
        return list(islice(cycle(prompts), per_slot * one.concurrency)) if per_slot else prompts

    def _tell(self, one: Pass, record: PassRecord) -> None:
        left = self.left()
        is_up = bool(left) and left[0].setup == one.setup
        left_s = time_left_s(list(self.done.values()), left, is_up=is_up)
        rest = f"; about {in_words_s(left_s)} left" if left and left_s is not None else ""
        self._listener.say(
            f"[{len(self.done)}/{len(self._plan.passes)}] {one.setup.label}, concurrency {one.concurrency}, "
            f"repeat {one.repeat + 1}: {record.output_tokens_per_s:.1f} output tokens/s{rest}"
        )


def setup_name(setup: Setup) -> str:
    """The name of a setup's files.

    Another head, or another synthetic acceptance, has another name.
    """
    head = f"-{digest(setup.fingerprint)}" if setup.fingerprint else ""
    rates = setup.drafter.synthetic_rates if setup.drafter else None
    lot = f"-lot-{digest(repr(rates))}" if rates else ""
    return f"{setup.method}{head}{lot}-k{setup.k}"


def pass_name(one: Pass) -> str:
    """The name of a pass's file."""
    return f"{setup_name(one.setup)}-c{one.concurrency}-r{one.repeat}"


def _write(root: Path, report: dict[str, Any]) -> None:
    write_json(root / "report.json", report)
    write_atomic(root / "report.md", markdown_tables(report).encode())
    write_atomic(root / "tokens-per-second.svg", speed_plot(report).encode())
    if (cost := cost_plot(report)) is not None:
        write_atomic(root / "drafting-cost.svg", cost.encode())
