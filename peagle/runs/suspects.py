"""Rows that might have crashed an engine.

    OUT/suspects/unit-N.SESSION.json    the rows of unit N that engine process SESSION runs; deleted when N is committed

This file is the note of unit N. It is written before the rows enter the engine, so it exists no matter which process
is killed. The meaning of a note depends on what ended:

- The engine crashed and its actor noticed (`died`): the rows in the note were in the engine. They are suspects, and
  each is retried alone. A row that was alone at two crashes is poisoned; a single crash might be coincidence.
- The actor itself is gone (`died` is false, and another engine process finds the note): perhaps the node was lost.
  The first time, the unit is simply run again; from the second time on, all its rows are suspects. If a row was alone
  in the engine, this counts as a crash of that row, and other units, which were waiting for that row, are not blamed.
- The driver was killed: this says nothing about the rows. `stale_notes` finds the notes that can be ignored.
"""

import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from peagle.storage import StoragePath, write_atomic

_MAX_LOST = 2  # lost engine processes until all rows of a unit are suspects
_MAX_CRASHES_ALONE = 2  # until a row is poisoned


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """The rows of a unit in an engine process, by index; None means all rows."""

    rows: tuple[int, ...] | None = None
    alone: bool = False  # whether the only row in the engine was run alone on purpose
    died: bool = False  # whether the actor noticed a crash of the engine

    @property
    def is_vague(self) -> bool:
        """Whether the note only says that the unit was started."""
        return not (self.died or self.alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The rows that must run alone, and the rows that crash engines."""

    suspects: frozenset[int] = frozenset()
    poisoned: frozenset[int] = frozenset()


def judge(notes: Iterable[Note], num_rows: int) -> Verdict:
    """Return the verdict from the notes of dead engine processes.

    Example: three rows were in an engine that crashed, then the first row was alone in two engines that crashed. The
    first row is poisoned, and the other two rows are suspects.
    """
    suspects: set[int] = set()
    crashes_alone: Counter[int] = Counter()
    num_lost = 0
    for note in notes:
        rows = range(num_rows) if note.rows is None else note.rows
        if note.is_vague:
            num_lost += 1
            continue
        suspects.update(rows)
        if note.alone:
            crashes_alone.update(rows)
    if num_lost >= _MAX_LOST:
        suspects.update(range(num_rows))
    poisoned = frozenset(row for row, count in crashes_alone.items() if count >= _MAX_CRASHES_ALONE)
    return Verdict(suspects=frozenset(suspects) - poisoned, poisoned=poisoned)


class UnitNotes:
    """The notes about one unit, including the note of this engine process."""

    def __init__(self, folder: StoragePath, unit: int, session_id: str) -> None:
        self._folder = folder
        self._prefix = f"unit-{unit:08d}."
        self._own_path = folder / f"{self._prefix}{session_id}.json"

    def verdict(self, num_rows: int) -> Verdict:
        """Return the verdict from the notes of earlier engine processes."""
        notes = []
        for path in self._paths():
            if path == self._own_path:
                continue
            note = _read(path)
            # If another unit's row was alone in that engine process, this unit only waited.
            other_paths = self._folder.glob(f"unit-*.{path.name.split('.')[1]}.json") if note.is_vague else ()
            if any(_read(other).alone for other in other_paths if other != path):
                path.unlink(missing_ok=True)
            else:
                notes.append(note)
        return judge(notes, num_rows)

    def write(self, note: Note) -> None:
        """Replace this process's note."""
        write_atomic(self._own_path, json.dumps(asdict(note)).encode())

    def discard(self) -> None:
        """Delete this process's note, because the unit left the engine unfinished but without a crash."""
        self._own_path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete all notes, because the unit is committed."""
        for path in self._paths():
            path.unlink(missing_ok=True)

    def _paths(self) -> list[StoragePath]:
        return sorted(self._folder.glob(f"{self._prefix}*.json"), key=lambda path: path.name)


class RowsInEngine:
    """The rows that are currently in an engine, by unit."""

    def __init__(self) -> None:
        self._notes: dict[int, UnitNotes] = {}
        self._rows: defaultdict[int, list[int]] = defaultdict(list)

    def start(self, unit: int, notes: UnitNotes) -> UnitNotes:
        """Register a unit before its rows enter the engine."""
        self._notes[unit] = notes
        return notes

    def end(self, unit: int) -> None:
        """Forget a finished or abandoned unit. Does nothing for an unknown unit."""
        self._notes.pop(unit, None)

    @contextlib.contextmanager
    def inside(self, unit: int, index: int) -> Iterator[None]:
        """Count a row as in the engine during the block."""
        self._rows[unit].append(index)
        try:
            yield
        finally:
            self._rows[unit].remove(index)

    def has_rows(self) -> bool:
        """Return whether a row is in the engine."""
        return any(self._rows.values())

    def mark_suspected(self, *, alone: bool) -> None:
        """Mark the rows in a crashing engine as suspects, and clear units without rows in the engine.

        `alone` means that the only row in the engine was run alone on purpose.
        """
        for unit, notes in list(self._notes.items()):
            if rows := self._rows[unit]:
                notes.write(Note(rows=tuple(sorted(rows)), alone=alone, died=True))
            else:
                notes.discard()


def stale_notes(folder: StoragePath, committed: set[int]) -> list[StoragePath]:
    """Return the notes that a new driver can delete: those of committed units, and vague notes of a killed driver."""
    notes = [(int(path.name.removeprefix("unit-").partition(".")[0]), path) for path in folder.glob("unit-*.json")]
    return [path for unit, path in notes if unit in committed or _read(path).is_vague]


def _read(path: StoragePath) -> Note:
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:  # just deleted by the attempt that committed the unit
        return Note(rows=(), died=True)
    rows: Sequence[int] | None = values["rows"]
    return Note(rows=None if rows is None else tuple(rows), alone=values["alone"], died=values["died"])
