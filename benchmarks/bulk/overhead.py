"""The overhead of peagle's bulk pipeline: steady output tokens/s of four systems that drive the same engine.

    python -m benchmarks.bulk.overhead --folder /tmp/overhead --output benchmarks/bulk/RESULT.json

`peagle generate`, vLLM's AsyncLLM (at several concurrencies, of which the fastest counts), `ray.data.llm` and
`vllm run-batch` answer the same HumanEval prompts greedily, with the same engine arguments and environment. They run
one after the other, `--repeats` times. A vLLM plug-in (`token_clock/`) records the time of each token at the same place
in all four.

"steady" excludes the first and the last 10 % of the output tokens, and thus the start and the tail of each system.
"whole" is from the first token to the last. Neither includes loading. "worker cores" is the mean number of CPU cores
that vLLM's worker process, which runs the model, used in that time.
"""

import argparse
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks import same_engine
from peagle import hardware
from peagle.engine.arguments import engine_args
from peagle.engine.environment import environment
from peagle.engine.self_check import NUM_TOKENS
from pipelines.cluster.node import openmp_variables

HERE = Path(__file__).parent
_EDGE = 0.1  # share of the tokens to exclude at each end


def main() -> None:
    """Run missing measurements, write all measurements to a file, and print the table."""
    options = _options()
    options.folder.mkdir(parents=True, exist_ok=True)
    job = _job(options)
    systems = [*(f"async-llm@{n or 'all'}" for n in options.concurrency), "ray-data-llm", "run-batch", "peagle"]
    measured: dict[str, list[dict[str, float]]] = {system: [] for system in systems}
    for repeat in range(options.repeats):
        for system in systems[repeat % len(systems) :] + systems[: repeat % len(systems)]:
            measured[system].append(_measure(options, system, repeat, job))
            print(f"repeat {repeat} {system}: {measured[system][-1]}", flush=True)  # noqa: T201
    options.output.write_text(json.dumps(_record(options, job, measured), indent=2) + "\n", encoding="utf-8")
    print(_table(measured))  # noqa: T201


def _options() -> argparse.Namespace:
    parser = same_engine.parser(__doc__)
    parser.add_argument("--rows", type=int, default=164)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 32, 0], help="of async-llm; 0: all rows")
    return same_engine.parse(parser)


def _job(options: argparse.Namespace) -> dict[str, Any]:
    """Return the prompts, engine arguments, sampling and environment that all systems share."""
    detected = hardware.detect()
    engine = same_engine.resolve(options, options.max_num_seqs)
    arguments = engine_args(engine.spec, detected) | {"model": engine.model.path}
    rows = same_engine.prompts(options.rows, engine.model.path)
    flags = same_engine.peagle_flags(options, options.max_num_seqs)
    flags += ["--ignore-eos", "--max-tokens", str(options.max_tokens), "--temperature", "0"]
    sampling = {"temperature": 0, "max_tokens": options.max_tokens, "ignore_eos": True}
    variables = environment(engine.spec, detected, inherited=os.environ) | openmp_variables(engine.spec)
    return {"engine": arguments, "environment": variables, "rows": rows, "sampling": sampling, "peagle": flags}


def _measure(options: argparse.Namespace, system: str, repeat: int, job: dict[str, Any]) -> dict[str, float]:
    folder = options.folder / f"{system}-{repeat}"
    clock, timings_file = same_engine.clock_file(folder), folder / "done.json"
    expected = len(job["rows"]) * job["sampling"]["max_tokens"]
    if not timings_file.exists():
        name, _, concurrency = system.partition("@")
        system_job = {"folder": str(folder), "concurrency": int(concurrency) if concurrency.isdigit() else 0}
        started = time.monotonic()
        with same_engine.system(HERE / "overhead_systems.py", name, job | system_job, folder) as process:
            # The file exists once vLLM has loaded the plug-in, and has a line once the engine generates.
            while process.poll() is None and not (clock.exists() and clock.stat().st_size):
                time.sleep(0.5)
            if process.poll() is None:
                same_engine.leave_cores(process.pid, options.engine_cores)
            cores = _worker_cores(process, clock, (1 - _EDGE) * expected)
        timings = {"worker_cores": cores, "command_s": round(time.monotonic() - started, 1)}
        timings_file.write_text(json.dumps(timings), encoding="utf-8")
    return _rates(clock, expected) | json.loads(timings_file.read_text(encoding="utf-8"))


def _worker_cores(process: "subprocess.Popen[bytes]", clock: Path, num_tokens: float) -> float:
    """Return the mean number of cores that the engine's worker uses until it has generated `num_tokens` tokens."""

    def worker_seconds() -> float:
        return sum(s for name, s in same_engine.cpu_times(process.pid).values() if name == "VLLM::Worker")

    before, started, cores = worker_seconds(), time.monotonic(), 0.0
    while process.poll() is None and sum(tokens for _, tokens in same_engine.read_clock(clock)) < num_tokens:
        time.sleep(2)
        if (now := worker_seconds()) > before:  # False once the worker process has ended
            cores = (now - before) / (time.monotonic() - started)
    return round(cores, 3)


def _rates(clock: Path, num_expected: int) -> dict[str, float]:
    """Return the steady rate and the whole rate in tokens/s, from the token clock's file.

    Raises:
        SystemExit: the number of tokens is not the job's, so the systems did not do the same work.
    """
    steps = same_engine.read_clock(clock)
    total = sum(tokens for _, tokens in steps)
    while steps and num_expected < total <= num_expected + NUM_TOKENS:  # the first steps are the engine's self-check
        total -= steps.pop(0)[1]
    if total != num_expected:
        raise SystemExit(f"{clock}: {total:.0f} tokens, but the job has {num_expected}; see log.txt in the same folder")
    edges = [_EDGE * total, (1 - _EDGE) * total]
    crossings = [(0.0, 0.0)] * 2  # for each edge: the time, and the number of tokens until then
    num_generated = 0.0
    for at, tokens in steps:
        for index, edge in enumerate(edges):
            if num_generated < edge <= num_generated + tokens:
                crossings[index] = (at, num_generated + tokens)
        num_generated += tokens
    (start, tokens_at_start), (end, tokens_at_end) = crossings
    return {
        "steady_tokens_per_s": round((tokens_at_end - tokens_at_start) / (end - start), 2),
        "whole_tokens_per_s": round(same_engine.whole_rate(steps), 2),
    }


def _table(measured: dict[str, list[dict[str, float]]]) -> str:
    """Return medians, spreads (smallest to largest), and each system's rate relative to the fastest AsyncLLM."""
    steady = {name: same_engine.median_and_spread(runs, "steady_tokens_per_s") for name, runs in measured.items()}
    best = max(rate for name, (rate, _) in steady.items() if name.startswith("async-llm"))
    lines = [
        "| system | steady output tokens/s | spread | whole | of the best AsyncLLM | worker cores |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, (rate, spread) in steady.items():
        figures = ("whole_tokens_per_s", "worker_cores")
        whole, cores = (same_engine.median_and_spread(measured[name], figure)[0] for figure in figures)
        lines.append(f"| {name} | {rate:.1f} | {spread} | {whole:.1f} | {rate / best:.3f} | {cores:.2f} |")
    return "\n".join(lines)


def _record(
    options: argparse.Namespace, job: dict[str, Any], measured: dict[str, list[dict[str, float]]]
) -> dict[str, Any]:
    engine = {name: value for name, value in job["engine"].items() if name not in ("model", "speculative_config")}
    settings = {"rows": options.rows, "sampling": job["sampling"], "engine": engine}
    return same_engine.record(options, measured) | settings


if __name__ == "__main__":
    main()
