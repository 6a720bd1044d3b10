"""`peagle evaluate`: measure drafters in vLLM."""

import argparse
import sys
from typing import Any

from jobs import flags
from jobs.output import listener, say
from peagle.bench.config import EvaluateConfig
from peagle.engine.keys import TARGET_ENGINE_OPTIONS
from peagle.requests.prompts import PromptOptions

HELP = """\
Measure drafters in vLLM: acceptance length by K, acceptance by position and by category, drafted and accepted tokens
per second. Engines run one at a time, one for each drafter and K; Ray is not needed.

  peagle evaluate --drafter heads/mine/head -k 3,5,7
  peagle evaluate --drafter heads/p-eagle/head --drafter heads/eagle3/head -k 7 --output runs/both
  peagle evaluate --dataset mine.jsonl --category-column task --temperature 0.8

OUTPUT contains report.json, report.md (for a model card), two plots and the finished measurements. Run the same command
again to continue; you can add drafters and K. An engine that fails is skipped, with exit code 1. After Ctrl-C or
SIGTERM, the report covers the measurements that were finished.
"""
_GROUPS = {
    "model": ["model", "drafter", "num_speculative_tokens", "precision", "kv_cache_precision"],
    "data": ["dataset", "category_column", "limit", "output"],
    "prompts": list(PromptOptions.model_fields),
    "sampling": ["temperature", "max_tokens"],
    "engines": ["concurrency", *TARGET_ENGINE_OPTIONS],
}
COMMON = (
    "model", "drafter", "num_speculative_tokens", "dataset", "category_column", "limit", "temperature", "concurrency",
    "output", "config",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_flags(parser, EvaluateConfig, _GROUPS, short={"num_speculative_tokens": "-k"})


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    config = flags.load(EvaluateConfig, args)
    from peagle.bench.acceptance import evaluate, text_report

    report, folder = evaluate(config, listener())
    say(f"\n{text_report(report)}\n\nreport: {folder / 'report.md'}, with plots")
    if report["failed"]:
        say(f"{', '.join(report['failed'])} failed: run the same command to retry; see {folder / 'logs'}")
    return (1 if report["failed"] else 0), report


if __name__ == "__main__":
    from jobs.cli import main

    main(["evaluate", *sys.argv[1:]])
