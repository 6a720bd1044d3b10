"""An evaluation, from its configuration to its report: one engine after another, a finished cell kept at once.

    config -> plan and prompts -> (engine, all prompts) for each cell -> report

It knows neither Ray nor HTTP: the engine runs in this process, so that a GPU host needs vLLM and nothing else.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from peagle import hardware
from peagle.catalog.targets import resolve_model
from peagle.catalog.tokenizer import load_tokenizer
from peagle.drafter.evaluation.cell import Cell, CellResult
from peagle.drafter.evaluation.config import EvaluateConfig
from peagle.drafter.evaluation.measure import measure
from peagle.drafter.evaluation.plan import Plan, make_plan
from peagle.drafter.evaluation.plots import length_plot, position_plot
from peagle.drafter.evaluation.report import make_report, markdown_report
from peagle.drafter.evaluation.store import EvaluationFolder, default_output
from peagle.engine.generation import Engine
from peagle.engine.start import start_engine
from peagle.files import write_atomic, write_json
from peagle.measurement.dataset import Dataset, build_dataset, read_dataset
from peagle.measurement.engine_up import Listener, Start, with_engine
from peagle.measurement.target import announce
from peagle.prompting import Tokenizer


def evaluate(
    config: EvaluateConfig,
    listener: Listener,
    *,
    start: Start = start_engine,
    tokenizer_of: Callable[[str, str | None], Tokenizer] = load_tokenizer,
) -> tuple[dict[str, Any], Path]:
    """Measure every cell that is not measured yet; the report, and the folder that holds it.

    Args:
        start: starts an engine.
        tokenizer_of: the tokenizer of a folder, or of a hub id and its revision.

    Raises:
        ConfigError: bad usage; no engine was started.
        EngineError: an engine did not start or died; finished cells stay, and the same command goes on.
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
    results = [_measured(plan, cell, dataset, folder, start, listener) for cell in plan.cells]
    report = make_report(plan, dataset, results)
    _write(folder.root, report)
    return report, folder.root


def _measured(
    plan: Plan,
    cell: Cell,
    dataset: Dataset,
    folder: EvaluationFolder,
    start: Start,
    listener: Listener,
) -> CellResult:
    """What the folder has of the cell, else a measurement."""
    head = f"[{plan.cells.index(cell) + 1}/{len(plan.cells)}] {cell.label} K={cell.k}"
    found = folder.find(cell)
    if found is not None:
        listener.say(f"{head}: measured {found.measured_at}")
        return found
    listener.say(f"{head}: starting the engine")

    async def use(engine: Engine, start_s: float) -> CellResult:
        return await measure(
            cell,
            engine,
            dataset.prompts,
            sampling=plan.config.sampling(),
            concurrency=plan.config.concurrency,
            start_s=start_s,
            progress=listener.progress,
        )

    result = with_engine(plan.engine_spec(cell), plan.hardware, start, folder.log(cell), use)
    folder.keep(cell, result)
    listener.say(
        f"{head}: acceptance length {result.acceptance_length:.2f}, {result.output_tokens_per_s:.1f} output tokens/s"
    )
    return result


def _write(root: Path, report: dict[str, Any]) -> None:
    write_json(root / "report.json", report)
    write_atomic(root / "report.md", markdown_report(report).encode())
    write_atomic(root / "acceptance-length.svg", length_plot(report).encode())
    write_atomic(root / "acceptance-by-position.svg", position_plot(report).encode())
