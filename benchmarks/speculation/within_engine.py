"""Compare ways to verify drafts within one engine, on a machine with a varying speed.

    python -m benchmarks.speculation.within_engine peagle:5 --ways auto,nothing,3 --dataset humaneval --concurrency 8 \
        --prompts 128 --output FILE.json

The engine changes the way every 24 steps, so all ways see the same speed of the machine and the same requests. Ways:

- auto: the drafts that pay, as with `--verify auto`; only these steps count for its exploration and its learning
- nothing: no draft; the drafter's time does not count, as in an engine without a drafter
- K: K drafts of each request are drafted and verified, without choosing

Only decoding at exactly this concurrency counts: no steps with prompts, and no ends of a pass, where fewer requests
run. If `auto` pauses the drafter, the ways no longer differ; such steps count as "paused". Without "auto", the drafter
never pauses. Ratios compare the first way with each other one, with a 95 % interval: bootstrap over cycles of all ways.
In every way, the worker computes the probabilities of drafts, which an engine with `--verify all` does not.
"""

import argparse
import asyncio
import json
import os
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speculation.in_turns import command, start
from peagle.bench.engine import run_pass
from peagle.engine import vllm_drafts
from peagle.engine.verification import DraftBudget
from peagle.files import write_json
from peagle.hardware import detect_machine
from peagle.provenance import versions
from peagle.quiet import QuietStderr

_BLOCK_STEPS = 24
_NUM_FIRST_STEPS = 60  # of a cold engine
_AUTO, _NOTHING, _PAUSED = "auto", "nothing", "paused"
_WAYS, _LOG = "WITHIN_ENGINE_WAYS", "WITHIN_ENGINE_LOG"  # environment variables of the engine core


@dataclass(frozen=True)
class Step:
    """A decoding step.

    Attributes:
        tokens: accepted drafts, and one token for each request.
        seconds: from its start to the start of the next step, without what does not count for its way.
        drafter_s: seconds for drafting and choosing.
    """

    block: int
    way: str
    num_requests: int
    num_verified: int
    tokens: int
    seconds: float
    drafter_s: float
    num_prompt_tokens: int


class AlternatingDrafts(vllm_drafts.SchedulerDrafts):
    """Runs in the engine core."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ways, self.log = os.environ[_WAYS].split(","), Path(os.environ[_LOG])
        self._ended_way = self._way = self._next_way = _AUTO
        self._num_accepted = 0

    def start_step(self, scheduler: Any, scheduled: Any) -> None:
        self._write_ended_step(time.perf_counter() - self._started_s)
        self._ended_way, self._way, self._next_way = self._way, self._next_way, self._way_of(self._num_steps + 2)
        self._num_accepted = 0
        super().start_step(scheduler, scheduled)
        if self._next_way.isdigit() and scheduled.num_spec_tokens_to_schedule and self._step:
            scheduled.num_spec_tokens_to_schedule = int(self._next_way)
            self._step = replace(self._step, depth=int(self._next_way))

    def _way_of(self, step_number: int) -> str:
        if step_number <= _NUM_FIRST_STEPS or (self._is_trial() and _AUTO in self.ways):
            return _AUTO
        return self.ways[step_number // _BLOCK_STEPS % len(self.ways)]

    def _explores(self, step_number: int) -> str:
        if self._way_of(step_number) != _AUTO:
            return ""
        if step_number > _NUM_FIRST_STEPS and not self._is_trial():  # the number among auto's steps
            block, index = divmod(step_number, _BLOCK_STEPS)
            step_number = block // len(self.ways) * _BLOCK_STEPS + index
        return super()._explores(step_number)

    def _write_ended_step(self, step_s: float) -> None:
        # The last step of a block drafts for the next block's way.
        if self._step is None or self._num_steps <= _NUM_FIRST_STEPS or self._way != self._next_way:
            return
        is_paused = self._step.depth == self._step.num_verified == 0
        step = Step(
            block=self._num_steps // _BLOCK_STEPS,
            way=_PAUSED if is_paused else self._way,
            num_requests=self._step.num_requests,
            num_verified=self._step.num_verified,
            tokens=self._step.num_requests + self._num_accepted,
            seconds=step_s - (self._drafter_s if self._way == _NOTHING else 0.0),
            drafter_s=self._drafter_s,
            num_prompt_tokens=self._num_prompt_tokens,
        )
        with self.log.open("a") as file:
            file.write(json.dumps(asdict(step)) + "\n")

    def _choose(self, budget: DraftBudget, decoding: Any, running: list[Any], drafted: Any) -> None:
        if self._next_way.isdigit():
            confidence = getattr(drafted, "peagle_confidence", None)
            self._num_steps += 1
            self._drafter_s = confidence.drafter_s if confidence else 0.0
        else:
            super()._choose(budget, decoding, running, drafted)
        for index, _, drafts in decoding:
            if self._next_way == _NOTHING or drafts.has_gap:
                drafted.draft_token_ids[index] = []

    def _learn(self, budget: DraftBudget, step_s: float) -> None:
        if self._ended_way != _AUTO:
            self._step = None
        super()._learn(budget, step_s)

    def observe(self, request: Any, num_drafts: int, num_accepted: int) -> None:
        self._num_accepted += num_accepted
        if self._way != _AUTO:
            vllm_drafts._drafts_of(request).log_odds = None  # only counted, not learned from
        super().observe(request, num_drafts, num_accepted)


class UnpausedBudget(DraftBudget):
    def drafting_pays(self, num_requests: int, now_s: float) -> bool:
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", help="METHOD:K")
    parser.add_argument("--ways", required=True)
    parser.add_argument("--dataset", default="humaneval")
    parser.add_argument("--limit", type=int, default=96)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    log = options.output.with_suffix(".jsonl").resolve()
    log.unlink(missing_ok=True)
    os.environ[_WAYS], os.environ[_LOG] = options.ways, str(log)
    with QuietStderr() as quiet:
        quiet.move_to(options.output.with_suffix(".log"))
        engines, prompts = start(argparse.Namespace(**vars(options), engines=[f"{options.engine}:auto"]))
        (engine,) = engines.values()
        try:
            asyncio.run(
                run_pass(
                    engine,
                    list(islice(cycle(prompts), options.prompts)),
                    sampling={"temperature": 0.0, "max_tokens": options.max_tokens},
                    concurrency=options.concurrency,
                    progress=lambda done, total: None,
                    num_warm_up=0,
                )
            )
        finally:
            engine.shutdown()
    steps = [Step(**json.loads(line)) for line in log.read_text().splitlines()]
    log.unlink()
    result = summary(steps, options.concurrency, options.ways.split(","))
    about = {"command": command(options), "hardware": detect_machine().describe(), "versions": versions()}
    write_json(options.output, about | result)
    print(json.dumps({name: value for name, value in result.items() if name != "cycles"}, indent=1))  # noqa: T201


def summary(steps: list[Step], concurrency: int, ways: list[str]) -> dict[str, Any]:
    decoding = [step for step in steps if step.num_requests == concurrency and not step.num_prompt_tokens]
    # By way and cycle: tokens and seconds.
    cycles: defaultdict[str, dict[int, list[float]]] = defaultdict(dict)
    for step in decoding:
        total = cycles[step.way].setdefault(step.block // len(ways), [0, 0.0])
        total[0] += step.tokens
        total[1] += step.seconds
    by_way = {}
    for way in {step.way for step in decoding}:
        members = [step for step in decoding if step.way == way]
        by_way[way] = {
            "num_steps": len(members),
            "step_ms": 1e3 * float(np.mean([step.seconds for step in members])),
            "drafter_ms": 1e3 * float(np.mean([step.drafter_s for step in members])),
            "num_verified": float(np.mean([step.num_verified for step in members])),
            "num_accepted": float(np.mean([step.tokens - step.num_requests for step in members])),
            "tokens_per_s": sum(step.tokens for step in members) / sum(step.seconds for step in members),
        }
    decoding_s = float(np.mean([step.drafter_s for step in decoding if step.way != _PAUSED]))
    prompts_s = sum(max(0.0, step.drafter_s - decoding_s) for step in steps if step.num_prompt_tokens)
    return {
        "ways": by_way,
        "ratios": {
            way: ratio(cycles[ways[0]], cycles[way]) for way in ways[1:] if cycles[ways[0]].keys() & cycles[way]
        },
        "prompt_drafter_share": prompts_s / sum(step.seconds for step in steps),
        "cycles": cycles,
    }


def ratio(cycles: dict[int, list[float]], other: dict[int, list[float]]) -> dict[str, Any]:
    """Return the ratio of the tokens/s in cycles that have both ways, and its 95 % interval."""
    both = sorted(cycles.keys() & other.keys())
    values = np.array([cycles[cycle] + other[cycle] for cycle in both])
    sums = values[np.random.default_rng(0).integers(len(values), size=(4000, len(values)))].sum(axis=1)
    samples = sums[:, 0] / sums[:, 1] * sums[:, 3] / sums[:, 2]
    tokens, seconds, other_tokens, other_seconds = values.sum(axis=0)
    return {
        "ratio": tokens / seconds * other_seconds / other_tokens,
        "interval": [float(value) for value in np.quantile(samples, [0.025, 0.975])],
        "num_cycles": len(values),
    }


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # the engine core, which vLLM spawns
    vllm_drafts.SchedulerDrafts = AlternatingDrafts
    if _AUTO not in os.environ[_WAYS].split(","):
        vllm_drafts.DraftBudget = UnpausedBudget
