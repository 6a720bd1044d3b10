"""`make rehearsal`: rehearse the grid, with a process per card, and write the page."""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs.output import say
from peagle.catalog.cards import load_catalog
from tests.rehearsal.cards import CARDS, Card
from tests.rehearsal.table import page

_ROOT = Path(__file__).parents[2]
PAGE = _ROOT / "benchmarks" / "rehearsal.md"
DRAFTERS = ("none", "eagle3", "peagle", "dflash")
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def grid(card: Card, concurrency: Sequence[int]) -> list[dict[str, Any]]:
    """Return the cells of a card: every model, and 16-bit models also in INT8 if the card supports it.

    A cell's `options` are additional options of `peagle generate`.
    """
    models = [(model.name, {}) for model in load_catalog()]
    if card.hardware.supports_int8:
        in_16_bits = [model.name for model in load_catalog() if model.precision.native_quantization is None]
        models += [(name, {"precision": "int8"}) for name in in_16_bits]
    return [
        {"model": model, "drafter": drafter, "concurrency": number, "options": options}
        for model, options in models
        for drafter in DRAFTERS
        for number in concurrency
    ]


def rehearse_card(name: str, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rehearse some cells in a process that imitates eight cards of this name.

    Args:
        cells: cells as in `grid`. A cell with the key `queue` means the commands of the GPU queue.

    Returns:
        The cells with their `outcome`: accepted, refused, or failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        cells_file, results_file = Path(folder, "cells.json"), Path(folder, "results.json")
        cells_file.write_text(json.dumps(cells))
        path = os.pathsep.join((str(_ROOT), str(_ROOT / "tests")))
        environment = os.environ | {
            "HF_HUB_CACHE": str(Path(folder, "hub")),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": path,
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }
        command = [sys.executable, "-m", "tests.rehearsal.child", name, str(cells_file), str(results_file)]
        process = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True)
        if process.returncode or not results_file.exists():
            raise RuntimeError(f"the rehearsal on {name} failed:\n{process.stderr[-4000:]}")
        return list(json.loads(results_file.read_text()))


def main() -> None:
    """Rehearse, print the failures, and write the page if the whole grid was rehearsed."""
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal", description=__doc__)
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=list(CARDS))
    parser.add_argument("--concurrency", nargs="+", type=int, default=list(CONCURRENCIES))
    args = parser.parse_args()
    result: dict[str, list[dict[str, Any]]] = {}
    for name in args.cards:
        result[name] = rehearse_card(name, grid(CARDS[name], args.concurrency))
        counts = {outcome: sum(cell["outcome"] == outcome for cell in result[name]) for outcome in _OUTCOMES}
        say(f"{name}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    failed = [(name, cell) for name, cells in result.items() for cell in cells if cell["outcome"] == "failed"]
    for name, cell in failed:
        keys = ("model", "drafter", "concurrency", "options")
        say(f"FAILED {name} {' '.join(str(cell[key]) for key in keys)}: {cell['message']}")
    text = page(result, datetime.date.today())
    if args.cards == list(CARDS) and args.concurrency == list(CONCURRENCIES):
        PAGE.write_text(text)
        say(f"written: {PAGE.relative_to(_ROOT)}")
    else:
        say(text)
    sys.exit(1 if failed else 0)


_OUTCOMES = ("accepted", "refused", "failed")

if __name__ == "__main__":
    main()
