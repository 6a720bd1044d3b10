"""Item 7 of the GPU queue: run the commands `peagle generate` and `peagle serve` on a machine with Ray.

    python3 benchmarks/gpu/with_ray.py

The embedded target with its P-EAGLE head, then the shape of item 1 in FP8, each with both commands: four engines, about
90 s each. Every engine runs its self-check first. `results.json` is written after each command.
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
_COMMAND_S = {False: 150, True: 120}  # by --tiny
_STOP_S = 45


def commands(output: Path, shapes: Path, *, tiny: bool) -> dict[str, list[str]]:
    """Return the arguments of `peagle` for each command."""
    max_num_seqs = "4" if tiny else "256"
    embedded = [
        "--model",
        "smollm2-135m",
        "--drafter",
        "peagle",
        "--num-speculative-tokens",
        "7",
        "--max-num-seqs",
        max_num_seqs,
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
    # Without --no-enforce-eager, such a short bulk run would not be compiled.
    embedded += ["--enforce-eager", "--precision", "bf16"] if tiny else ["--no-enforce-eager"]
    shape.append("--no-enforce-eager")
    arguments_by_name = {}
    for name, engine in (("embedded", embedded),) if tiny else (("embedded", embedded), ("shape", shape)):
        bulk = ["--input", str(output / "prompts.jsonl"), "--max-tokens", "16" if tiny else "128"]
        arguments_by_name[f"generate-{name}"] = ["generate", *bulk, "--output", str(output / f"run-{name}"), *engine]
        serve = ["--name", "first", "--port", str(_PORT), "--state", str(output / f"serve-{name}")]
        arguments_by_name[f"serve-{name}"] = ["serve", *serve, *engine]
    return {name: [*arguments, "--usd-per-hour", "1"] for name, arguments in arguments_by_name.items()}


def run(args: argparse.Namespace) -> int:
    """Run every command."""
    output = args.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    prompts = [
        f"Write a Python function that adds {number} to its argument." for number in range(4 if args.tiny else 256)
    ]
    (output / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    shapes = Path("none") if args.tiny else shapes_folder(tiny=False).absolute()
    results: dict[str, Any] = {}
    for name, arguments in commands(output, shapes, tiny=args.tiny).items():
        start = time.monotonic()
        result = _run_command(arguments, output / f"{name}.log", _COMMAND_S[args.tiny])
        results[name] = result | {"s": time.monotonic() - start}
        write_json(output / "results.json", results)
        say(f"{name}: {results[name]}")
    return 0 if all(result["exit_code"] == 0 for result in results.values()) else 1


def _run_command(arguments: list[str], log: Path, limit_s: float) -> dict[str, Any]:
    """Run a command. Send one request to an endpoint, then stop it."""
    answer = None
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", *arguments], stdout=file, stderr=subprocess.STDOUT
        )
        try:
            if arguments[0] == "serve":
                answer = next(_answers(process, limit_s), None)
                process.send_signal(signal.SIGINT)
            return {"exit_code": process.wait(_STOP_S if arguments[0] == "serve" else limit_s), "answer": answer}
        except subprocess.TimeoutExpired:
            return {"exit_code": None, "answer": answer}
        finally:
            process.kill()


def _answers(process: "subprocess.Popen[bytes]", limit_s: float) -> Iterator[str]:
    """Repeat the request until it is answered, the endpoint has ended, or the time is over."""
    body = json.dumps({"model": "first", "prompt": "def add(a, b):", "max_tokens": 64}).encode()
    url = f"http://127.0.0.1:{_PORT}/v1/completions"
    deadline = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < deadline:
        try:
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=30) as answer:
                yield json.load(answer)["choices"][0]["text"]
        except (urllib.error.URLError, OSError):
            time.sleep(1)


if __name__ == "__main__":
    run_script(parser_of("with-ray", __doc__), run)
