"""The process that imitates a card: `python -m tests.rehearsal.child CARD CELLS RESULTS`."""

import json
import os
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.rehearsal.cards import CARDS
from tests.rehearsal.imitated_card import imitate_card


def main(name: str, cells_file: Path, results_file: Path) -> None:
    """Rehearse the cells in CELLS, and write the results to RESULTS."""
    warnings.simplefilter("ignore")
    imitate_card(CARDS[name])
    from tests.rehearsal import queued, shapes
    from tests.rehearsal.cell import Accepted, rehearse

    hub = Path(os.environ["HF_HUB_CACHE"])
    heads_folder = hub.parent / "heads"
    shapes.write_all(hub, heads_folder)
    cells: list[dict[str, Any]] = []
    for cell in json.loads(cells_file.read_text()):
        if "queue" in cell:
            cells += queued.rehearse_queue(CARDS[name].hardware, hub.parent)
            continue
        drafter = cell["drafter"]
        unpublished_head = shapes.head_folder(heads_folder, cell["model"], drafter)
        try:
            options = cell.get("options", {})
            head = str(unpublished_head) if unpublished_head.exists() else drafter
            result = rehearse(cell["model"], head, cell["concurrency"], CARDS[name].hardware, **options)
        except Exception as error:  # vLLM raises errors of any type, and a failed cell is a result
            cells.append(cell | {"outcome": "failed", "message": f"{type(error).__name__}: {error}"[:2000]})
            continue
        outcome = "accepted" if isinstance(result, Accepted) else "refused"
        cells.append(cell | asdict(result) | {"outcome": outcome})
    results_file.write_text(json.dumps(cells))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
