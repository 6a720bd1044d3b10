"""Item 4 of the GPU queue: train four heads at the same time on one GPU.

    python3 benchmarks/gpu/train_heads.py

Four processes of `peagle train` use the responses in this repository, each for eight minutes. Two continue the shipped
P-EAGLE and EAGLE-3 heads. The third trains a P-EAGLE head of three layers, unrolled from the shipped EAGLE-3 head, and
the fourth a DFlash head of four layers from the target's last ones. Each process writes a checkpoint every minute and
metrics every step. Heads and metrics are copied to the output regularly.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from block import parser_of, run_script

from jobs.output import say
from peagle.signals import signals_as_interrupts

_RESPONSES = "benchmarks/drafter/responses"
_FILES = ("greedy", "sampled", "greedy-2", "code", "content")
_TINY_FILE = Path("runs/responses-tiny.parquet")
_SAVE_S = 15  # to save a checkpoint
_START_S = 60  # to read the documents and load the target
UNROLLED = Path("runs/unrolled-head")
SHARED = [
    "--model", "smollm2-135m", "--verifier", "HuggingFaceTB/SmolLM2-135M-Instruct", "--responses", "given",
    "--on-the-fly", "--no-train-lm-head", "--draft-vocab-size", "16384", "--cod-ratio", "0.8",
]  # fmt: skip
PEAGLE = [
    "--algorithm", "peagle", "--num-key-value-heads", "9", "--depth-weight", "dpace", "--muon-learning-rate", "0.0025",
]  # fmt: skip
HEADS = {
    "peagle-5": [*PEAGLE, "--num-layers", "5", "--init", "smollm2-135m-peagle"],
    "peagle-3": [*PEAGLE, "--num-layers", "3", "--init", str(UNROLLED)],
    "eagle3-1": ["--algorithm", "eagle3", "--num-layers", "1", "--init", "smollm2-135m-eagle3", "--num-depths", "7",
                 "--muon-learning-rate", "0.002"],
    "dflash-4": ["--algorithm", "dflash", "--num-layers", "4", "--num-key-value-heads", "9"],
}  # fmt: skip
_COPIED_FILES = ("run.json", "training/metrics.jsonl")


def commands(folder: Path, seconds: float, *, tiny: bool) -> dict[str, list[str]]:
    """Return the arguments of `peagle` for each head.

    Args:
        folder: has one folder per head; existing ones continue.
        seconds: training time of each head.
    """
    files = [_TINY_FILE] if tiny else [f"{_RESPONSES}/{name}.parquet" for name in _FILES]
    prompts = [argument for file in files for argument in ("--prompts", str(file))]
    # The learning rate decays over all epochs. 1.2 epochs of 10.4 M tokens take 480 s at 26,000 tokens/s.
    size = ["--batch-tokens", "256", "--epochs", "1"] if tiny else ["--batch-tokens", "8192", "--epochs", "1.2"]
    shared = ["--device", "cpu" if tiny else "cuda", *size, "--time-budget-s", f"{seconds:g}"]
    return {
        name: ["train", *SHARED, *arguments, *prompts, *shared, "--output", str(folder / name)]
        for name, arguments in HEADS.items()
    }


def unroll_command(*, tiny: bool) -> list[str]:
    """Return the arguments of the `python` command that unrolls the shipped EAGLE-3 head."""
    file = _TINY_FILE if tiny else f"{_RESPONSES}/greedy.parquet"
    return [
        "-m", "benchmarks.drafter.unroll", "smollm2-135m-eagle3", "--prompts", str(file), "--num-layers", "3",
        "--num-key-value-heads", "9", "--output", str(UNROLLED),
    ]  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Train all heads, copying their files to the output until all have ended."""
    folder = Path("runs/heads-tiny" if args.tiny else "runs/heads")
    args.output.mkdir(parents=True, exist_ok=True)
    if args.tiny:
        _write_tiny_file()
    seconds = 20.0 if args.tiny else args.time_budget_s - _START_S
    # On a CPU, several processes that each use all cores would mostly wait for each other.
    variables = os.environ | ({"OMP_NUM_THREADS": "1"} if args.tiny else {})
    if not UNROLLED.is_dir():
        subprocess.run([sys.executable, *unroll_command(tiny=args.tiny)], check=True, env=variables)
    running = {}
    with signals_as_interrupts():
        try:
            for name, arguments in commands(folder, seconds, tiny=args.tiny).items():
                log = (args.output / f"{name}.log").open("wb")
                command = [sys.executable, "-m", "jobs.cli", *arguments]
                running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables)
            while any(process.poll() is None for process in running.values()):
                time.sleep(5)
                _copy(folder, args.output)
        finally:
            for process in running.values():
                process.terminate()
            _copy(folder, args.output)
            for process in running.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_SAVE_S)
                process.kill()
    codes = {name: process.returncode for name, process in running.items()}
    say(f"results: {args.output}; exit codes: {codes}")
    return 1 if any(code not in (0, 3) for code in codes.values()) else max(codes.values())


def _write_tiny_file() -> None:
    """Write the first 60 responses as the corpus of a dry run."""
    import pyarrow.parquet as pq

    _TINY_FILE.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pq.read_table(f"{_RESPONSES}/greedy.parquet").slice(0, 60), _TINY_FILE)


def _copy(folder: Path, output: Path) -> None:
    """Copy metrics and heads, which are small, but not checkpoints."""
    for head in folder.iterdir() if folder.is_dir() else ():
        for name in _COPIED_FILES:
            if (head / name).is_file():
                (output / head.name).mkdir(exist_ok=True)
                shutil.copyfile(head / name, output / head.name / Path(name).name)
        if (head / "head" / "model.safetensors").is_file():
            shutil.copytree(head / "head", output / head.name / "head", dirs_exist_ok=True)


if __name__ == "__main__":
    run_script(parser_of("train-heads", __doc__), run)
