"""Item 4 of the GPU queue: the heads that ship trained further, and one of four layers, at the same time on one card.

    python3 benchmarks/gpu/train_heads.py

Three processes of `peagle train` on the responses of this repository, each for eight minutes: the shipped P-EAGLE head,
a P-EAGLE head of four layers that continues the shipped EAGLE-3 head, and the shipped EAGLE-3 head. Each writes a
checkpoint every minute and metrics every step; what is worth keeping is copied to the output as it comes.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from block import parser_of, run_script

from jobs.output import say

_RESPONSES = "benchmarks/drafter/responses"
_FILES = ("greedy", "sampled", "greedy-2", "code", "content")
_START_S = 60  # to read the documents and load the target
SHARED = [
    "--target", "smollm2-135m", "--verifier", "HuggingFaceTB/SmolLM2-135M-Instruct", "--responses", "given",
    "--on-the-fly", "--no-train-lm-head", "--draft-vocab-size", "16384", "--num-key-value-heads", "9",
    "--cod-ratio", "0.8",
]  # fmt: skip
_DPACE = ["--depth-weight", "dpace", "--muon-learning-rate", "0.0025"]
HEADS = {
    "peagle-5": ["--algorithm", "peagle", "--num-layers", "5", "--init", "smollm2-135m-peagle", *_DPACE],
    "peagle-4": ["--algorithm", "peagle", "--num-layers", "4", "--init", "smollm2-135m-eagle3", *_DPACE],
    "eagle3-1": ["--algorithm", "eagle3", "--num-layers", "1", "--init", "smollm2-135m-eagle3", "--num-depths", "7",
                 "--muon-learning-rate", "0.002"],
}  # fmt: skip
_KEPT = ("run.json", "training/metrics.jsonl")


def commands(folder: Path, seconds: float, *, tiny: bool) -> dict[str, list[str]]:
    """Return the words of `peagle` for each head.

    Args:
        folder: of the trainings; one that is there continues.
        seconds: how long each trains.
    """
    files = ("greedy",) if tiny else _FILES
    prompts = [word for name in files for word in ("--prompts", f"{_RESPONSES}/{name}.parquet")]
    device = ["--device", "cpu", "--batch-tokens", "512"] if tiny else ["--device", "cuda", "--batch-tokens", "8192"]
    # The learning rate follows from the number of passes: those of 480 s at 26,000 tokens/s, of 10.4 M tokens.
    how = [*device, "--epochs", "0.01" if tiny else "1.2", "--time-budget-s", f"{seconds:g}"]
    heads = {"peagle-4": HEADS["peagle-4"]} if tiny else HEADS
    return {
        name: ["train", *SHARED, *own, *prompts, *how, "--output", str(folder / name)] for name, own in heads.items()
    }


def run(args: argparse.Namespace) -> int:
    """Train all heads; copy what they write until they have ended."""
    folder = Path("runs/heads-tiny" if args.tiny else "runs/heads")
    args.output.mkdir(parents=True, exist_ok=True)
    seconds = 20.0 if args.tiny else args.time_budget_s - _START_S
    running = {}
    for name, words in commands(folder, seconds, tiny=args.tiny).items():
        log = (args.output / f"{name}.log").open("wb")
        command = [sys.executable, "-m", "jobs.cli", *words]
        running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    while any(process.poll() is None for process in running.values()):
        time.sleep(5)
        _copy(folder, args.output)
    _copy(folder, args.output)
    codes = {name: process.returncode for name, process in running.items()}
    say(f"results: {args.output}; exit codes: {codes}")
    return 1 if any(code not in (0, 3) for code in codes.values()) else max(codes.values())


def _copy(folder: Path, output: Path) -> None:
    """Copy metrics and heads, which are small; checkpoints stay."""
    for head in folder.iterdir() if folder.is_dir() else ():
        for name in _KEPT:
            if (head / name).is_file():
                (output / head.name).mkdir(exist_ok=True)
                shutil.copyfile(head / name, output / head.name / Path(name).name)
        if (head / "head" / "model.safetensors").is_file():
            shutil.copytree(head / "head", output / head.name / "head", dirs_exist_ok=True)


if __name__ == "__main__":
    run_script(parser_of("train-heads", __doc__), run)
