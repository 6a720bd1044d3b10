"""Where the time of a decoding step goes, and how far that is from what reading memory alone would take.

    python benchmarks/gpu/step_profile.py --model shapes/target --load-format dummy --methods none,eagle3,peagle -k 7 \
        --drafter peagle=shapes/peagle --drafter eagle3=shapes/eagle3 --concurrency 1,32 \
        --synthetic-acceptance peagle=3.94 --synthetic-acceptance eagle3=3.03 --output runs/steps

It takes the flags of `peagle bench` and starts each of its engines once. At each concurrency so many prompts are
answered at once: one time with the parts of every step timed (`step_timer`), one time with the device's kernels traced.
The floor is `step_floor`'s, over the bytes a second that a copy on the device moves. Lookups read no head.

OUTPUT holds report.json, report.md and drafter-by-k.svg: the drafter's part of a step by K, at the smallest
concurrency. An engine that is done is kept in cells/, and the same command goes on. With --time-budget-s the command
ends early with exit code 3. An engine that fails is left out and named, with exit code 1. vLLM's model runner V1 is
asked for, whose scopes are timed.
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # vLLM's worker imports `step_timer` by that name

from step_floor import median_step, step_bytes

from jobs import flags
from jobs.output import listener, say
from peagle import hardware
from peagle.bench.config import BenchConfig
from peagle.bench.engine import measure_and_report, read_from
from peagle.bench.folder import MeasurementFolder
from peagle.bench.plan import BenchPlan, Setup, make_plan
from peagle.bench.prompts import Dataset, build_dataset, read_dataset
from peagle.bench.report import warning_labels
from peagle.catalog.folders import read_config
from peagle.catalog.int8 import converted_spec
from peagle.catalog.targets import hub_config, resolve_model
from peagle.charts import Axes, line_chart, standalone
from peagle.engine.arguments import engine_args
from peagle.engine.environment import environment
from peagle.engine.spec import DRAFT_METHODS
from peagle.engine.startup import interruptible
from peagle.engine.vllm_internals import root_cause
from peagle.errors import DrafterError, EngineError, PeagleError
from peagle.files import write_atomic, write_json
from peagle.profiles.measurements import METHOD_NAMES
from peagle.provenance import git_revision, versions
from peagle.quiet import QuietStderr
from peagle.requests.tokenizer import load_tokenizer
from peagle.signals import signals_as_interrupts
from peagle.tables import aligned, markdown

_WARM_UP_TOKENS, _TRACED_TOKENS = 8, 48
_PARTS = ("target", "logits", "sampling", "drafter", "host")
_DRAFTER_AXES = Axes(
    name="Time of drafting by K",
    x_name="draft tokens a step (K)",
    y_name="ms a step in the drafter",
    x_prefix="K=",
)


def main() -> int:
    """Profile every engine that is not done yet; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_flags(parser, BenchConfig, {}, short={"num_speculative_tokens": "-k"})
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # before anything is planned: the folder's fingerprint names it
    try:
        return profile(flags.load(BenchConfig, parser.parse_args()))
    except PeagleError as error:
        say(f"error: {error.message}" + (f"\n  {error.hint}" if error.hint else ""))
        return error.exit_code


def profile(config: BenchConfig) -> int:
    """Profile every engine that is not done yet, as far as the time budget reaches; the exit code.

    Raises:
        ConfigError: bad usage; no engine was started.
    """
    rows, model = read_dataset(config), resolve_model(config.model, announce=say)
    plan = make_plan(config, hardware.detect(), model)
    for setup in plan.setups:
        head_config(setup)  # refuses before an engine starts
    assert plan.spec.max_model_len is not None, "make_plan() sets it"
    dataset = build_dataset(config, rows, load_tokenizer(model.path, model.revision), plan.spec.max_model_len)
    root = config.output or Path("runs/steps")
    folder = MeasurementFolder(root, name="steps", fingerprint=plan.fingerprint(dataset) | _concurrency(plan))
    run = _Run(plan, dataset, folder)
    with signals_as_interrupts():
        measure_and_report(run, folder.root, listener(), pass_noun="engines")
    num_left = len(plan.setups) - len(run.done)
    say(f"\nreport: {folder.root / 'report.md'}; {num_left} engines are left")
    return 1 if run.failed else 3 if num_left else 0


class _Run:
    """The engines of one command: those that are done, those that failed, and how the others are profiled."""

    def __init__(self, plan: BenchPlan, dataset: Dataset, folder: MeasurementFolder) -> None:
        self._plan, self._dataset, self._folder = plan, dataset, folder
        found = {setup: folder.find(setup.name, dict) for setup in plan.setups}
        self.done = {setup: engine for setup, engine in found.items() if engine is not None}
        self.failed: dict[str, str] = {}

    def measure(self) -> None:
        """Every engine that there is time for; one that fails is left out."""
        began_s, longest_s, budget_s = time.monotonic(), 0.0, self._plan.config.time_budget_s
        for setup in [setup for setup in self._plan.setups if setup not in self.done]:
            started_s = time.monotonic()
            if budget_s and longest_s and started_s - began_s + longest_s > budget_s:
                return
            say(f"{setup.label}: starting the engine")
            try:
                found = profile_engine(self._plan, setup, self._dataset, self._folder.log(setup.name))
            except EngineError as error:
                say(f"  {setup.label} is left out: {error.message}")
                self.failed[setup.label] = error.message
            else:
                self._folder.save(setup.name, found)
                self.done[setup] = found
                longest_s = max(longest_s, time.monotonic() - started_s)

    def write_report(self) -> dict[str, Any]:
        """What was profiled so far, by this command and earlier ones; it lies in the folder, too."""
        engines = [self.done[setup] for setup in self._plan.setups if setup in self.done]
        return _write(self._folder.root, self._plan, self._dataset, engines, self.failed)


def head_config(setup: Setup) -> dict[str, Any] | None:
    """`config.json` of a set-up's head, for its floor; None without a head.

    Raises:
        DrafterError, CatalogError: it cannot be read, or is of a layout whose bytes are not known.
    """
    if setup.drafter is None or not setup.drafter.has_head:
        return None
    name = setup.drafter.model
    is_local = Path(name).is_dir()
    head = read_config(Path(name), DrafterError) if is_local else hub_config(name, setup.drafter.revision)
    if not {"speculators_model_type", "transformer_layer_config"} <= set(head):
        raise DrafterError(
            f"{name}: its config.json is not in the layout of speculators, from which its floor is reckoned",
            hint=f"name another head with --drafter {setup.method}=HEAD, or leave {setup.method} out of --methods",
        )
    return head


def profile_engine(plan: BenchPlan, setup: Setup, dataset: Dataset, log: Path) -> dict[str, Any]:
    """Start one engine, and profile it at every concurrency.

    Raises:
        EngineError: it did not start, or failed in between; the log has the whole of it.
    """
    os.environ |= environment(setup.spec, plan.hardware)
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    arguments = engine_args(converted_spec(setup.spec), plan.hardware, request_metrics=False)
    with QuietStderr() as quiet:
        quiet.move_to(log)
        began_at = log.stat().st_size
        try:
            return _profiled(arguments, plan, setup, dataset)
        except Exception as error:  # vLLM raises whatever its parts raise
            traceback.print_exc()
            raise EngineError(root_cause(read_from(log, began_at)) or repr(error)) from error


def _profiled(arguments: Mapping[str, Any], plan: BenchPlan, setup: Setup, dataset: Dataset) -> dict[str, Any]:
    from vllm import LLM

    with interruptible():
        llm = LLM(**arguments, worker_extension_cls="step_timer.StepTimer")
    try:
        (bytes_per_s, *_) = llm.collective_rpc("copy_bytes_per_s")
        cells = [profile_cell(llm, plan, setup, dataset, c, bytes_per_s) for c in plan.config.concurrency]
    finally:
        llm.llm_engine.engine_core.shutdown()
    return {"method": setup.method, "k": setup.k, "copy_bytes_per_s": bytes_per_s, "cells": cells}


def profile_cell(
    llm: Any, plan: BenchPlan, setup: Setup, dataset: Dataset, concurrency: int, bytes_per_s: float
) -> dict[str, Any]:
    """One engine at one concurrency: milliseconds of a step's parts, of its kernels, and its floor."""
    max_tokens = plan.config.max_tokens
    _generate(llm, plan, dataset, concurrency, _WARM_UP_TOKENS)
    llm.collective_rpc("begin_step_times")
    outputs = _generate(llm, plan, dataset, concurrency, max_tokens)
    (steps, *_) = llm.collective_rpc("end_step_times")
    llm.collective_rpc("begin_step_trace")
    _generate(llm, plan, dataset, concurrency, min(max_tokens, _TRACED_TOKENS))
    (trace, *_) = llm.collective_rpc("end_step_trace")
    token_ids = [token_id for output in outputs for token_id in output.outputs[0].token_ids]
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    context_tokens = (num_prompt_tokens + len(token_ids) / 2) / concurrency
    read = step_bytes(
        plan.model.config,
        head_config(setup),
        k=setup.k,
        concurrency=concurrency,
        context_tokens=context_tokens,
        weight_bytes=1 if plan.precision.weights in ("fp8", "int8") else 2,
        kv_bytes=1 if plan.precision.kv_cache == "fp8" else 2,
    )
    return {
        "concurrency": concurrency,
        "context_tokens": context_tokens,
        "distinct_tokens": len(set(token_ids)) / len(token_ids),
        "ms": median_step(steps, concurrency),
        "kernels_ms": trace["busy_ms"] / max(trace["num_steps"], 1),
        "kernels": trace["kernels"],
        "read_bytes": {"target": read.target, "drafter": read.drafter},
        "floor_ms": {"target": read.target / bytes_per_s * 1000, "drafter": read.drafter / bytes_per_s * 1000},
    }


def table(cells: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[list[str]]:
    """A row an engine and concurrency: each part's milliseconds, and the floor."""
    rows = [["ms of a step", "K", "conc.", "step", *_PARTS, "kernels", "floor: target", "floor: drafter", "of floor"]]
    for engine, cell in cells:
        parts, floor = cell["ms"] or {}, sum(cell["floor_ms"].values())
        words = [f"{parts[name]:.2f}" if name in parts else "-" for name in ("step", *_PARTS)]
        times = f"{parts['step'] / floor:.1f}x" if parts else "-"
        floors = [f"{cell['floor_ms'][name]:.2f}" for name in ("target", "drafter")]
        names = (METHOD_NAMES[engine["method"]], str(engine["k"] or "-"), str(cell["concurrency"]))
        rows.append([*names, *words, f"{cell['kernels_ms']:.2f}", *floors, times])
    return rows


def drafter_plot(model: str, engines: Sequence[Mapping[str, Any]]) -> str | None:
    """A line a method with a head: the drafter's part of a step by K, at the smallest concurrency.

    None where there is no such method, or none of its steps had all requests in it.
    """
    concurrency = min((cell["concurrency"] for engine in engines for cell in engine["cells"]), default=0)
    found: dict[str, list[tuple[int, float]]] = {}
    for engine in engines:
        for cell in engine["cells"]:
            if engine["method"] in DRAFT_METHODS and cell["concurrency"] == concurrency and cell["ms"]:
                found.setdefault(engine["method"], []).append((engine["k"], cell["ms"]["drafter"]))
    if not found:
        return None
    curves = [(METHOD_NAMES[method], sorted(points)) for method, points in found.items()]
    names = [name for name, _ in curves]
    return standalone(line_chart(curves, _DRAFTER_AXES), f"Drafting alone, concurrency {concurrency}, {model}", names)


def _concurrency(plan: BenchPlan) -> dict[str, Any]:
    """An engine is profiled at all of them while it is up."""
    return {"concurrency": plan.config.concurrency}


def _generate(llm: Any, plan: BenchPlan, dataset: Dataset, concurrency: int, max_tokens: int) -> list[Any]:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": p.token_ids} for p in islice(cycle(dataset.prompts), concurrency)]
    # Of equal length, so that every step but the last ones has all requests in it.
    params = SamplingParams(**plan.config.sampling() | {"max_tokens": max_tokens, "ignore_eos": True})
    return list(llm.generate(prompts, params, use_tqdm=False))


def _write(
    root: Path, plan: BenchPlan, dataset: Dataset, engines: Sequence[Mapping[str, Any]], failed: Mapping[str, str]
) -> dict[str, Any]:
    found = {
        "labels": warning_labels(plan),
        "model": plan.model.name,
        "precision": plan.precision.describe(),
        "hardware": plan.hardware.to_dict() | {"description": plan.hardware.describe()},
        "versions": versions() | {"git_revision": git_revision()},
        "configuration": plan.config.model_dump(mode="json"),
        "engines": engines,
        "failed": dict(failed),
    }
    write_json(root / "report.json", found)
    rows = table([(engine, cell) for engine in engines for cell in engine["cells"]])
    speeds = ", ".join(f"{engine['copy_bytes_per_s'] / 1e9:,.0f}" for engine in engines) or "-"
    about = (
        f"{plan.model.name}; {plan.precision.describe()}; {'not ' if plan.spec.enforce_eager else ''}compiled; "
        f"{dataset.name}, {plan.config.max_tokens} tokens; {plan.hardware.describe()}. A copy moves {speeds} GB/s "
        "(engine by engine). Parts: on the device, medians of the steps with all requests in them; host: the rest of a "
        "step. Kernels: traced in other steps. Floor: bytes that must be read over that speed, and the step over it."
    )
    lines = [f"**{label}.**\n" for label in warning_labels(plan)] + [about, "", *markdown(rows)]
    lines += [f"\nNot complete: {label}, whose engine failed: {message}" for label, message in failed.items()]
    write_atomic(root / "report.md", ("\n".join(lines) + "\n").encode())
    label = f"{warning_labels(plan)[0].split()[0]}, " if warning_labels(plan) else ""
    if (plot := drafter_plot(f"{label}{plan.model.name}", engines)) is not None:
        write_atomic(root / "drafter-by-k.svg", plot.encode())
    say("\n" + "\n".join(aligned(rows)))
    return found


if __name__ == "__main__":
    sys.exit(main())
