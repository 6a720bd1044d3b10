"""The choice of `peagle tune` against every other configuration, measured anew by `peagle bench`: the regret.

    python benchmarks/plan/regret.py --profile runs/tune/first/profile.yaml --bench runs/bench/regret/report.json

Regret is what the choice falls short of the best, in the objective's own figure, among the cells within the profile's
limits. An engine with other token slots is another configuration; a benchmark sizes them as tune's auto does, where
both have the same largest number of requests at once. A benchmark has one precision and one --max-num-batched-tokens;
make one for each that was tuned over, and give --bench again.
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
    own = [cell for cell in cells if _is_chosen(cell, profile)]
    if not own:
        raise SystemExit(
            f"no benchmark has the choice, with --precision {profile.chosen.precision} and --max-num-batched-tokens "
            f"{profile.chosen.max_num_batched_tokens}, or it is beyond the limits: {profile.decision}"
        )
    rows = [["method", "K", "at once", "token slots", value, "of the best", "choice"]]
    for cell in cells:
        share = f"{cell[value] / cells[0][value]:.1%}"
        mark = "x" if _is_chosen(cell, profile) else ""
        names = (cell["method"], str(cell["k"] or "-"), str(cell["concurrency"]), str(cell["max_num_batched_tokens"]))
        rows.append([*names, f"{cell[value]:,.1f}", share, mark])
    print("\n".join(markdown(rows)))  # noqa: T201
    print(f"\nregret: {1 - own[0][value] / cells[0][value]:.1%}")  # noqa: T201


def _cells(path: Path, profile: Profile, value: str) -> list[Mapping[str, Any]]:
    """The cells within the limits, with what tells their engines apart."""
    limits = {name: profile.objective[name] for name in ("max_tpot_ms", "max_ttft_ms")}
    report = json.loads(path.read_bytes())
    if any("max_num_batched_tokens" not in setup for setup in report["setups"]):
        raise SystemExit(f"{path} does not state token slots: the same `peagle bench` adds them, and measures nothing")
    if any(cell.get(value) is None for cell in report["cells"]):
        raise SystemExit(
            f"{path} has no price, hence no {value}: the same `peagle bench` with --usd-per-hour adds it, and measures "
            "nothing"
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
