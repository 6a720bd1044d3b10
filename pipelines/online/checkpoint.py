"""What a ledger added up to when it had been read so far: a file beside it, from which the next process goes on.

    head      version, marks (how far each file was read, and by what that place is known again), spending, prices
    cells     a line each
    sha256    of all before it

It is written whole or not at all, and holds exactly the lines before its marks. So it stays true whatever is appended
meanwhile, and whichever of two processes writes it last. Whether the files are still those is for the reader to check.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from peagle.economics.usage import UnitUsage
from peagle.files import atomic_file
from peagle.speculation import SpeculationStats
from pipelines.online.sums import Cell, Sums
from pipelines.online.token_price import TokenPrice

_VERSION = 1
_log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What `Totals` has, and `RequestReader.marks`."""

    marks: Mapping[str, tuple[int, str]]
    cells: dict[Cell, Sums]
    spent_usd: Mapping[str, float]
    batches: set[str]
    prices: Mapping[str, TokenPrice]


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Replace the file.

    Raises:
        OSError: it cannot be written.
    """
    digest = hashlib.sha256()
    with atomic_file(path) as file:
        for line in _lines(checkpoint):
            digest.update(line)
            file.write(line)
        file.write(json.dumps({"sha256": digest.hexdigest()}).encode() + b"\n")


def read_checkpoint(path: Path) -> Checkpoint | None:
    """What the file says; None where there is none, or one that is damaged or of another version."""
    try:
        with path.open("rb") as file:
            return _read(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        _log.warning("%s: it cannot be used, and the whole ledger is read: %s", path, error)
        return None


def _lines(checkpoint: Checkpoint) -> Iterator[bytes]:
    head = {
        "version": _VERSION,
        "marks": checkpoint.marks,
        "spent_usd": checkpoint.spent_usd,
        "batches": sorted(checkpoint.batches),
        "prices": {model: astuple(price) for model, price in checkpoint.prices.items()},
    }
    yield json.dumps(head).encode() + b"\n"
    for cell, sums in checkpoint.cells.items():
        yield json.dumps(_row(cell, sums)).encode() + b"\n"


def _read(lines: Iterator[bytes]) -> Checkpoint:
    digest = hashlib.sha256()
    first = next(lines, b"")
    digest.update(first)
    head = json.loads(first)
    if head["version"] != _VERSION:
        raise ValueError(f"its version is {head['version']!r}")
    cells: dict[Cell, Sums] = {}
    for line in lines:
        row = json.loads(line)
        if isinstance(row, dict):
            if row["sha256"] != digest.hexdigest():
                raise ValueError("it is damaged")
            return Checkpoint(
                marks={name: (position, mark) for name, (position, mark) in head["marks"].items()},
                cells=cells,
                spent_usd=head["spent_usd"],
                batches=set(head["batches"]),
                prices={model: TokenPrice(*values) for model, values in head["prices"].items()},
            )
        digest.update(line)
        cell, sums = _from_row(row)
        cells[cell] = sums
    raise ValueError("it ends early")


def _row(cell: Cell, sums: Sums) -> list[Any]:
    usage = sums.usage
    speculation = usage.speculation
    return [
        [cell.minute, cell.session_id, cell.key, cell.model],
        [sums.num_requests, sums.num_cut, sums.usd, sums.request_s, sums.shares_s],
        [usage.num_rows, usage.num_failed_rows, usage.num_prompt_tokens, usage.num_cached_tokens],
        [usage.num_output_tokens, usage.busy_s, usage.started_at, usage.finished_at],
        [speculation.num_drafts, speculation.num_draft_tokens, *speculation.accepted_per_position],
    ]


def _from_row(row: list[Any]) -> tuple[Cell, Sums]:
    names, counts, rows, made, drafts = row
    cell = Cell(*names)
    usage = UnitUsage(
        session_id=cell.session_id,
        num_rows=rows[0],
        num_failed_rows=rows[1],
        num_prompt_tokens=rows[2],
        num_cached_tokens=rows[3],
        num_output_tokens=made[0],
        busy_s=made[1],
        started_at=made[2],
        finished_at=made[3],
        speculation=SpeculationStats(
            num_drafts=drafts[0], num_draft_tokens=drafts[1], accepted_per_position=tuple(drafts[2:])
        ),
    )
    return cell, Sums(usage, *counts)
