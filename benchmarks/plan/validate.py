"""What a plan would have said of runs that were made, against what they were: time and dollars, with the error.

    python benchmarks/plan/validate.py --bench runs/bench/first/report.json RUN [RUN ...]

A run is the folder of a `peagle generate` that was started once and ended by itself. Its tokens, engines and price are
taken as they were; its speed and start are predicted from the benchmark's cell of the same method and K, at the nearest
concurrency, by the closed form in `peagle.planning.options`.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peagle.economics.prices import Price
from peagle.planning.options import Machine, estimate
from peagle.planning.sweeps import read_sweep
from peagle.profiles.measurements import Cell
from peagle.tables import markdown


def cell_of(cells: list[Cell], method: str, k: int, concurrency: int) -> Cell:
    """The cell that a plan would have gone by."""
    own = [cell for cell in cells if (cell.method, cell.k) == (method, k)]
    if not own:
        raise SystemExit(f"the benchmark has no {method} K={k}")
    return min(own, key=lambda cell: abs(cell.concurrency - concurrency))


def compare(run: Path, cells: list[Cell]) -> list[str]:
    """Return a row: predicted and measured."""
    manifest, report = (json.loads((run / name).read_bytes()) for name in ("run.json", "report.json"))
    drafter, account = manifest["engine"]["drafter"], report["account"]
    method, k = (drafter["method"], drafter["num_speculative_tokens"]) if drafter else ("none", 0)
    cell = cell_of(cells, method, k, manifest["run"]["concurrency"])
    machine = _machine(account, report["run"]["num_engines"], cell)
    found = estimate(machine, 1, account["num_output_tokens"])
    assert found is not None, "nothing interrupts it"
    usd = account["usd"]["total"]
    return [
        run.name,
        f"{cell.method} K={cell.k}" if cell.k else cell.method,
        f"{manifest['run']['concurrency']} ({cell.concurrency})",
        f"{account['num_output_tokens']:,}",
        f"{account['wall_s']:.1f}",
        _with_error(found.wall_s, account["wall_s"], ".1f"),
        f"{usd:.5f}",
        _with_error(found.usd, usd, ".5f"),
        _with_error(cell.output_tokens_per_s, account["output_tokens_per_s"], ".1f"),
        _with_error(cell.start_s or 0.0, _start_s(account), ".1f"),
    ]


def _machine(account: Mapping[str, Any], num_engines: int, cell: Cell) -> Machine:
    """All engines of the run as one machine, which has their devices and no other."""
    price = {name: value for name, value in account["price"].items() if name != "usd_per_device_s"}
    devices = round(account["device_s"]["busy"] / account["busy_s"])
    usd_per_hour = account["price"]["usd_per_device_s"] * 3600 * devices * num_engines
    price |= {"num_devices": devices * num_engines, "usd_per_hour": usd_per_hour}
    return Machine(
        price=Price.from_dict(price),
        num_engines=num_engines,
        devices_per_engine=devices,
        tokens_per_s=cell.output_tokens_per_s,
        start_s=cell.start_s or 0.0,
    )


def _start_s(account: Mapping[str, Any]) -> float:
    devices = account["device_s"]["busy"] / account["busy_s"]
    return float((account["device_s"]["load"] + account["device_s"]["compile"]) / devices / account["num_sessions"])


def _with_error(predicted: float, measured: float, form: str) -> str:
    return f"{predicted:{form}} ({predicted / measured - 1:+.0%})"


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, required=True)
    parser.add_argument("runs", type=Path, nargs="+")
    args = parser.parse_args()
    cells = read_sweep(args.bench).cells
    head = [
        "run", "method", "at once (measured at)", "tokens", "wall s", "predicted", "dollars", "predicted",
        "tokens/s busy, benchmark's", "start s, benchmark's",
    ]  # fmt: skip
    print("\n".join(markdown([head, *(compare(run, cells) for run in args.runs)])))  # noqa: T201


if __name__ == "__main__":
    main()
