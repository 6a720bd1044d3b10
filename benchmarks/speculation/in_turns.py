"""Compare engines on a machine with a varying speed: they stay loaded, and take turns of a few seconds.

    python -m benchmarks.speculation.in_turns --dataset humaneval --concurrency 8 --rounds 8 --output FILE.json \
        none peagle:5:auto peagle:3:all eagle3:5:auto

In each round, every engine gets the same prompts, in an order that rotates. The ratio of an engine to the first one is
the geometric mean over rounds, with a 95 % interval (Student's t of the logarithms). So changes of the machine's speed
that are slower than a round cancel out. Run it again with the same options and output to add rounds.
"""

import argparse
import asyncio
import json
import math
import statistics
from collections import defaultdict
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from peagle.bench.config import BenchConfig
from peagle.bench.engine import run_pass
from peagle.bench.plan import make_plan
from peagle.bench.prompts import BenchPrompt, build_dataset, read_dataset
from peagle.catalog.int8 import converted_spec
from peagle.catalog.local import fetched_spec
from peagle.catalog.targets import fetched_model, resolve_model
from peagle.engine.vllm import VllmEngine, start_engine
from peagle.files import write_json
from peagle.hardware import detect_machine
from peagle.profiles.measurements import NONE
from peagle.provenance import versions
from peagle.quiet import QuietStderr
from peagle.requests.tokenizer import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", help="none, or METHOD:K:VERIFY; the first one is the baseline")
    parser.add_argument("--dataset", default="humaneval")
    parser.add_argument("--limit", type=int, default=96)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--requests-per-slot", type=int, default=2, help="prompts of a turn: N x concurrency")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    rounds = earlier_rounds(options)
    log = options.output.with_suffix(".log")
    with QuietStderr() as quiet:
        quiet.move_to(log)
        engines, prompts = start(options)
        asyncio.run(take_turns(options, engines, prompts, rounds))


def start(options: argparse.Namespace) -> tuple[dict[str, VllmEngine], list[BenchPrompt]]:
    hardware = detect_machine()
    engines: dict[str, VllmEngine] = {}
    for name in options.engines:
        method, k, verify = name.split(":") if name != NONE else (NONE, "1", "all")
        config = BenchConfig(
            methods=[method],
            num_speculative_tokens=[int(k)],
            verify=verify,
            dataset=options.dataset,
            limit=options.limit,
            concurrency=[options.concurrency],
            max_tokens=options.max_tokens,
            max_model_len=1024,
            kv_cache_gib=1.0,
            enforce_eager=not options.compile,
        )
        model = fetched_model(resolve_model(config.model, announce=print), print)
        spec = make_plan(config, hardware, model).setups[0].spec
        engines[name] = start_engine(converted_spec(fetched_spec(spec)), hardware)
        print(f"{name} runs", flush=True)  # noqa: T201
    tokenizer = load_tokenizer(model.path, model.revision)
    return engines, build_dataset(config, read_dataset(config), tokenizer, 1024).prompts


def earlier_rounds(options: argparse.Namespace) -> list[dict[str, float]]:
    if not options.output.exists():
        return []
    earlier = json.loads(options.output.read_text())
    if earlier["command"] | {"rounds": None} != command(options) | {"rounds": None}:
        raise SystemExit(f"{options.output} was measured with other options: {earlier['command']}")
    rounds: list[dict[str, float]] = earlier["rounds"]
    return rounds


async def take_turns(
    options: argparse.Namespace,
    engines: dict[str, VllmEngine],
    prompts: list[BenchPrompt],
    rounds: list[dict[str, float]],
) -> None:
    num_prompts = options.requests_per_slot * options.concurrency
    first = len(rounds)
    try:
        for number in range(first - 1, first + options.rounds):  # the round before the first one is a warm-up
            start_at = max(number, 0) * num_prompts % len(prompts)
            chosen = list(islice(cycle(prompts), start_at, start_at + num_prompts))
            names = list(engines)
            rotation = number % len(names)
            tokens_per_s = {}
            for name in names[rotation:] + names[:rotation]:
                result = await run_pass(
                    engines[name],
                    chosen,
                    sampling={"temperature": 0.0, "max_tokens": options.max_tokens},
                    concurrency=options.concurrency,
                    progress=lambda done, total: None,
                    num_warm_up=0,
                )
                num_tokens = sum(answer.generation.num_output_tokens for answer in result.answers if answer)
                tokens_per_s[name] = num_tokens / result.wall_s
            print(number, {name: round(speed, 1) for name, speed in tokens_per_s.items()}, flush=True)  # noqa: T201
            if number >= first:
                rounds.append(tokens_per_s)
                write_json(options.output, summary(options, rounds))
    finally:
        for engine in engines.values():
            engine.shutdown()
    print(json.dumps(summary(options, rounds)["engines"], indent=1))  # noqa: T201


def summary(options: argparse.Namespace, rounds: list[dict[str, float]]) -> dict[str, Any]:
    speeds: defaultdict[str, list[float]] = defaultdict(list)
    for tokens_per_s in rounds:
        for name, speed in tokens_per_s.items():
            speeds[name].append(speed)
    baseline = next(iter(speeds))
    return {
        "command": command(options),
        "hardware": detect_machine().describe(),
        "versions": versions(),
        "engines": {
            name: {"tokens_per_s": statistics.median(values), **ratio(values, speeds[baseline])}
            for name, values in speeds.items()
        },
        "rounds": rounds,
    }


def command(options: argparse.Namespace) -> dict[str, str]:
    return {name: str(value) for name, value in vars(options).items()}


def ratio(values: list[float], baseline: list[float]) -> dict[str, Any]:
    """Return the geometric mean of the ratios, and its 95 % interval."""
    logs = [math.log(value / other) for value, other in zip(values, baseline, strict=True)]
    mean = statistics.mean(logs)
    if len(logs) < 2:
        return {"ratio": math.exp(mean)}
    freedom = len(logs) - 1
    quantile = 1.96 + 2.37 / freedom + 2.82 / freedom**2  # Student's t at 0.975, by its expansion around the normal's
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return {"ratio": math.exp(mean), "interval": [math.exp(mean - half), math.exp(mean + half)]}


if __name__ == "__main__":
    main()
