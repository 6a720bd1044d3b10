"""Compare the time and cost of finished runs with the predictions of a plan.

    python benchmarks/plan/validate.py --bench runs/bench/first/report.json RUN [RUN ...]

RUN is the output folder of a `peagle generate` that was started once and finished. The prediction uses the run's actual
tokens, engines and price. Its speed and start time are those of the benchmark's cell with the same method and K, at the
nearest concurrency. `peagle.planning.options` has the formula.
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
    """Return the cell that a plan would have used."""
    matching = [cell for cell in cells if (cell.method, cell.k) == (method, k)]
    if not matching:
        raise SystemExit(f"the benchmark has no {method} K={k}")
    return min(matching, key=lambda cell: abs(cell.concurrency - concurrency))


def compare(run: Path, cells: list[Cell]) -> list[str]:
    """Return a row of the table, with predicted and measured values."""
    manifest, report = (json.loads((run / name).read_bytes()) for name in ("run.json", "report.json"))
    drafter, account = manifest["engine"]["drafter"], report["account"]
    method, k = (drafter["method"], drafter["num_speculative_tokens"]) if drafter else ("none", 0)
    cell = cell_of(cells, method, k, manifest["run"]["concurrency"])
    machine = _machine(account, report["run"]["num_engines"], cell)
    prediction = estimate(machine, 1, account["num_output_tokens"])
    assert prediction is not None, "the machine has no interruptions"
    usd = account["usd"]["total"]
    return [
        run.name,
        f"{cell.method} K={cell.k}" if cell.k else cell.method,
        f"{manifest['run']['concurrency']} ({cell.concurrency})",
        f"{account['num_output_tokens']:,}",
        f"{account['wall_s']:.1f}",
        _with_error(prediction.wall_s, account["wall_s"], ".1f"),
        f"{usd:.5f}",
        _with_error(prediction.usd, usd, ".5f"),
        _with_error(cell.output_tokens_per_s, account["output_tokens_per_s"], ".1f"),
        _with_error(cell.start_s or 0.0, _start_s(account), ".1f"),
    ]


def _machine(account: Mapping[str, Any], num_engines: int, cell: Cell) -> Machine:
    """Return one machine with all engines of the run and exactly their devices."""
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
    header = [
        "run", "method", "concurrency (benchmark's)", "tokens", "wall s", "predicted", "dollars", "predicted",
        "tokens/s busy, predicted", "start s, predicted",
    ]  # fmt: skip
    print("\n".join(markdown([header, *(compare(run, cells) for run in args.runs)])))  # noqa: T201


if __name__ == "__main__":
    main()
