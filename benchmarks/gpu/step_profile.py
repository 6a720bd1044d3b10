"""Measure the parts of a decoding step, and compare them with the time that reading memory would take.

    python benchmarks/gpu/step_profile.py --model shapes/target --load-format dummy --methods none,eagle3,peagle -k 7 \
        --drafter peagle=shapes/peagle --drafter eagle3=shapes/eagle3 --concurrency 1,32 \
        --synthetic-acceptance peagle=3.94 --synthetic-acceptance eagle3=3.03 --output runs/steps

It takes the options of `peagle bench` and starts each of its engines once. At each concurrency, that many prompts are
answered twice: once with the parts of every step timed (`step_timer`), once with the device's kernels traced. The floor
is the bytes of `step_floor`, divided by the bandwidth of a copy on the device. N-gram and suffix drafting have no head
to read.

OUTPUT has report.json, report.md and drafter-by-k.svg: the drafter's part of a step by K, at the smallest concurrency.
Finished engines are stored in cells/; running the same command again continues. When --time-budget-s is spent, the
command ends with exit code 3. Engines that fail are listed in the report, with exit code 1. The script selects vLLM's
model runner V1, because `step_timer` times its scopes.
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
    x_name="draft tokens per step (K)",
    y_name="ms per step in the drafter",
    x_prefix="K=",
)


def main() -> int:
    """Parse the command line, profile, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_flags(parser, BenchConfig, {}, short={"num_speculative_tokens": "-k"})
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # before planning: it is part of the folder's fingerprint
    try:
        return profile(flags.load(BenchConfig, parser.parse_args()))
    except PeagleError as error:
        say(f"error: {error.message}" + (f"\n  {error.hint}" if error.hint else ""))
        return error.exit_code


def profile(config: BenchConfig) -> int:
    """Profile all unfinished engines until the time budget is spent. Return the exit code.

    Raises:
        ConfigError: an option is invalid; no engine was started.
    """
    rows, model = read_dataset(config), resolve_model(config.model, announce=say)
    plan = make_plan(config, hardware.detect(), model)
    for setup in plan.setups:
        head_config(setup)  # raises for unsuitable heads before any engine starts
    assert plan.spec.max_model_len is not None, "make_plan() sets it"
    dataset = build_dataset(config, rows, load_tokenizer(model.path, model.revision), plan.spec.max_model_len)
    root = config.output or Path("runs/steps")
    # An engine is profiled at all concurrencies before it stops, so they are part of the fingerprint.
    fingerprint = plan.fingerprint(dataset) | {"concurrency": plan.config.concurrency}
    folder = MeasurementFolder(root, name="steps", fingerprint=fingerprint)
    run = _Run(plan, dataset, folder)
    with signals_as_interrupts():
        measure_and_report(run, folder.root, listener(), pass_noun="engines")
    num_unfinished = len(plan.setups) - len(run.done)
    say(f"\nreport: {folder.root / 'report.md'}; unfinished engines: {num_unfinished}")
    return 1 if run.failed else 3 if num_unfinished else 0


class _Run:
    """Profiles the engines of a plan and keeps track of the finished and failed ones."""

    def __init__(self, plan: BenchPlan, dataset: Dataset, folder: MeasurementFolder) -> None:
        self._plan, self._dataset, self._folder = plan, dataset, folder
        stored = {setup: folder.find(setup.name, dict) for setup in plan.setups}
        self.done = {setup: engine for setup, engine in stored.items() if engine is not None}
        self.failed: dict[str, str] = {}

    def measure(self) -> None:
        """Profile engines until the time budget is too short for the next one. Skip engines that fail."""
        run_start_s, longest_s, budget_s = time.monotonic(), 0.0, self._plan.config.time_budget_s
        for setup in [setup for setup in self._plan.setups if setup not in self.done]:
            start_s = time.monotonic()
            if budget_s and longest_s and start_s - run_start_s + longest_s > budget_s:
                return
            say(f"{setup.label}: starting the engine")
            try:
                profiled = profile_engine(self._plan, setup, self._dataset, self._folder.log(setup.name))
            except EngineError as error:
                say(f"  {setup.label} failed and is skipped: {error.message}")
                self.failed[setup.label] = error.message
            else:
                self._folder.save(setup.name, profiled)
                self.done[setup] = profiled
                longest_s = max(longest_s, time.monotonic() - start_s)

    def write_report(self) -> dict[str, Any]:
        """Write the report of all finished engines, including those of earlier commands, and return it."""
        engines = [self.done[setup] for setup in self._plan.setups if setup in self.done]
        return _write(self._folder.root, self._plan, self._dataset, engines, self.failed)


def head_config(setup: Setup) -> dict[str, Any] | None:
    """Return the `config.json` of a setup's head; None without a head.

    Raises:
        DrafterError, CatalogError: it cannot be read, or is not in the format of speculators.
    """
    if setup.drafter is None or not setup.drafter.has_head:
        return None
    name = setup.drafter.model
    is_local = Path(name).is_dir()
    head = read_config(Path(name), DrafterError) if is_local else hub_config(name, setup.drafter.revision)
    if not {"speculators_model_type", "transformer_layer_config"} <= set(head):
        raise DrafterError(
            f"{name}: the floor can only be computed from a config.json in the format of speculators",
            hint=f"name another head with --drafter {setup.method}=HEAD, or leave {setup.method} out of --methods",
        )
    return head


def profile_engine(plan: BenchPlan, setup: Setup, dataset: Dataset, log: Path) -> dict[str, Any]:
    """Start an engine and profile it at every concurrency.

    Raises:
        EngineError: it did not start, or it failed later; the log has the details.
    """
    os.environ |= environment(setup.spec, plan.hardware)
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    arguments = engine_args(converted_spec(setup.spec), plan.hardware, request_metrics=False)
    with QuietStderr() as quiet:
        quiet.move_to(log)
        log_offset = log.stat().st_size
        try:
            return _profile(arguments, plan, setup, dataset)
        except Exception as error:  # vLLM can raise any type
            traceback.print_exc()
            raise EngineError(root_cause(read_from(log, log_offset)) or repr(error)) from error


def _profile(arguments: Mapping[str, Any], plan: BenchPlan, setup: Setup, dataset: Dataset) -> dict[str, Any]:
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
    """Measure an engine at one concurrency: milliseconds of a step's parts and kernels, and the floor."""
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
    read_bytes = step_bytes(
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
        "read_bytes": {"target": read_bytes.target, "drafter": read_bytes.drafter},
        "floor_ms": {
            "target": read_bytes.target / bytes_per_s * 1000,
            "drafter": read_bytes.drafter / bytes_per_s * 1000,
        },
    }


def table(cells: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[list[str]]:
    """Return one row per engine and concurrency: the milliseconds of each part, and the floor."""
    rows = [["ms of a step", "K", "conc.", "step", *_PARTS, "kernels", "floor: target", "floor: drafter", "of floor"]]
    for engine, cell in cells:
        parts, floor = cell["ms"] or {}, sum(cell["floor_ms"].values())
        times = [f"{parts[name]:.2f}" if name in parts else "-" for name in ("step", *_PARTS)]
        multiple_of_floor = f"{parts['step'] / floor:.1f}x" if parts else "-"
        floors = [f"{cell['floor_ms'][name]:.2f}" for name in ("target", "drafter")]
        names = (METHOD_NAMES[engine["method"]], str(engine["k"] or "-"), str(cell["concurrency"]))
        rows.append([*names, *times, f"{cell['kernels_ms']:.2f}", *floors, multiple_of_floor])
    return rows


def drafter_plot(model: str, engines: Sequence[Mapping[str, Any]]) -> str | None:
    """Plot the drafter's part of a step by K, with one line per method with a head, at the smallest concurrency.

    Returns:
        None without such a method, or if no step had all requests in it.
    """
    concurrency = min((cell["concurrency"] for engine in engines for cell in engine["cells"]), default=0)
    points_by_method: dict[str, list[tuple[int, float]]] = {}
    for engine in engines:
        for cell in engine["cells"]:
            if engine["method"] in DRAFT_METHODS and cell["concurrency"] == concurrency and cell["ms"]:
                points_by_method.setdefault(engine["method"], []).append((engine["k"], cell["ms"]["drafter"]))
    if not points_by_method:
        return None
    curves = [(METHOD_NAMES[method], sorted(points)) for method, points in points_by_method.items()]
    names = [name for name, _ in curves]
    return standalone(line_chart(curves, _DRAFTER_AXES), f"Time of drafting, concurrency {concurrency}, {model}", names)


def _generate(llm: Any, plan: BenchPlan, dataset: Dataset, concurrency: int, max_tokens: int) -> list[Any]:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": p.token_ids} for p in islice(cycle(dataset.prompts), concurrency)]
    # All answers have the same length, so almost every step has all requests in it.
    params = SamplingParams(**plan.config.sampling() | {"max_tokens": max_tokens, "ignore_eos": True})
    return list(llm.generate(prompts, params, use_tqdm=False))


def _write(
    root: Path, plan: BenchPlan, dataset: Dataset, engines: Sequence[Mapping[str, Any]], failed: Mapping[str, str]
) -> dict[str, Any]:
    report = {
        "labels": warning_labels(plan),
        "model": plan.model.name,
        "precision": plan.precision.describe(),
        "hardware": plan.hardware.to_dict() | {"description": plan.hardware.describe()},
        "versions": versions() | {"git_revision": git_revision()},
        "configuration": plan.config.model_dump(mode="json"),
        "engines": engines,
        "failed": dict(failed),
    }
    write_json(root / "report.json", report)
    rows = table([(engine, cell) for engine in engines for cell in engine["cells"]])
    speeds = ", ".join(f"{engine['copy_bytes_per_s'] / 1e9:,.0f}" for engine in engines) or "-"
    about = (
        f"{plan.model.name}; {plan.precision.describe()}; {'not ' if plan.spec.enforce_eager else ''}compiled; "
        f"{dataset.name}, {plan.config.max_tokens} tokens; {plan.hardware.describe()}. A copy on the device moves "
        f"{speeds} GB/s (one value per engine). Parts: times on the device, medians of the steps with all requests in "
        "them. Host: the remaining time of a step. Kernels: traced in other steps. Floor: bytes that a step must read, "
        "divided by the speed of the copy. The last column is the step divided by the floor."
    )
    lines = [f"**{label}.**\n" for label in warning_labels(plan)] + [about, "", *markdown(rows)]
    lines += [f"\nNot complete: {label}, whose engine failed: {message}" for label, message in failed.items()]
    write_atomic(root / "report.md", ("\n".join(lines) + "\n").encode())
    label = f"{warning_labels(plan)[0].split()[0]}, " if warning_labels(plan) else ""
    if (plot := drafter_plot(f"{label}{plan.model.name}", engines)) is not None:
        write_atomic(root / "drafter-by-k.svg", plot.encode())
    say("\n" + "\n".join(aligned(rows)))
    return report


if __name__ == "__main__":
    sys.exit(main())
