"""What peagle's bulk pipeline costs: steady output tokens/s of four systems that drive the same engine.

    python -m benchmarks.bulk.overhead --folder /tmp/overhead --output benchmarks/bulk/RESULT.json

`peagle generate`, vLLM's AsyncLLM driven directly (with several numbers of requests at once; its best counts),
`ray.data.llm` and `vllm run-batch` answer the same HumanEval prompts greedily, with the same engine arguments and
environment, in turns, `--repeats` times. A plug-in of vLLM (`token_clock/`) writes down when tokens come, at the same
place in all four.

Steady is the time between the first 10 % and the last 10 % of the output tokens: no system's start and no system's
tail is in it. "whole" is from the first token to the last. Time to load is in neither. "worker cores" is what vLLM's
worker, which computes, had of the cores meanwhile.
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
_EDGE = 0.1


def main() -> None:
    """Run what has not run yet, write every measurement, print the table."""
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
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 32, 0], help="of async-llm; 0: all at once")
    return same_engine.parse(parser)


def _job(options: argparse.Namespace) -> dict[str, Any]:
    """Prompts, engine arguments and sampling that all systems share, and the environment of the engine."""
    here = hardware.detect()
    engine = same_engine.resolve(options, options.max_num_seqs)
    arguments = engine_args(engine.spec, here) | {"model": engine.model.path}
    rows = same_engine.prompts(options.rows, engine.model.path)
    flags = same_engine.peagle_flags(options, options.max_num_seqs)
    flags += ["--ignore-eos", "--max-tokens", str(options.max_tokens), "--temperature", "0"]
    sampling = {"temperature": 0, "max_tokens": options.max_tokens, "ignore_eos": True}
    variables = environment(engine.spec, here, inherited=os.environ) | openmp_variables(engine.spec)
    return {"engine": arguments, "environment": variables, "rows": rows, "sampling": sampling, "peagle": flags}


def _measure(options: argparse.Namespace, system: str, repeat: int, job: dict[str, Any]) -> dict[str, float]:
    folder = options.folder / f"{system}-{repeat}"
    clock, done = same_engine.clock_file(folder), folder / "done.json"
    expected = len(job["rows"]) * job["sampling"]["max_tokens"]
    if not done.exists():
        name, _, concurrency = system.partition("@")
        own = {"folder": str(folder), "concurrency": int(concurrency) if concurrency.isdigit() else 0}
        started = time.monotonic()
        with same_engine.system(HERE / "overhead_systems.py", name, job | own, folder) as process:
            # The file is there when vLLM has loaded the plug-in; with its first line the engine computes.
            while process.poll() is None and not (clock.exists() and clock.stat().st_size):
                time.sleep(0.5)
            if process.poll() is None:
                same_engine.leave_cores(process.pid, options.engine_cores)
            cores = _worker_cores(process, clock, (1 - _EDGE) * expected)
        took = {"worker_cores": cores, "command_s": round(time.monotonic() - started, 1)}
        done.write_text(json.dumps(took), encoding="utf-8")
    return _rates(clock, expected) | json.loads(done.read_text(encoding="utf-8"))


def _worker_cores(process: "subprocess.Popen[bytes]", clock: Path, num_tokens: float) -> float:
    """What the engine's worker has of the cores, from now until it has made so many tokens."""

    def used() -> float:
        return sum(s for name, s in same_engine.cpu_times(process.pid).values() if name == "VLLM::Worker")

    before, started, cores = used(), time.monotonic(), 0.0
    while process.poll() is None and sum(tokens for _, tokens in same_engine.read_clock(clock)) < num_tokens:
        time.sleep(2)
        if (now := used()) > before:  # it is gone soon after its last token
            cores = (now - before) / (time.monotonic() - started)
    return round(cores, 3)


def _rates(clock: Path, num_expected: int) -> dict[str, float]:
    """Tokens/s between the edges and over all, from the clock's lines.

    Raises:
        SystemExit: the tokens are not those of the job, so the systems did not do the same work.
    """
    steps = same_engine.read_clock(clock)
    total = sum(tokens for _, tokens in steps)
    while steps and num_expected < total <= num_expected + NUM_TOKENS:  # its first steps are the engine's self-check
        total -= steps.pop(0)[1]
    if total != num_expected:
        raise SystemExit(f"{clock}: {total:.0f} tokens, and the job has {num_expected}; see log.txt beside it")
    passed = [(0.0, 0.0)] * 2
    so_far, edges = 0.0, [_EDGE * total, (1 - _EDGE) * total]
    for at, tokens in steps:
        for n, edge in enumerate(edges):
            if so_far < edge <= so_far + tokens:
                passed[n] = (at, so_far + tokens)
        so_far += tokens
    (start, before), (end, after) = passed
    return {
        "steady_tokens_per_s": round((after - before) / (end - start), 2),
        "whole_tokens_per_s": round(same_engine.whole_rate(steps), 2),
    }


def _table(measured: dict[str, list[dict[str, float]]]) -> str:
    """Medians and spread (smallest to largest), and each system against the best direct drive."""
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
    own = {"rows": options.rows, "sampling": job["sampling"], "engine": engine}
    return same_engine.record(options, measured) | own


if __name__ == "__main__":
    main()
