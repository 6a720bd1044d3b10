"""Compute the regret of a profile: how much slower or more expensive its choice is than the best configuration.

    python benchmarks/plan/regret.py --profile runs/tune/first/profile.yaml --bench runs/bench/regret/report.json

`peagle bench` measures all configurations again, including the one that `peagle tune` chose. The regret is 1 - (value
of the choice) / (best value), for the objective of the profile, among the cells within its limits. Token slots are part
of a configuration. A benchmark sizes them like `--max-num-batched-tokens auto` of `peagle tune`, if both have the same
largest concurrency. A benchmark has one precision and one --max-num-batched-tokens. So make a benchmark for each value
that was tuned over, and repeat --bench.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peagle.profiles.measurements import Cell
from peagle.profiles.profile import Profile, read_profile
from peagle.tables import markdown

_VALUES = {"tokens-per-dollar": "tokens_per_usd", "throughput": "output_tokens_per_s"}


def main() -> None:
    """Print all cells, best first, and the regret."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--bench", type=Path, required=True, action="append")
    args = parser.parse_args()
    profile = read_profile(args.profile)
    value = _VALUES[profile.objective["objective"]]
    cells = [cell for path in args.bench for cell in _cells(path, profile, value)]
    cells.sort(key=lambda cell: cell[value], reverse=True)
    chosen_cells = [cell for cell in cells if _is_chosen(cell, profile)]
    if not chosen_cells:
        raise SystemExit(
            f"no benchmark has the chosen configuration (--precision {profile.chosen.precision} "
            f"--max-num-batched-tokens {profile.chosen.max_num_batched_tokens}) within the limits: {profile.decision}"
        )
    rows = [["method", "K", "concurrency", "token slots", value, "of the best", "choice"]]
    for cell in cells:
        share = f"{cell[value] / cells[0][value]:.1%}"
        mark = "x" if _is_chosen(cell, profile) else ""
        names = (cell["method"], str(cell["k"] or "-"), str(cell["concurrency"]), str(cell["max_num_batched_tokens"]))
        rows.append([*names, f"{cell[value]:,.1f}", share, mark])
    print("\n".join(markdown(rows)))  # noqa: T201
    print(f"\nregret: {1 - chosen_cells[0][value] / cells[0][value]:.1%}")  # noqa: T201


def _cells(path: Path, profile: Profile, value: str) -> list[Mapping[str, Any]]:
    """Return the cells within the limits, with the precision and token slots of their engines."""
    limits = {name: profile.objective[name] for name in ("max_tpot_ms", "max_ttft_ms")}
    report = json.loads(path.read_bytes())
    if any("max_num_batched_tokens" not in setup for setup in report["setups"]):
        raise SystemExit(
            f"{path} has no token slots: run the same `peagle bench` again to add them, without new measurements"
        )
    if any(cell.get(value) is None for cell in report["cells"]):
        raise SystemExit(
            f"{path} has no price, hence no {value}: run the same `peagle bench` again with --usd-per-hour to add it, "
            "without new measurements"
        )
    slots = {(setup["method"], setup["k"]): setup["max_num_batched_tokens"] for setup in report["setups"]}
    precision = report["configuration"]["precision"]
    return [
        cell | {"precision": precision, "max_num_batched_tokens": slots[cell["method"], cell["k"]]}
        for cell in report["cells"]
        if Cell(**cell).is_within(**limits)
    ]


def _is_chosen(cell: Mapping[str, Any], profile: Profile) -> bool:
    chosen = profile.chosen
    names = ("method", "k", "concurrency", "precision", "max_num_batched_tokens")
    return all(cell[name] == getattr(chosen, name) for name in names)


if __name__ == "__main__":
    main()
