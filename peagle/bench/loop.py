"""The loop of every measuring command: start engines one after another and run their passes."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from peagle.bench.config import MeasurementOptions
from peagle.bench.engine import MeasurementListener, PeakMemory, StartEngine, memory_reader, run_pass, with_engine
from peagle.bench.folder import MeasurementFolder, default_folder
from peagle.bench.plan import BenchPlan, Pass, Setup
from peagle.bench.prompts import BenchPrompt, Dataset, build_dataset, read_dataset
from peagle.bench.record import PassRecord, make_record
from peagle.bench.report import warning_labels
from peagle.bench.spending import EngineSpending
from peagle.catalog.targets import ResolvedModel, fetched_model, resolve_model
from peagle.engine.interface import Engine
from peagle.engine.spec import spec_precision
from peagle.errors import EngineError
from peagle.hardware import Hardware, detect_machine
from peagle.requests.prompts import Tokenizer

TokenizerOf = Callable[[str, str | None], Tokenizer]


class Measurement(ABC):
    """The passes of a measuring command. Each command decides which pass is next.

    Finished passes are saved immediately. A failed engine is skipped for the rest of the command.
    """

    name: ClassVar[str]
    parent: ClassVar[Path]

    def __init__(
        self,
        config: Any,
        plan: BenchPlan,
        dataset: Dataset,
        folder: MeasurementFolder,
        listener: MeasurementListener,
        start: StartEngine,
    ) -> None:
        self.config, self.plan, self.dataset, self.folder = config, plan, dataset, folder
        self.listener, self.say, self._start = listener, listener.say, start
        self._read_memory = memory_reader(plan.hardware)
        self.done: dict[Pass, PassRecord] = {}
        self.failed: dict[Setup, str] = {}
        self.spent_s = 0.0

    # --- defined by each command

    @staticmethod
    @abstractmethod
    def make_plan(config: Any, hardware: Hardware, model: ResolvedModel) -> BenchPlan:
        """Plan everything except the prompts."""

    @abstractmethod
    def next(self, running: Setup | None = None) -> Pass | None:
        """Return the next pass, or None at the end. `running` is the engine that is running now."""

    @abstractmethod
    def prompts(self, planned: Pass) -> Sequence[BenchPrompt]: ...

    @abstractmethod
    def describe_pass(self, planned: Pass, record: PassRecord) -> str:
        """Describe a finished pass."""

    @abstractmethod
    def describe_progress(self) -> str:
        """Describe how many passes are finished and how many remain."""

    def num_warm_up(self, planned: Pass) -> int:
        """Return the number of prompts to send before a pass, without measuring them."""
        return planned.concurrency

    @classmethod  # noqa: B027 - most commands accept any number of prompts
    def check_dataset(cls, plan: BenchPlan, dataset: Dataset) -> None:
        """Raise ConfigError if the prompts do not suffice for the plan."""

    def add_pass(self, planned: Pass, record: PassRecord) -> None:
        """Add a finished pass, or reject it with an EngineError."""
        self.done[planned] = record

    def fail(self, setup: Setup, reason: str) -> None:
        """Skip an engine until the command ends."""
        self.failed[setup] = reason

    def set_spent(self, spent_s: float) -> None:
        self.spent_s = spent_s

    def caveats(self) -> list[str]:
        return []

    # --- shared by all commands

    @classmethod
    def prepare(
        cls, config: MeasurementOptions, listener: MeasurementListener, start: StartEngine, tokenizer_of: TokenizerOf
    ) -> Self:
        """Plan everything, open the folder, and print the plan, without starting an engine."""
        rows = read_dataset(config)
        model = fetched_model(resolve_model(config.model, announce=listener.say), listener.say)
        plan = cls.make_plan(config, detect_machine(), model)
        assert plan.spec.max_model_len is not None, "target_spec() sets it"
        tokenizer = tokenizer_of(model.path, model.revision)
        column = plan.category_column
        dataset = build_dataset(config, rows, tokenizer, plan.spec.max_model_len, category_column=column)
        cls.check_dataset(plan, dataset)
        fingerprint = plan.fingerprint(dataset)
        root = config.output or default_folder(cls.parent, fingerprint)
        folder = MeasurementFolder(root, name=cls.name, fingerprint=fingerprint)
        run = cls(config, plan, dataset, folder, listener, start)
        run.announce()
        return run

    def announce(self) -> None:
        plan, dataset = self.plan, self.dataset
        precisions = dict.fromkeys(spec_precision(setup.spec, plan.hardware).describe() for setup in plan.setups)
        engine = f"{plan.model.name} on {plan.hardware.describe()}, {', '.join(precisions)}"
        self.say(f"{len(dataset.prompts)} prompts of {dataset.name}; {engine}")
        for note in [*warning_labels(plan), *plan.notes, *self.caveats()]:
            self.say(f"  {note}")
        for reason, count in dataset.rejected.items():
            self.say(f"  rows without a prompt: {count} ({reason})")
        self.say(f"  {self.describe_progress()}")

    def measure(self) -> None:
        planned = self.next()
        while planned is not None:
            try:
                self._run_engine(planned)
            except EngineError as error:
                self.say(f"  skipping {planned.setup.label}: {error.message}")
                self.fail(planned.setup, error.message)
                if not self.done and len(self.failed) == len(self.plan.setups):
                    raise
            planned = self.next()

    def _run_engine(self, first: Pass) -> None:
        """Start an engine and run passes until the next pass needs another engine."""
        setup = first.setup
        self.say(f"{setup.label}: starting the engine")
        earlier_s, started_at = self.spent_s, time.monotonic()
        spending = EngineSpending(self.folder.root / "ledger", self.plan, setup)

        def update_spent() -> None:
            self.set_spent(earlier_s + time.monotonic() - started_at)

        async def run_passes(engine: Engine, start_s: float) -> None:
            spending.mark_ready(start_s)
            planned: Pass | None = first
            while planned is not None and planned.setup == setup:
                record = await self._measure(engine, planned, start_s, spending)
                update_spent()
                self.say(self.describe_pass(planned, record))
                planned = self.next(setup)

        try:
            with_engine(setup.spec, self.plan.hardware, self._start, self.folder.log(setup.name), run_passes)
        finally:
            update_spent()
            spending.end()

    async def _measure(self, engine: Engine, planned: Pass, start_s: float, spending: EngineSpending) -> PassRecord:
        prompts = self.prompts(planned)
        with PeakMemory(self._read_memory) as peak:
            result = await run_pass(
                engine,
                prompts,
                sampling=self.plan.config.sampling(),
                concurrency=planned.concurrency,
                progress=self.listener.progress,
                num_warm_up=self.num_warm_up(planned),
            )
        spending.add(result)
        record = make_record(planned, prompts, result, engine, start_s=start_s, peak_memory_gib=peak.gib)
        self.add_pass(planned, record)
        self.folder.save(_pass_name(planned), record.to_dict())
        return record

    def find(self, planned: Pass) -> PassRecord | None:
        return self.folder.find(_pass_name(planned), PassRecord.from_dict)


def _pass_name(planned: Pass) -> str:
    return f"{planned.setup.name}-c{planned.concurrency}-r{planned.repeat}"
