"""The overhead of peagle's endpoint over `vllm serve`: output tokens/s and time to first token of the same engine.

    python -m benchmarks.online.overhead --folder /tmp/online --output benchmarks/online/RESULT.json

`vllm serve` and `peagle serve` are started alternately with the same engine arguments and environment. vLLM's load
generator (`vllm bench serve`) sends requests to each at every concurrency: HumanEval prompts as streamed greedy chats,
with a fixed number of output tokens. The order of the servers alternates between repeats. The results include the CPU
time of each process.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import same_engine
from peagle import hardware
from peagle.engine.arguments import command_line, engine_args
from peagle.engine.environment import environment
from peagle.humaneval import read_humaneval
from peagle.ports import free_port
from pipelines.cluster.node import openmp_variables

SYSTEMS = ("vllm serve", "peagle serve")
ROOT = Path(__file__).parents[2]
_START_S, _END_S = 300, 90


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The endpoint that both systems serve.

    Attributes:
        name: the model's name for clients.
        tokenizer: the target's folder.
        commands: the command of each system, without the port.
        environment: the engine's variables. `vllm serve` is started with them; `peagle serve` sets them only for the
            engine's process.
    """

    name: str
    tokenizer: str
    commands: dict[str, list[str]]
    environment: dict[str, str]


def main() -> None:
    """Run missing measurements, write all measurements to a file, and print the table."""
    options = _options()
    options.folder.mkdir(parents=True, exist_ok=True)
    _write_prompts(options.folder / "prompts.jsonl")
    endpoint = _endpoint(options)
    measured: dict[str, dict[str, list[dict[str, Any]]]] = {
        system: {str(c): [] for c in options.concurrency} for system in SYSTEMS
    }
    for repeat in range(options.repeats):
        for system in SYSTEMS if repeat % 2 == 0 else SYSTEMS[::-1]:
            figures_by_concurrency = _measure_server(
                options, endpoint, system, options.folder / f"{system.split()[0]}-{repeat}"
            )
            for concurrency, figures in figures_by_concurrency.items():
                measured[system][concurrency].append(figures)
            print(f"repeat {repeat} {system}: {figures_by_concurrency}", flush=True)  # noqa: T201
    record = same_engine.record(options, measured) | {"prompts_at_once": options.prompts_at_once}
    options.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(_table(measured))  # noqa: T201


def _options() -> argparse.Namespace:
    parser = same_engine.parser(__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--prompts-at-once", type=int, default=12, help="prompts per concurrent request")
    return same_engine.parse(parser)


def _write_prompts(path: Path) -> None:
    rows = [{"prompt": problem["prompt"]} for problem in read_humaneval()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _endpoint(options: argparse.Namespace) -> Endpoint:
    detected, max_num_seqs = hardware.detect(), max(options.concurrency)
    engine = same_engine.resolve(options, max_num_seqs)
    arguments = engine_args(engine.spec, detected) | {"model": engine.model.path, "served_model_name": options.model}
    peagle_flags = [*same_engine.peagle_flags(options, max_num_seqs), "--usd-per-hour", "1"]
    commands = {
        "vllm serve": ["benchmarks.vllm_command", "serve", *command_line(arguments)],
        "peagle serve": ["jobs.cli", "serve", *peagle_flags],
    }
    variables = environment(engine.spec, detected, inherited=os.environ) | openmp_variables(engine.spec)
    return Endpoint(name=options.model, tokenizer=engine.model.path, commands=commands, environment=variables)


def _measure_server(
    options: argparse.Namespace, endpoint: Endpoint, system: str, folder: Path
) -> dict[str, dict[str, Any]]:
    """Start a system once, and return its figures by concurrency."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [c for c in options.concurrency if not (folder / f"c{c}.json").exists()]
    if missing:
        with _serving(endpoint, system, folder) as (server, port):
            for concurrency in missing:
                same_engine.leave_cores(os.getpid(), options.engine_cores)
                before = same_engine.cpu_times(server)
                _run_load_generator(options, endpoint, port, concurrency, folder)
                spent = same_engine.cpu_spent(before, same_engine.cpu_times(server))
                spent = {name: round(seconds, 2) for name, seconds in spent.items()}
                (folder / f"c{concurrency}.cpu.json").write_text(json.dumps(spent), encoding="utf-8")
                (folder / f"c{concurrency}.json.part").rename(folder / f"c{concurrency}.json")
    return {str(c): _figures(folder / f"c{c}.json") for c in options.concurrency}


@contextlib.contextmanager
def _serving(endpoint: Endpoint, system: str, folder: Path) -> Iterator[tuple[int, int]]:
    """Run a server during the block; yield its process id and port."""
    port = free_port()
    command = [sys.executable, "-m", *endpoint.commands[system], "--host", "127.0.0.1", "--port", str(port)]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    if system == "peagle serve":
        command += ["--state", str(folder / "state")]
    else:
        variables |= endpoint.environment
    with (folder / "server.log").open("w", encoding="utf-8") as log:
        same_engine.take_cores()
        server = subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_until_up(server, port, folder)
            _send_one_request(endpoint, port)
            yield server.pid, port
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(_END_S)


def _wait_until_up(server: "subprocess.Popen[bytes]", port: int, folder: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models") as answer:
            if json.load(answer)["data"]:
                return
        time.sleep(1)
    raise SystemExit(f"the server did not start; see {folder / 'server.log'}")


def _send_one_request(endpoint: Endpoint, port: int) -> None:
    """Request one token, since `/v1/models` may answer before the engine is ready."""
    body = {"model": endpoint.name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=_START_S).close()


def _run_load_generator(
    options: argparse.Namespace, endpoint: Endpoint, port: int, concurrency: int, folder: Path
) -> None:
    """Run vLLM's load generator, which writes `c<CONCURRENCY>.json.part`."""
    command = [
        sys.executable, "-m", "benchmarks.vllm_command", "bench", "serve", "--backend", "openai-chat",
        "--base-url", f"http://127.0.0.1:{port}", "--endpoint", "/v1/chat/completions", "--model", endpoint.name,
        "--tokenizer", endpoint.tokenizer, "--dataset-name", "custom",
        "--dataset-path", str(folder.parent / "prompts.jsonl"), "--custom-output-len", str(options.max_tokens),
        "--num-prompts", str(options.prompts_at_once * concurrency), "--max-concurrency", str(concurrency),
        "--num-warmups", str(2 * concurrency), "--ignore-eos", "--temperature", "0", "--disable-shuffle",
        "--save-result", "--result-dir", str(folder), "--result-filename", f"c{concurrency}.json.part",
        "--disable-tqdm",
    ]  # fmt: skip
    with (folder / f"c{concurrency}.log").open("w", encoding="utf-8") as log:
        subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=log, stderr=log, check=True)


def _figures(path: Path) -> dict[str, Any]:
    result = json.loads(path.read_text(encoding="utf-8"))
    cpu = path.with_suffix(".cpu.json").read_text(encoding="utf-8")
    if result["failed"]:
        raise SystemExit(f"{path}: {result['failed']} requests failed")
    return {
        "output_tokens_per_s": round(result["output_throughput"], 2),
        "median_ttft_ms": round(result["median_ttft_ms"], 2),
        "median_tpot_ms": round(result["median_tpot_ms"], 2),
        "duration_s": round(result["duration"], 2),
        # By process, including the warm-up; only processes that used at least 1 % of a core.
        "cpu_s": {name: s for name, s in json.loads(cpu).items() if s >= 0.01 * result["duration"]},
    }


def _table(measured: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """Return medians over repeats, the spread of the throughput, and ratios to `vllm serve`."""
    lines = [
        "| concurrency | system | output tokens/s | spread | of vllm serve | TTFT ms | added ms |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for concurrency in measured[SYSTEMS[0]]:
        rates, ttfts_ms = {}, {}
        for system in SYSTEMS:
            runs = measured[system][concurrency]
            rates[system], spread = same_engine.median_and_spread(runs, "output_tokens_per_s")
            ttfts_ms[system], _ = same_engine.median_and_spread(runs, "median_ttft_ms")
            ratio = rates[system] / rates[SYSTEMS[0]]
            added_ms = ttfts_ms[system] - ttfts_ms[SYSTEMS[0]]
            lines.append(
                f"| {concurrency} | {system} | {rates[system]:.1f} | {spread} "
                f"| {ratio:.3f} | {ttfts_ms[system]:.1f} | {added_ms:+.1f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
