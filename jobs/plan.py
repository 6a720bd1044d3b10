"""`peagle plan`: machines, hours and dollars for a number of tokens.

The figures come from measurements.
"""

import argparse
from typing import Any

from jobs import flags
from peagle.planning.config import PlanConfig

HELP = """\
Show which machines, how many, which drafter and K, how long and for how much, on demand and spot, from measured speeds
and a price table, and how that changes with the acceptance length.

  peagle plan --measured runs/bench/first/report.json --tokens 2B --within 24h
  peagle plan --measured report.json --tokens 500M --within 8h --market spot --spot-interruptions-per-h 0.1
  peagle plan --measured report.json --tokens-per-s 20000 --max-tpot-ms 40
  peagle plan --measured qwen3-coder-30b-a3b-instruct --start-s 300 --tokens 2B      speeds that others published

Nothing is started. docs/planning.md has the arithmetic and the form for measurements of others;
benchmarks/plan/README.md compares plans with runs.
"""
_GROUPS = {
    "goal": ["tokens", "within", "tokens_per_s", "max_tpot_ms", "max_ttft_ms", "max_machines"],
    "measurements": ["measured", "start_s", "lost_s"],
    "money": ["instance_types", "market", "provider", "region", "prices"],
    "assumptions": [
        "target_utilisation",
        "spot_interruptions_per_h",
        "failures_per_h",
        "provision_s",
        "replace_s",
    ],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `peagle plan`."""
    flags.add_flags(parser, PlanConfig, _GROUPS)


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Plan, and print the tables."""
    config = flags.load(PlanConfig, args)
    from peagle.planning.plan import make_plan
    from peagle.planning.text import text_plan

    plan = make_plan(config)
    print(text_plan(plan))
    return 0, plan
