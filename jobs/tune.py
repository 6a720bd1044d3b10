"""`peagle tune`: find the best method, K, concurrency, tokens per step and precision for a target on this hardware."""

import argparse
import sys
from typing import Any

from jobs import flags
from jobs.output import listener, say
from peagle.economics.price_options import PRICE_OPTIONS
from peagle.engine.keys import TARGET_ENGINE_OPTIONS
from peagle.requests.prompts import PromptOptions
from peagle.tuning.config import TuneConfig

HELP = """\
Find the configuration with the most tokens per dollar, or with the highest throughput within latency limits.
Each candidate is measured once within a budget of engine time, and the best are measured again. Ray is not needed.

  peagle tune --dataset mine.jsonl --time-budget-s 1800
  peagle tune --objective throughput --max-tpot-ms 40 --max-num-seqs 1,2,4,8 --dataset mine.jsonl --time-budget-s 1200
  peagle tune --methods none,peagle,eagle3 --drafter eagle3=heads/eagle3/head --verify all -k 3,5,7
  peagle generate --profile runs/tune/.../profile.yaml --input prompts.jsonl --output runs/first

The result is a profile for `peagle generate` and `peagle serve`; the best choice may be no speculation. OUTPUT contains
the finished passes. Run the same command again to continue; you may raise the budget, change the limits or add methods.
Ctrl-C and SIGTERM shut the engine down.
"""
_GROUPS = {
    "goal": ["objective", "max_tpot_ms", "max_ttft_ms", "time_budget_s", "profile_output"],
    "candidates": [
        "methods", "drafter", "num_speculative_tokens", "max_num_seqs", "max_num_batched_tokens", "precision",
    ],
    "model": ["model", "kv_cache_precision"],
    "data": ["dataset", "limit", "requests_per_slot", "output"],
    "prompts": list(PromptOptions.model_fields),
    "sampling": ["temperature", "max_tokens"],
    "engines": list(TARGET_ENGINE_OPTIONS),
    "money": list(PRICE_OPTIONS),
}  # fmt: skip
COMMON = (
    "model", "objective", "time_budget_s", "methods", "drafter", "num_speculative_tokens", "max_num_seqs",
    "precision", "dataset", "output", "config",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_flags(parser, TuneConfig, _GROUPS, short={"num_speculative_tokens": "-k"})


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    config = flags.load(TuneConfig, args)
    from peagle.tuning.run import text_table, tune

    profile, path = tune(config, listener())
    say(f"\n{text_table(profile)}\n\nprofile: {path}")
    return 0, profile.model_dump(mode="json")


if __name__ == "__main__":
    from jobs.cli import main

    main(["tune", *sys.argv[1:]])
