"""Comparison with alternatives: output tokens/s and memory of peagle and other systems, for the same prompts and model.

    python -m benchmarks.peers.compare --folder /tmp/peers --output benchmarks/peers/RESULT.json --llama-server PATH

HumanEval prompts as greedy chats, each answer until its end or `--max-tokens`, at several concurrencies. The systems
run one after the other, `--repeats` times:

    peagle                `peagle generate` with its default drafter for the model
    peagle-int8           the same with `--precision int8`, if the hardware supports it
    vllm                  AsyncLLM, no drafter
    ray-data-llm          `ray.data.llm`, no drafter
    run-batch             `vllm run-batch`, no drafter
    transformers          `generate`, in batches whose size is the concurrency
    transformers-lookup   the same with prompt lookup (assisted generation without a second model); concurrency 1 only
    llama.cpp             `llama-server` with the GGUF file that the target was converted from; 4-bit weights

Tokens/s are measured from the first request, so only `command_s` includes loading. Memory is the peak of the command
and all its subprocesses; pages that two processes share count twice. `--llama-server` should be built from llama.cpp's
sources for this machine; without this flag, that system is omitted.
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
_SEQUENTIAL_SYSTEMS = ("transformers-lookup",)
_LLAMA_CPP = "llama.cpp"
_SYSTEMS = (*_VLLM, "transformers", *_SEQUENTIAL_SYSTEMS, _LLAMA_CPP)
_KV_CACHE = "kv_cache_memory_bytes"

Figures = dict[str, Any]


def main() -> None:
    """Run missing measurements, write all measurements to a file, and print the table."""
    options = _options()
    options.folder.mkdir(parents=True, exist_ok=True)
    systems = options.systems
    measured: dict[str, dict[str, list[Figures]]] = {str(c): {} for c in options.concurrency}
    for repeat in range(options.repeats):
        for concurrency in options.concurrency:
            for system in systems[repeat % len(systems) :] + systems[: repeat % len(systems)]:
                if system in _SEQUENTIAL_SYSTEMS and concurrency > 1:
                    continue
                figures = _measure(options, system, concurrency, repeat)
                measured[str(concurrency)].setdefault(system, []).append(figures)
                print(f"repeat {repeat}, concurrency {concurrency}, {system}: {figures}", flush=True)  # noqa: T201
    record = same_engine.record(options, measured) | {"rows_at_once": options.rows_at_once}
    record["versions"] |= _versions(options)
    options.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(_table(measured))  # noqa: T201


def _options() -> argparse.Namespace:
    parser = same_engine.parser(__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rows-at-once", type=int, default=8, help="prompts per concurrent request")
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
        parser.error("--systems must include vllm, because the other systems are compared with it")
    if _LLAMA_CPP in options.systems and not options.llama_server:
        parser.error("--systems llama.cpp requires --llama-server")
    return options


def _versions(options: argparse.Namespace) -> dict[str, str]:
    """Return the versions of the systems other than vLLM, and the name of llama.cpp's model file."""
    versions = {"transformers": version("transformers")}
    if options.llama_server:
        completed = subprocess.run([options.llama_server, "--version"], capture_output=True, text=True, check=True)
        lines = (completed.stdout + completed.stderr).splitlines()
        versions[_LLAMA_CPP] = (
            next(line for line in lines if line.startswith("version:")).removeprefix("version:").strip()
        )
        versions["gguf"] = gguf_path(options.model).name
    return versions


def _program(name: str) -> str:
    """Return the path of a program. A missing program is an error; otherwise its system would be omitted silently."""
    if (path := shutil.which(name)) is None:
        raise argparse.ArgumentTypeError(f"{name} is neither an executable file nor a program on the PATH")
    return path


def _measure(options: argparse.Namespace, system: str, concurrency: int, repeat: int) -> Figures:
    folder = options.folder / f"{system}-{concurrency}-{repeat}"
    job = _job(options, system, concurrency, folder)
    if (folder / "done.json").exists():
        require_same_job(folder, job)
    else:
        script = HERE.parent / "bulk" / "overhead_systems.py" if system in _VLLM else HERE / "peers.py"
        started = time.monotonic()
        with (
            same_engine.system(script, _VLLM.get(system, system), job, folder, from_first_request=True) as process,
            PeakMemory(lambda: tree_rss_gib(process.pid)) as memory,
        ):
            process.wait()
        measurement = {"command_s": round(time.monotonic() - started, 1), "memory_gib": round(memory.gib or 0.0, 2)}
        (folder / "done.json").write_text(json.dumps(measurement), encoding="utf-8")
    steps = same_engine.read_clock(same_engine.clock_file(folder))
    figures: Figures = json.loads((folder / "done.json").read_text(encoding="utf-8"))
    rate = round(same_engine.whole_rate(steps), 2)
    figures |= {"output_tokens_per_s": rate, "output_tokens": sum(tokens for _, tokens in steps)}
    return figures | (drafting_figures(folder / "run") if system in _PEAGLE else {})


def require_same_job(folder: Path, job: dict[str, Any]) -> None:
    """Check that the stored measurement is of the same job.

    The size of the KV cache may differ: it depends on the free memory, and is always sufficient.

    Raises:
        SystemExit: the prompts, the engine or the sampling parameters differ.
    """
    stored_job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    stored_job, job = ({**work, "engine": {**work["engine"], _KV_CACHE: None}} for work in (stored_job, job))
    if changed := sorted(name for name in stored_job.keys() | job.keys() if stored_job.get(name) != job.get(name)):
        raise SystemExit(f"{folder} was measured with another {', '.join(changed)}; use another --folder")


def drafting_figures(run: Path) -> dict[str, Any]:
    """Return the method, K and acceptance length of a bulk run; `--drafter auto` may have chosen no drafter."""
    drafter = json.loads((run / "run.json").read_bytes())["engine"]["drafter"]
    speculation = json.loads((run / "report.json").read_bytes())["account"]["speculation"]
    return {
        "method": drafter["method"] if drafter else "none",
        "num_speculative_tokens": drafter["num_speculative_tokens"] if drafter else None,
        "acceptance_length": speculation["acceptance_length"],
    }


def _job(options: argparse.Namespace, system: str, concurrency: int, folder: Path) -> dict[str, Any]:
    """Return the job of a system. Only peagle gets a drafter."""
    options_without_drafter = argparse.Namespace(**vars(options) | {"drafter": "none"})
    detected = hardware.detect()
    engine = same_engine.resolve(options_without_drafter, concurrency)
    flags = same_engine.peagle_flags(options, concurrency) + ["--precision", "int8"] * (system == _INT8)
    return {
        "system": system,
        "folder": str(folder),
        "concurrency": concurrency,
        "model": options.model,
        "engine": engine_args(engine.spec, detected) | {"model": engine.model.path},
        "environment": environment(engine.spec, detected, inherited=os.environ) | openmp_variables(engine.spec),
        "rows": same_engine.prompts(options.rows_at_once * concurrency, engine.model.path),
        "sampling": {"temperature": 0, "max_tokens": options.max_tokens},
        "peagle": [*flags, "--max-tokens", str(options.max_tokens), "--temperature", "0"],
        "llama_server": options.llama_server,
    }


def _table(measured: dict[str, dict[str, list[Figures]]]) -> str:
    """Return medians and spreads (smallest to largest) by concurrency."""
    lines = [
        "| concurrency | system | output tokens/s | spread | of vllm | memory GiB | command s |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for concurrency, systems in measured.items():
        vllm_rate, _ = same_engine.median_and_spread(systems["vllm"], "output_tokens_per_s")
        for system, runs in systems.items():
            rate, spread = same_engine.median_and_spread(runs, "output_tokens_per_s")
            memory, _ = same_engine.median_and_spread(runs, "memory_gib")
            command, _ = same_engine.median_and_spread(runs, "command_s")
            lines.append(
                f"| {concurrency} | {system} | {rate:.1f} | {spread} | {rate / vllm_rate:.2f} "
                f"| {memory:.1f} | {command:.0f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
