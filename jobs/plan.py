"""`peagle plan`: machines, hours and dollars for a number of tokens."""

import argparse
from typing import Any

from jobs import flags
from peagle.planning.config import PlanConfig

HELP = """\
Find the cheapest machines, drafter and K for a job or a service, on demand and spot, from measured speeds and a price
table. The result shows time, cost, and the effect of the acceptance length.

  peagle plan --model qwen3-coder-30b-a3b-instruct --tokens 2B --within 24h        from published speeds
  peagle plan --measured runs/bench/first/report.json --tokens 2B --within 24h     from your own
  peagle plan --measured report.json --tokens 500M --within 8h --market spot --spot-interruptions-per-h 0.1
  peagle plan --measured report.json --tokens-per-s 20000 --max-tpot-ms 40

No engine is started. See docs/planning.md for the formulas and the format of external measurements, and
benchmarks/plan/README.md for plans compared with runs.
"""
_GROUPS = {
    "goal": ["tokens", "within", "tokens_per_s", "max_tpot_ms", "max_ttft_ms", "max_machines"],
    "measurements": ["model", "measured", "start_s", "lost_s"],
    "money": ["instance_types", "market", "provider", "region", "prices"],
    "assumptions": [
        "target_utilisation",
        "spot_interruptions_per_h",
        "failures_per_h",
        "provision_s",
        "replace_s",
    ],
}
COMMON = (
    "model",
    "measured",
    "tokens",
    "within",
    "tokens_per_s",
    "max_tpot_ms",
    "market",
    "instance_types",
    "prices",
    "config",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_flags(parser, PlanConfig, _GROUPS)


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    config = flags.load(PlanConfig, args)
    from peagle.planning.plan import make_plan, text_plan

    plan = make_plan(config)
    print(text_plan(plan))
    return 0, plan
