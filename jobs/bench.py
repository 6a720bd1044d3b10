"""`peagle bench`: compare methods of speculation, K and concurrency in vLLM."""

import argparse
import sys
from typing import Any

from jobs import flags
from jobs.output import listener, say
from peagle.bench.config import BenchConfig
from peagle.economics.price_options import PRICE_OPTIONS
from peagle.engine.keys import TARGET_ENGINE_OPTIONS
from peagle.requests.prompts import PromptOptions

HELP = """\
Measure methods of speculation x K x concurrency with one model in vLLM: output tokens/s (with their spread, and per
user), acceptance, TTFT, TPOT, memory and tokens per dollar. Engines run one at a time; Ray is not needed.

  peagle bench
  peagle bench --methods none,eagle3,peagle,ngram --drafter eagle3=heads/eagle3/head -k 1,3,5,7,11 --concurrency 1,2,4,8
  peagle bench --dataset mine.jsonl --limit 64 --repeats 5 --rounds 5
  peagle bench --load-format dummy --synthetic-acceptance peagle=3.2 --synthetic-acceptance eagle3=2.9

After a warm-up, each pass sends all prompts to the engine at one concurrency. Each engine is started --rounds times;
its passes are divided over the rounds, and the order of engines is reversed from one round to the next. OUTPUT contains
report.json, report.md, two plots and the finished passes. Run the same command again to continue; you can add methods,
K, repeats, and concurrencies up to --max-num-seqs. An engine that fails is skipped, with exit code 1. After Ctrl-C or
SIGTERM, the report covers the passes that were finished.
"""
_GROUPS = {
    "comparison": [
        "methods", "drafter", "num_speculative_tokens", "concurrency", "repeats", "rounds", "time_budget_s",
    ],
    "model": ["model", "precision", "kv_cache_precision", "load_format", "synthetic_acceptance"],
    "data": ["dataset", "limit", "requests_per_slot", "output"],
    "prompts": list(PromptOptions.model_fields),
    "sampling": ["temperature", "max_tokens"],
    "engines": ["max_num_seqs", *TARGET_ENGINE_OPTIONS, "max_num_batched_tokens", "max_cudagraph_capture_size"],
    "money": list(PRICE_OPTIONS),
}  # fmt: skip
COMMON = (
    "model", "methods", "drafter", "num_speculative_tokens", "concurrency", "dataset", "limit", "repeats",
    "time_budget_s", "output", "config",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_flags(parser, BenchConfig, _GROUPS, short={"num_speculative_tokens": "-k"})


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    config = flags.load(BenchConfig, args)
    from peagle.bench.report import text_tables
    from peagle.bench.run import bench

    report, folder = bench(config, listener())
    say(f"\n{text_tables(report)}\n\nreport: {folder / 'report.md'}, with plots")
    if report["num_passes_left"]:
        say(f"{report['num_passes_left']} passes remain: run the same command to continue")
    if report["failed"]:
        say(f"{', '.join(report['failed'])} failed: run the same command to retry; see {folder / 'logs'}")
        return 1, report
    return (3 if report["num_passes_left"] else 0), report


if __name__ == "__main__":
    from jobs.cli import main

    main(["bench", *sys.argv[1:]])
