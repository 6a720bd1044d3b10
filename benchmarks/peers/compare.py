"""What a user would pick instead: output tokens/s and memory of peagle and its peers on the same prompts and model.

    python -m benchmarks.peers.compare --folder /tmp/peers --output benchmarks/peers/RESULT.json --llama-server PATH

HumanEval as chats, greedy, each answer up to its own end or `--max-tokens`, one request at once and several, the
systems in turns, `--repeats` times:

    peagle                `peagle generate` as it comes: with the drafter that the catalog names
    vllm                  AsyncLLM, no drafter
    ray-data-llm          `ray.data.llm`, no drafter
    run-batch             `vllm run-batch`, no drafter
    transformers          `generate`, in batches of as many as are allowed at once
    transformers-lookup   the same with prompt lookup, its assisted generation without a second model; one at once only
    llama.cpp             `llama-server` on the GGUF file that the target was made from; its weights have 4 bits

Tokens count from the first to the last, so loading is in `command_s` alone. Memory is the most that the command and all
below it held; pages that two processes share count twice. llama-server is what `--llama-server` names, built from
llama.cpp's own sources (README.md beside this file); without it that row is left out.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import same_engine
from peagle.bench.memory import PeakMemory, tree_rss_gib

HERE = Path(__file__).parent
BULK = HERE.parent / "bulk"
_VLLM = {"vllm": "async-llm", "ray-data-llm": "ray-data-llm", "run-batch": "run-batch", "peagle": "peagle"}
_ONE_AT_ONCE = ("transformers-lookup",)
_LLAMA_CPP = "llama.cpp"

Figures = dict[str, float]


def main() -> None:
    """Run what has not run yet, write every measurement, print the table."""
    options = _options()
    options.folder.mkdir(parents=True, exist_ok=True)
    systems = ["peagle", "vllm", "ray-data-llm", "run-batch", "transformers", *_ONE_AT_ONCE]
    if options.llama_server:
        systems.append(_LLAMA_CPP)
    measured: dict[str, dict[str, list[Figures]]] = {str(c): {} for c in options.concurrency}
    for repeat in range(options.repeats):
        for concurrency in options.concurrency:
            for system in systems[repeat % len(systems) :] + systems[: repeat % len(systems)]:
                if system in _ONE_AT_ONCE and concurrency > 1:
                    continue
                figures = _measure(options, system, concurrency, repeat)
                measured[str(concurrency)].setdefault(system, []).append(figures)
                print(f"repeat {repeat}, {concurrency} at once, {system}: {figures}", flush=True)  # noqa: T201
    record = same_engine.record(options, measured) | {"rows_at_once": options.rows_at_once}
    options.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(_table(measured))  # noqa: T201


def _options() -> argparse.Namespace:
    parser = same_engine.parser(__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rows-at-once", type=int, default=8, help="prompts for each of the requests at once")
    parser.add_argument("--llama-server", type=shutil.which, help="llama.cpp's server")
    parser.set_defaults(enforce_eager=False, drafter="auto", max_tokens=128)
    return same_engine.parse(parser)


def _measure(options: argparse.Namespace, system: str, concurrency: int, repeat: int) -> Figures:
    folder = options.folder / f"{system}-{concurrency}-{repeat}"
    clock = folder / "clock.txt"
    if not (folder / "done.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        clock.unlink(missing_ok=True)
        (folder / "job.json").write_text(json.dumps(_job(options, system, concurrency, folder)), encoding="utf-8")
        script = BULK / "overhead_systems.py" if system in _VLLM else HERE / "peers.py"
        path = os.pathsep.join([str(BULK / "token_clock"), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        variables = os.environ | {"TOKEN_CLOCK": str(clock), "PYTHONPATH": path}
        command = [sys.executable, str(script), _VLLM.get(system, system), str(folder / "job.json")]
        started = time.monotonic()
        with (folder / "log.txt").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT)
            with PeakMemory(lambda: tree_rss_gib(process.pid)) as memory:
                status = process.wait()
        if status:
            raise SystemExit(f"{system} ended with status {status}; see {folder / 'log.txt'}")
        done = {"command_s": round(time.monotonic() - started, 1), "memory_gib": round(memory.gib or 0.0, 2)}
        (folder / "done.json").write_text(json.dumps(done), encoding="utf-8")
    steps = same_engine.read_clock(clock)
    done = json.loads((folder / "done.json").read_text(encoding="utf-8"))
    return {
        "output_tokens_per_s": round(same_engine.whole_rate(steps), 2),
        "output_tokens": sum(tokens for _, tokens in steps),
        **done,
    }


def _job(options: argparse.Namespace, system: str, concurrency: int, folder: Path) -> dict[str, Any]:
    """What a system is to do; only peagle drafts."""
    from peagle import hardware
    from peagle.engine import engine_args, environment

    plain = argparse.Namespace(**vars(options) | {"drafter": "none"})
    here = hardware.detect()
    engine = same_engine.resolve(plain, concurrency)
    flags = same_engine.peagle_flags(options, concurrency)
    return {
        "system": system,
        "folder": str(folder),
        "concurrency": concurrency,
        "model": options.model,
        "engine": engine_args(engine.spec, here) | {"model": engine.model.path},
        "environment": environment(engine.spec, here, inherited=os.environ),
        "rows": same_engine.prompts(options.rows_at_once * concurrency, engine.model.path),
        "sampling": {"temperature": 0, "max_tokens": options.max_tokens},
        "peagle": [*flags, "--max-tokens", str(options.max_tokens), "--temperature", "0"],
        "llama_server": options.llama_server,
    }


def _table(measured: dict[str, dict[str, list[Figures]]]) -> str:
    """Medians and spread (smallest to largest) by number of requests at once."""
    lines = [
        "| requests at once | system | output tokens/s | spread | of vllm | memory GiB | command s |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for concurrency, systems in measured.items():
        plain = statistics.median(run["output_tokens_per_s"] for run in systems["vllm"])
        for system, runs in systems.items():
            rates = [run["output_tokens_per_s"] for run in runs]
            rate = statistics.median(rates)
            memory, command = (statistics.median(run[name] for run in runs) for name in ("memory_gib", "command_s"))
            lines.append(
                f"| {concurrency} | {system} | {rate:.1f} | {min(rates):.1f} to {max(rates):.1f} | {rate / plain:.2f} "
                f"| {memory:.1f} | {command:.0f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
