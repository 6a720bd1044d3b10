"""An evaluation of drafters, from its configuration to its report.

One engine runs after another; each finished cell is kept at once.

    config -> plan and prompts -> (engine, all prompts) for each cell -> report

It knows neither Ray nor HTTP: the engine runs in this process, so that a GPU host needs vLLM and nothing else.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle import hardware
from peagle.bench.acceptance_cells import (
    Cell,
    CellResult,
    EvaluationFolder,
    by_category,
    default_output,
    merged_speculation,
)
from peagle.bench.acceptance_config import EvaluateConfig
from peagle.bench.acceptance_plan import Plan, make_plan
from peagle.bench.acceptance_report import length_plot, make_report, markdown_report, position_plot
from peagle.bench.closed_loop import run_loop
from peagle.bench.engine import Listener, Start, reported, with_engine
from peagle.bench.prompts import Dataset, Prompt, build_dataset, read_dataset
from peagle.bench.target import announce
from peagle.catalog.targets import resolve_model
from peagle.engine.interface import Engine
from peagle.engine.vllm import start_engine
from peagle.errors import EngineError
from peagle.files import write_atomic, write_json
from peagle.requests.prompts import Tokenizer
from peagle.requests.tokenizer import load_tokenizer


async def measure(
    cell: Cell,
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    sampling: Mapping[str, Any],
    concurrency: int,
    start_s: float,
    progress: Callable[[int, int], None],
) -> CellResult:
    """Run all prompts through a fresh engine.

    Args:
        start_s: what the engine took to start.
        progress: told how many responses are there, of how many.

    Raises:
        EngineError: the engine died, or drafted nothing.
    """
    loop = await run_loop(engine, prompts, sampling=sampling, concurrency=concurrency, progress=progress)
    responses = loop.responses
    return CellResult(
        drafter=cell.label,
        method=cell.spec.method,
        fingerprint=cell.fingerprint,
        k=cell.k,
        start_s=start_s,
        wall_s=loop.wall_s,
        num_responses=len(responses),
        num_refused=len(loop.answers) - len(responses),
        num_output_tokens=sum(generation.num_output_tokens for generation in responses),
        speculation=merged_speculation(responses, loop.drafted),
        by_category=by_category(loop.generations, [prompt.category for prompt in prompts]),
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        self_check=None if engine.self_check is None else engine.self_check.to_dict(),
    )


def evaluate(
    config: EvaluateConfig,
    listener: Listener,
    *,
    start: Start = start_engine,
    tokenizer_of: Callable[[str, str | None], Tokenizer] = load_tokenizer,
) -> tuple[dict[str, Any], Path]:
    """Measure every missing cell; return the report and its folder.

    Args:
        start: starts an engine.
        tokenizer_of: the tokenizer of a folder, or of a hub id and its revision.

    Raises:
        ConfigError: bad usage; no engine was started.
        EngineError: no cell at all could be measured. One that fails beside others is named in the report.
    """
    rows = read_dataset(config)
    here = hardware.detect()
    model = resolve_model(config.model, announce=listener.say)
    plan = make_plan(config, here, model)
    assert plan.spec.max_model_len is not None, "make_plan() sets it"
    dataset = build_dataset(
        config,
        rows,
        tokenizer_of(model.path, model.revision),
        plan.spec.max_model_len,
        category_column=config.category_column,
    )
    fingerprint = plan.fingerprint(dataset)
    folder = EvaluationFolder(config.output or default_output(fingerprint), fingerprint)
    announce(listener.say, dataset, model, plan.precision, here, plan.notes)
    run = _Run(plan, dataset, folder, listener, start)
    return reported(run, folder.root, listener, parts="cells"), folder.root


class _Run:
    """The cells of one command: those that are done, and engines for the others."""

    def __init__(
        self, plan: Plan, dataset: Dataset, folder: EvaluationFolder, listener: Listener, start: Start
    ) -> None:
        self._plan, self._dataset, self._folder = plan, dataset, folder
        self._listener, self._start = listener, start
        found = {cell: folder.find(cell) for cell in plan.cells}
        self.done = {cell: result for cell, result in found.items() if result is not None}
        self._failed: dict[str, str] = {}

    def measure(self) -> None:
        """Every cell that is not done; one whose engine fails is left out.

        Raises:
            EngineError: it failed, and so did all others, and nothing was measured by earlier commands.
        """
        for number, cell in enumerate(self._plan.cells, start=1):
            name = f"{cell.label} K={cell.k}"
            head = f"[{number}/{len(self._plan.cells)}] {name}"
            if cell in self.done:
                self._listener.say(f"{head}: measured {self.done[cell].measured_at}")
                continue
            self._listener.say(f"{head}: starting the engine")
            try:
                self._listener.say(f"{head}: {self._measure(cell)}")
            except EngineError as error:
                self._listener.say(f"  {name} is left out: {error.message}")
                self._failed[name] = error.message
                if len(self._failed) == len(self._plan.cells):
                    raise

    def write_report(self) -> dict[str, Any]:
        """The report of all cells so far, by this command and earlier ones.

        It is written to the folder too.
        """
        results = [self.done[cell] for cell in self._plan.cells if cell in self.done]
        report = make_report(self._plan, self._dataset, results, self._failed)
        _write(self._folder.root, report)
        return report

    def _measure(self, cell: Cell) -> str:
        """Measure a cell and keep it; what came of it, for people."""
        plan = self._plan

        async def use(engine: Engine, start_s: float) -> CellResult:
            return await measure(
                cell,
                engine,
                self._dataset.prompts,
                sampling=plan.config.sampling(),
                concurrency=plan.config.concurrency,
                start_s=start_s,
                progress=self._listener.progress,
            )

        result = with_engine(plan.engine_spec(cell), plan.hardware, self._start, self._folder.log(cell), use)
        self._folder.keep(cell, result)
        self.done[cell] = result
        return f"acceptance length {result.acceptance_length:.2f}, {result.output_tokens_per_s:.1f} output tokens/s"


def _write(root: Path, report: dict[str, Any]) -> None:
    write_json(root / "report.json", report)
    write_atomic(root / "report.md", markdown_report(report).encode())
    write_atomic(root / "acceptance-length.svg", length_plot(report).encode())
    write_atomic(root / "acceptance-by-position.svg", position_plot(report).encode())
