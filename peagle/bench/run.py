"""Run a benchmark, from configuration to report."""

import statistics
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from peagle.bench.config import BenchConfig
from peagle.bench.engine import MeasurementListener, StartEngine, measure_and_report
from peagle.bench.loop import Measurement, TokenizerOf
from peagle.bench.plan import BenchPlan, Pass, Setup, make_plan, num_starts
from peagle.bench.prompts import BenchPrompt, Dataset
from peagle.bench.record import PassRecord
from peagle.bench.report import (
    caveats,
    make_report,
    markdown_tables,
    require_prompts,
    speed_plot,
    step_time_plot,
    value_plot,
)
from peagle.catalog.targets import ResolvedModel
from peagle.economics.report.figures import format_duration
from peagle.engine.vllm import start_engine
from peagle.files import write_atomic, write_json
from peagle.hardware import Hardware
from peagle.requests.tokenizer import load_tokenizer


def time_left_s(done: Sequence[PassRecord], left: Sequence[Pass], *, is_running: bool) -> float | None:
    """Estimate the seconds until the last pass ends; None before the first pass has finished.

    `is_running` says whether the engine of the first pass in `left` is running, so that it need not be started.
    """
    if not done:
        return None
    num_starts_left = num_starts(left) - (1 if is_running and left else 0)
    start_s = statistics.mean(record.start_s for record in done)
    return num_starts_left * start_s + sum(_pass_s(done, planned.concurrency) for planned in left)


def _pass_s(done: Sequence[PassRecord], concurrency: int) -> float:
    """Estimate the seconds of a pass from finished passes, preferably at the same concurrency."""
    at_concurrency = [record.wall_s for record in done if record.concurrency == concurrency]
    return statistics.mean(at_concurrency or [record.wall_s for record in done])


class Bench(Measurement):
    """The passes of a benchmark, in the order of its plan."""

    name = "bench"
    parent = Path("runs/bench")
    pass_noun = "passes"

    @staticmethod
    def make_plan(config: Any, hardware: Hardware, model: ResolvedModel) -> BenchPlan:
        return make_plan(config, hardware, model)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        records = {planned: self.find(planned) for planned in self.plan.passes}
        self.done = {planned: record for planned, record in records.items() if record is not None}
        self._num_resumed = len(self.done)

    def run(self) -> tuple[dict[str, Any], Path]:
        """Measure the remaining passes; return the report and its folder. The report is also written after an error."""
        return measure_and_report(self, self.folder.root, self.listener, pass_noun=self.pass_noun), self.folder.root

    def remaining(self) -> list[Pass]:
        return [
            planned for planned in self.plan.passes if planned not in self.done and planned.setup not in self.failed
        ]

    def next(self, running: Setup | None = None) -> Pass | None:
        """Return the first remaining pass within the time budget."""
        return next(
            (
                planned
                for planned in self.remaining()
                if self._has_time_for(planned, is_running=planned.setup == running)
            ),
            None,
        )

    def _has_time_for(self, planned: Pass, *, is_running: bool) -> bool:
        """Return whether a pass would probably end within the time budget. Each command runs at least one pass."""
        budget_s = self.plan.config.time_budget_s
        if budget_s is None or len(self.done) == self._num_resumed:
            return True
        done = list(self.done.values())
        start_s = 0.0 if is_running else statistics.mean(record.start_s for record in done)
        return self.spent_s + start_s + _pass_s(done, planned.concurrency) <= budget_s

    def prompts(self, planned: Pass) -> Sequence[BenchPrompt]:
        """Return all prompts once, or `requests_per_slot` x concurrency prompts with repetitions."""
        prompts, per_slot = self.dataset.prompts, self.plan.config.requests_per_slot
        return list(islice(cycle(prompts), per_slot * planned.concurrency)) if per_slot else prompts

    @classmethod
    def check_dataset(cls, plan: BenchPlan, dataset: Dataset) -> None:
        require_prompts(plan.config, len(dataset.prompts))

    def caveats(self) -> list[str]:
        return caveats(self.plan, self.dataset, list(self.done.values()))

    def describe_progress(self) -> str:
        left = self.remaining()
        return f"{len(left)} {self.pass_noun} in {num_starts(left)} engine starts; {len(self.done)} already finished"

    def describe_pass(self, planned: Pass, record: PassRecord) -> str:
        left = self.remaining()
        is_running = bool(left) and left[0].setup == planned.setup
        left_s = time_left_s(list(self.done.values()), left, is_running=is_running)
        time_left = f"; about {format_duration(left_s)} left" if left and left_s is not None else ""
        return f"[{len(self.done)}/{len(self.plan.passes)}] {self.figures(planned, record)}{time_left}"

    def figures(self, planned: Pass, record: PassRecord) -> str:
        speed = f"{record.output_tokens_per_s:.1f} output tokens/s"
        return f"{planned.setup.label}, concurrency {planned.concurrency}, repeat {planned.repeat + 1}: {speed}"

    def write_report(self) -> dict[str, Any]:
        done = {planned: self.done[planned] for planned in self.plan.passes if planned in self.done}
        report = self.report(done, {setup.label: reason for setup, reason in self.failed.items()})
        write_json(self.folder.root / "report.json", report)
        for name, text in self.pages(report).items():
            write_atomic(self.folder.root / name, text.encode())
        return report

    def report(self, done: dict[Pass, PassRecord], failed: dict[str, str]) -> dict[str, Any]:
        return make_report(self.plan, self.dataset, done, failed)

    def pages(self, report: dict[str, Any]) -> dict[str, str]:
        pages = {"report.md": markdown_tables(report), "tokens-per-second.svg": speed_plot(report)}
        plots = {"drafting-cost.svg": step_time_plot(report), "tokens-per-dollar.svg": value_plot(report)}
        return pages | {name: plot for name, plot in plots.items() if plot is not None}


def bench(
    config: BenchConfig,
    listener: MeasurementListener,
    *,
    start: StartEngine = start_engine,
    tokenizer_of: TokenizerOf = load_tokenizer,
) -> tuple[dict[str, Any], Path]:
    return Bench.prepare(config, listener, start, tokenizer_of).run()
