"""A benchmark, from its configuration to its report.

    bench.json     what is measured, on what (written once), the fingerprint that every pass shares
    cells/*.json   a finished pass each
    report.json  report.md  tokens-per-second.svg  drafting-cost.svg       of the last command
    logs/          what the engines print

How engines are started and passes measured is `loop`'s; here is in which order, within which time, and what is written.
"""

import statistics
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from peagle.bench.config import BenchConfig
from peagle.bench.engine import MeasurementListener, Start, reported
from peagle.bench.loop import Measurement, TokenizerOf
from peagle.bench.plan import BenchPlan, Pass, make_plan, num_starts
from peagle.bench.prompts import BenchPrompt, Dataset
from peagle.bench.record import PassRecord
from peagle.bench.report import caveats, make_report, require_prompts
from peagle.bench.setups import Setup
from peagle.bench.tables import cost_plot, markdown_tables, speed_plot
from peagle.catalog.targets import ResolvedModel
from peagle.economics.report.figures import format_duration
from peagle.engine.vllm import start_engine
from peagle.files import write_atomic, write_json
from peagle.hardware import Hardware
from peagle.requests.tokenizer import load_tokenizer


def time_left_s(done: Sequence[PassRecord], left: Sequence[Pass], *, is_up: bool) -> float | None:
    """Seconds until the last pass ends; None before the first pass did.

    A pass is taken to last as long as those finished at its concurrency, else as the mean of all.

    Args:
        is_up: the engine of the next pass is up already.
    """
    if not done:
        return None
    starts = num_starts(left) - (1 if is_up and left else 0)
    start_s = statistics.mean(record.start_s for record in done)
    return starts * start_s + sum(_pass_s(done, one.concurrency) for one in left)


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


class Bench(Measurement):
    """The passes of a benchmark, in the order of its plan.

    Attributes:
        parts: what its passes are called.
    """

    name = "bench"
    parent = Path("runs/bench")
    parts = "passes"

    @staticmethod
    def make_plan(config: Any, hardware: Hardware, model: ResolvedModel) -> BenchPlan:
        """Decide everything but the prompts; a preset has a configuration of its own."""
        return make_plan(config, hardware, model)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        found = {one: self.find(one) for one in self.plan.passes}
        self.done = {one: record for one, record in found.items() if record is not None}
        self._num_before = len(self.done)

    def run(self) -> tuple[dict[str, Any], Path]:
        """Measure what is missing; the report and its folder.

        Raises:
            BaseException: whatever ended it; the report of the finished passes is there.
        """
        return reported(self, self.folder.root, self.listener, parts=self.parts), self.folder.root

    def left(self) -> list[Pass]:
        """The passes that this command has still to do, in their order.

        None of an engine that failed.
        """
        return [one for one in self.plan.passes if one not in self.done and one.setup not in self.failed]

    def next(self, up: Setup | None = None) -> Pass | None:
        """The first pass that is left and that the time budget holds."""
        return next((one for one in self.left() if self._has_time_for(one, is_up=one.setup == up)), None)

    def _has_time_for(self, one: Pass, *, is_up: bool) -> bool:
        """Whether a pass is likely to end within the budget.

        Each command runs one at least, so that it gets on.
        """
        budget_s = self.plan.config.time_budget_s
        if budget_s is None or len(self.done) == self._num_before:
            return True
        return self.spent_s + next_s(list(self.done.values()), one, is_up=is_up) <= budget_s

    def prompts(self, one: Pass) -> Sequence[BenchPrompt]:
        """All prompts once, or so many for each request at once, round and round."""
        prompts, per_slot = self.dataset.prompts, self.plan.config.requests_per_slot
        return list(islice(cycle(prompts), per_slot * one.concurrency)) if per_slot else prompts

    @classmethod
    def require(cls, plan: BenchPlan, dataset: Dataset) -> None:
        """Refuse a concurrency that no pass would reach."""
        require_prompts(plan.config, len(dataset.prompts))

    def caveats(self) -> list[str]:
        """The reasons why figures are worth less than they look."""
        return caveats(self.plan, self.dataset, list(self.done.values()))

    def standing(self) -> str:
        """The passes that are left and those that are done."""
        left, parts = self.left(), self.parts
        return f"{len(left)} {parts} in {num_starts(left)} engine starts; {len(self.done)} {parts} are done already"

    def words(self, one: Pass, record: PassRecord) -> str:
        """A finished pass, and about how long the others take."""
        left = self.left()
        is_up = bool(left) and left[0].setup == one.setup
        left_s = time_left_s(list(self.done.values()), left, is_up=is_up)
        rest = f"; about {format_duration(left_s)} left" if left and left_s is not None else ""
        return f"[{len(self.done)}/{len(self.plan.passes)}] {self.figures(one, record)}{rest}"

    def figures(self, one: Pass, record: PassRecord) -> str:
        """The measured figures in a few words."""
        speed = f"{record.output_tokens_per_s:.1f} output tokens/s"
        return f"{one.setup.label}, concurrency {one.concurrency}, repeat {one.repeat + 1}: {speed}"

    def write_report(self) -> dict[str, Any]:
        """The report of everything measured so far, by this command and earlier ones.

        It is written to the folder too.
        """
        done = {one: self.done[one] for one in self.plan.passes if one in self.done}
        report = self.report(done, {setup.label: reason for setup, reason in self.failed.items()})
        write_json(self.folder.root / "report.json", report)
        for name, text in self.pages(report).items():
            write_atomic(self.folder.root / name, text.encode())
        return report

    def report(self, done: dict[Pass, PassRecord], failed: dict[str, str]) -> dict[str, Any]:
        """All that was measured and what it was measured on, as JSON-ready data.

        Args:
            done: finished passes, in the plan's order.
            failed: engines that did not start or died in this command, by label: what was said of each.
        """
        return make_report(self.plan, self.dataset, done, failed)

    def pages(self, report: dict[str, Any]) -> dict[str, str]:
        """The files that are made of a report, by name."""
        pages = {"report.md": markdown_tables(report), "tokens-per-second.svg": speed_plot(report)}
        cost = cost_plot(report)
        return pages if cost is None else pages | {"drafting-cost.svg": cost}


def bench(
    config: BenchConfig,
    listener: MeasurementListener,
    *,
    start: Start = start_engine,
    tokenizer_of: TokenizerOf = load_tokenizer,
) -> tuple[dict[str, Any], Path]:
    """Run the missing passes within the time limit; return the report and folder.

    Args:
        start: starts an engine.
        tokenizer_of: the tokenizer of a folder, or of a hub id and its revision.

    Raises:
        ConfigError: bad usage; no engine was started.
        EngineError: no engine at all could be measured. One that fails beside others is named in the report.
    """
    return Bench.prepare(config, listener, start, tokenizer_of).run()
