"""Fleets from 1 to 1,000 engines, simulated: throughput and waste by scale, as a table and a plot.

    python benchmarks/plan/scale.py [--seeds 5] [--output benchmarks/plan/2026-11-21-scale-simulated]

SIMULATED: the events are those of `peagle/planning/simulation.py`, seeded; no engine runs. An engine has an hour of
work (weak scaling) or its share of 64 engine-hours (strong scaling), in units of a minute. Machines hold one engine,
from 64 engines on eight. Assumed: 100 s to start an engine, 180 s until the first machine is there and 20 more a minute
after it, 300 s to replace one, 120 s of notice, rates of failure and interruption, and the driver's time for a unit.

    useful    share of the paid engine time that became committed units; median over the seeds
    speedup   work done a second of the whole run, over that of one engine at work without a start
    gone      machines that failed or were taken away, mean
"""

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

from peagle.charts import Axes, Curve, line_chart, standalone
from peagle.planning.simulation import Fleet, Simulated, simulate

ENGINES = (1, 4, 16, 64, 256, 1000)
UNIT_S, START_S = 60.0, 100.0
WEAK_S, STRONG_S = 3600.0, 64 * 3600.0
QUIET = Fleet(
    num_machines=1, engines_per_machine=1, num_units=60, unit_s=UNIT_S, start_s=START_S, provision_s=180,
    machines_per_min=20, replace_s=300, notice_s=120,
)  # fmt: skip
CASES = {
    "no faults": {},
    "a failure a machine every 1,000 h": {"failures_per_h": 0.001},
    "spot, 5 % an hour": {"interruptions_per_h": 0.05},
    "spot, 20 % an hour": {"interruptions_per_h": 0.2},
    "spot, 20 % an hour, no notice": {"interruptions_per_h": 0.2, "notice_s": 0.0},
    "driver 50 ms a unit": {"driver_s": 0.05},
}
_AXES = Axes(
    name="Useful share of paid engine time by number of engines",
    x_name="engines",
    y_name="useful, % of paid engine time",
    x_prefix="",
    decimals=0,
    is_even=True,
)


def fleet(num_engines: int, work_s: float, **changes: float) -> Fleet:
    """So many engines with so much work in all."""
    per_machine = 8 if num_engines >= 64 else 1
    units = max(1, round(work_s / UNIT_S))
    sized = replace(QUIET, num_machines=num_engines // per_machine, engines_per_machine=per_machine, num_units=units)
    return replace(sized, **changes)


def rows(work_of: dict[int, float], seeds: int) -> tuple[list[str], list[Curve]]:
    """A table line for each case and number of engines, and a curve a case."""
    lines, curves = [], []
    for case, changes in CASES.items():
        points = []
        for num_engines in ENGINES:
            one = fleet(num_engines, work_of[num_engines], **changes)
            runs = [simulate(one, seed) for seed in range(seeds)]
            useful = statistics.median(run.useful_share for run in runs)
            points.append((num_engines, 100 * useful))
            lines.append(f"| {case} | {num_engines:,} | {' | '.join(_figures(runs, one, useful))} |")
        curves.append((case, points))
    return lines, curves


def _figures(runs: list[Simulated], one: Fleet, useful: float) -> list[str]:
    wall_s = statistics.median(run.wall_s for run in runs)
    total = statistics.median(run.engine_s.total for run in runs)
    shares = [
        statistics.median(getattr(run.engine_s, name) for run in runs) / total for name in ("load", "idle", "lost")
    ]
    gone = statistics.mean(run.num_gone for run in runs)
    speedup = one.num_units * one.unit_s / wall_s
    return [
        f"{wall_s / 60:,.1f}",
        f"{speedup:,.1f}",
        f"{useful:.1%}",
        *(f"{share:.1%}" for share in shares),
        f"{gone:,.1f}",
    ]


def main() -> None:
    """Print the tables, and write them with the plot where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="file name without suffix, for .md and .svg")
    args = parser.parse_args()
    weak, curves = rows({n: n * WEAK_S for n in ENGINES}, args.seeds)
    strong, _ = rows(dict.fromkeys(ENGINES, STRONG_S), args.seeds)
    head = "| case | engines | wall min | speedup | useful | load | idle | lost | gone |\n|" + " --- |" * 9
    page = (
        f"## An hour of work an engine\n\n{head}\n" + "\n".join(weak) + "\n\n"
        f"## 64 engine-hours of work in all\n\n{head}\n" + "\n".join(strong) + "\n"
    )
    print(page)  # noqa: T201
    if args.output:
        args.output.with_suffix(".md").write_text(
            f"# 1 to 1,000 engines, SIMULATED\n\nDate: {time.strftime('%Y-%m-%d')}. "
            f"`python benchmarks/plan/scale.py --seeds {args.seeds} --output "
            f"{args.output}`; its head says what is simulated and what is assumed.\n\n{page}"
        )
        legend = [label for label, _ in curves]
        heading = "SIMULATED: useful share, an hour of work an engine"
        args.output.with_suffix(".svg").write_text(standalone(line_chart(curves, _AXES), heading, legend))


if __name__ == "__main__":
    main()
