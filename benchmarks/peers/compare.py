"""What a user would pick instead: output tokens/s and memory of peagle and its peers on the same prompts and model.

    python -m benchmarks.peers.compare --folder /tmp/peers --output benchmarks/peers/RESULT.json --llama-server PATH

HumanEval as chats, greedy, each answer up to its own end or `--max-tokens`, one request at once and several, the
systems in turns, `--repeats` times:

    peagle                `peagle generate` as it comes: with the drafter that the catalog names
    peagle-int8           the same with `--precision int8`, where the hardware has it
    vllm                  AsyncLLM, no drafter
    ray-data-llm          `ray.data.llm`, no drafter
    run-batch             `vllm run-batch`, no drafter
    transformers          `generate`, in batches of as many as are allowed at once
    transformers-lookup   the same with prompt lookup, its assisted generation without a second model; one at once only
    llama.cpp             `llama-server` on the GGUF file that the target was made from; its weights have 4 bits

Tokens count from the moment of the first request, so loading is in `command_s` alone. Memory is the most that the
command and all below it held; pages that two processes share count twice. llama-server is what `--llama-server` names,
built from llama.cpp's own sources for this machine; without it that row is left out.
"""

import argparse
import json
import os
import shutil
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import same_engine
from peagle import hardware
from peagle.bench.engine import PeakMemory, tree_rss_gib
from peagle.catalog.embedded import gguf_path
from peagle.engine.arguments import engine_args
from peagle.engine.environment import environment
from pipelines.cluster.node import openmp_variables

HERE = Path(__file__).parent
_INT8 = "peagle-int8"
_PEAGLE = ("peagle", _INT8)
_VLLM = {"vllm": "async-llm", "ray-data-llm": "ray-data-llm", "run-batch": "run-batch"} | dict.fromkeys(
    _PEAGLE, "peagle"
)
_ONE_AT_ONCE = ("transformers-lookup",)
_LLAMA_CPP = "llama.cpp"
_SYSTEMS = (*_VLLM, "transformers", *_ONE_AT_ONCE, _LLAMA_CPP)
_KV_CACHE = "kv_cache_memory_bytes"

Figures = dict[str, Any]


def main() -> None:
    """Run what has not run yet, write every measurement, print the table."""
    options = _options()
    options.folder.mkdir(parents=True, exist_ok=True)
    systems = options.systems
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
    record["versions"] |= _versions(options)
    options.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(_table(measured))  # noqa: T201


def _options() -> argparse.Namespace:
    parser = same_engine.parser(__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rows-at-once", type=int, default=8, help="prompts for each of the requests at once")
    parser.add_argument("--llama-server", type=_program, help="llama.cpp's server")
    parser.add_argument("--systems", nargs="+", choices=_SYSTEMS, help="default: all that can run here")
    parser.set_defaults(enforce_eager=False, drafter="auto", max_tokens=128)
    options = parser.parse_args()
    options.systems = options.systems or [
        system
        for system in _SYSTEMS
        if (system != _INT8 or hardware.detect().supports_int8) and (system != _LLAMA_CPP or options.llama_server)
    ]
    if "vllm" not in options.systems:
        parser.error("--systems: the others are shown over vllm, so it is one of them")
    if _LLAMA_CPP in options.systems and not options.llama_server:
        parser.error("--systems llama.cpp needs --llama-server")
    return options


def _versions(options: argparse.Namespace) -> dict[str, str]:
    """Of the systems that are not vLLM, llama.cpp's with the file that it runs."""
    found = {"transformers": version("transformers")}
    if options.llama_server:
        told = subprocess.run([options.llama_server, "--version"], capture_output=True, text=True, check=True)
        lines = (told.stdout + told.stderr).splitlines()
        found[_LLAMA_CPP] = next(line for line in lines if line.startswith("version:")).removeprefix("version:").strip()
        found["gguf"] = gguf_path(options.model).name
    return found


def _program(name: str) -> str:
    """Where a program is. One that is not there is an error: without it its row would be left out in silence."""
    if (found := shutil.which(name)) is None:
        raise argparse.ArgumentTypeError(f"{name} is no program that can be run, nor one on the PATH")
    return found


def _measure(options: argparse.Namespace, system: str, concurrency: int, repeat: int) -> Figures:
    folder = options.folder / f"{system}-{concurrency}-{repeat}"
    job = _job(options, system, concurrency, folder)
    if (folder / "done.json").exists():
        require_same(folder, job)
    else:
        script = HERE.parent / "bulk" / "overhead_systems.py" if system in _VLLM else HERE / "peers.py"
        started = time.monotonic()
        with (
            same_engine.system(script, _VLLM.get(system, system), job, folder, from_first_request=True) as process,
            PeakMemory(lambda: tree_rss_gib(process.pid)) as memory,
        ):
            process.wait()
        done = {"command_s": round(time.monotonic() - started, 1), "memory_gib": round(memory.gib or 0.0, 2)}
        (folder / "done.json").write_text(json.dumps(done), encoding="utf-8")
    steps = same_engine.read_clock(same_engine.clock_file(folder))
    figures: Figures = json.loads((folder / "done.json").read_text(encoding="utf-8"))
    rate = round(same_engine.whole_rate(steps), 2)
    figures |= {"output_tokens_per_s": rate, "output_tokens": sum(tokens for _, tokens in steps)}
    return figures | (drafting(folder / "run") if system in _PEAGLE else {})


def require_same(folder: Path, job: dict[str, Any]) -> None:
    """Make sure that what was measured there was this work.

    The size of the KV cache may differ: it follows the memory that is free at the moment, and is ample.

    Raises:
        SystemExit: it was other prompts, another engine or other sampling.
    """
    kept = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    kept, job = ({**work, "engine": {**work["engine"], _KV_CACHE: None}} for work in (kept, job))
    if changed := sorted(name for name in kept.keys() | job.keys() if kept.get(name) != job.get(name)):
        raise SystemExit(f"{folder} was measured with another {', '.join(changed)}; name another --folder")


def drafting(run: Path) -> dict[str, Any]:
    """What the run of `peagle generate` drafted with: "auto" may be no drafter."""
    drafter = json.loads((run / "run.json").read_bytes())["engine"]["drafter"]
    speculation = json.loads((run / "report.json").read_bytes())["account"]["speculation"]
    return {
        "method": drafter["method"] if drafter else "none",
        "num_speculative_tokens": drafter["num_speculative_tokens"] if drafter else None,
        "acceptance_length": speculation["acceptance_length"],
    }


def _job(options: argparse.Namespace, system: str, concurrency: int, folder: Path) -> dict[str, Any]:
    """What a system is to do; only peagle drafts."""
    plain = argparse.Namespace(**vars(options) | {"drafter": "none"})
    here = hardware.detect()
    engine = same_engine.resolve(plain, concurrency)
    flags = same_engine.peagle_flags(options, concurrency) + ["--precision", "int8"] * (system == _INT8)
    return {
        "system": system,
        "folder": str(folder),
        "concurrency": concurrency,
        "model": options.model,
        "engine": engine_args(engine.spec, here) | {"model": engine.model.path},
        "environment": environment(engine.spec, here, inherited=os.environ) | openmp_variables(engine.spec),
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
        plain, _ = same_engine.median_and_spread(systems["vllm"], "output_tokens_per_s")
        for system, runs in systems.items():
            rate, spread = same_engine.median_and_spread(runs, "output_tokens_per_s")
            memory, _ = same_engine.median_and_spread(runs, "memory_gib")
            command, _ = same_engine.median_and_spread(runs, "command_s")
            lines.append(
                f"| {concurrency} | {system} | {rate:.1f} | {spread} | {rate / plain:.2f} "
                f"| {memory:.1f} | {command:.0f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
