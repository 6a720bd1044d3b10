"""Item 7 of the GPU queue, for a machine with Ray: `peagle generate` and `peagle serve` as they are.

    python3 benchmarks/gpu/with_ray.py

The embedded target with its P-EAGLE head, then the shape of item 1 in FP8, each in bulk and behind the endpoint: four
engines, about 90 s each. Every engine checks itself before it takes work. `results.json` is written after each step.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from block import parser_of, run_script, shapes_folder

from jobs.output import say
from peagle.files import write_json

_PORT = 8765
_STEP_S = {False: 150, True: 120}
_STOP_S = 45


def commands(output: Path, shapes: Path, *, tiny: bool) -> dict[str, list[str]]:
    """Return the words of `peagle` for each step."""
    few = "4" if tiny else "256"
    embedded = [
        "--model",
        "smollm2-135m",
        "--drafter",
        "peagle",
        "--num-speculative-tokens",
        "7",
        "--max-num-seqs",
        few,
    ]
    shape = [
        *("--model", str(shapes / "target"), "--drafter", str(shapes / "peagle"), "--num-speculative-tokens", "7"),
        *(
            "--max-num-seqs",
            "128",
            "--max-model-len",
            "8192",
            "--precision",
            "fp8",
            "--engine-arg",
            "load_format=dummy",
        ),
    ]
    # By default, so short a bulk run is not compiled.
    embedded += ["--enforce-eager", "--precision", "bf16"] if tiny else ["--no-enforce-eager"]
    shape.append("--no-enforce-eager")
    found = {}
    for name, engine in (("embedded", embedded),) if tiny else (("embedded", embedded), ("shape", shape)):
        bulk = ["--input", str(output / "prompts.jsonl"), "--max-tokens", "16" if tiny else "128"]
        found[f"generate-{name}"] = ["generate", *bulk, "--output", str(output / f"run-{name}"), *engine]
        serve = ["--name", "first", "--port", str(_PORT), "--state", str(output / f"serve-{name}")]
        found[f"serve-{name}"] = ["serve", *serve, *engine]
    return {name: [*words, "--usd-per-hour", "1"] for name, words in found.items()}


def run(args: argparse.Namespace) -> int:
    """Run every step."""
    output = args.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    prompts = [
        f"Write a Python function that adds {number} to its argument." for number in range(4 if args.tiny else 256)
    ]
    (output / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    shapes = Path("none") if args.tiny else shapes_folder(tiny=False).absolute()
    results: dict[str, Any] = {}
    for name, words in commands(output, shapes, tiny=args.tiny).items():
        began = time.monotonic()
        results[name] = _step(words, output / f"{name}.log", _STEP_S[args.tiny]) | {"s": time.monotonic() - began}
        write_json(output / "results.json", results)
        say(f"{name}: {results[name]}")
    return 0 if all(result["exit_code"] == 0 for result in results.values()) else 1


def _step(words: list[str], log: Path, limit_s: float) -> dict[str, Any]:
    """Run a command, ask an endpoint one question, and end it."""
    answer = None
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "jobs.cli", *words], stdout=file, stderr=subprocess.STDOUT)
        try:
            if words[0] == "serve":
                answer = next(_answers(process, limit_s), None)
                process.send_signal(signal.SIGINT)
            return {"exit_code": process.wait(_STOP_S if words[0] == "serve" else limit_s), "answer": answer}
        except subprocess.TimeoutExpired:
            return {"exit_code": None, "answer": answer}
        finally:
            process.kill()


def _answers(process: "subprocess.Popen[bytes]", limit_s: float) -> Iterator[str]:
    """Ask until there is an answer, the endpoint has ended, or the time is up."""
    body = json.dumps({"model": "first", "prompt": "def add(a, b):", "max_tokens": 64}).encode()
    url = f"http://127.0.0.1:{_PORT}/v1/completions"
    until = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < until:
        try:
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=30) as answer:
                yield json.load(answer)["choices"][0]["text"]
        except (urllib.error.URLError, OSError):
            time.sleep(1)


if __name__ == "__main__":
    run_script(parser_of("with-ray", __doc__), run)
