"""Suspects: rows that may have killed an engine.

A note of each attempt at a unit is kept in the run directory.

    OUT/suspects/unit-N.SESSION.json    what that engine process had of unit N in its engine; gone when N commits

The note is written before the rows go in, so it is there whatever is killed, the driver included. It comes to mean:

- The engine died and its actor saw it (`died`): the note names the rows that were in it. They are suspects: each is
  tried again alone in the engine. One that was alone at two ends of an engine is a dead letter; one end may be chance
  (the kernel short of memory, an operator), and a row is not condemned for that.
- The actor itself is gone (`died` is false, and another engine process finds the note): perhaps a node was taken away.
  So the first time the unit is simply done again; from the second time on, all its rows are suspects. For a row that
  was alone it counts like a death that the actor saw, and units that only waited are cleared.
- The driver was killed: that says nothing of rows. `forgettable` finds the notes that only mean this.

It knows files; it knows neither engines nor Ray.
"""

import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from peagle.storage import Place, write_atomic

_MANY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """An engine process's rows of a unit by index; None for all of it."""

    rows: tuple[int, ...] | None = None
    alone: bool = False
    died: bool = False

    @property
    def is_vague(self) -> bool:
        """Whether it only says that the unit was begun."""
        return not (self.died or self.alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Rows of a unit that go into the engine alone, and rows that kill engines."""

    suspects: frozenset[int] = frozenset()
    guilty: frozenset[int] = frozenset()


def judge(notes: Iterable[Note], num_rows: int) -> Verdict:
    """Judge the notes that dead engine processes left of a unit.

    Example: three rows were in an engine that died, then the first of them was alone in two that died: it is guilty,
    and the other two are suspects.
    """
    suspects: set[int] = set()
    ends_alone: Counter[int] = Counter()
    num_lost = 0
    for note in notes:
        rows = range(num_rows) if note.rows is None else note.rows
        if note.is_vague:
            num_lost += 1
            continue
        suspects.update(rows)
        if note.alone:
            ends_alone.update(rows)
    if num_lost >= _MANY:
        suspects.update(range(num_rows))
    guilty = frozenset(row for row, count in ends_alone.items() if count >= _MANY)
    return Verdict(suspects=frozenset(suspects) - guilty, guilty=guilty)


class UnitNotes:
    """The notes of one unit, and the one that this engine process writes."""

    def __init__(self, folder: Place, unit: int, session_id: str) -> None:
        self._folder = folder
        self._prefix = f"unit-{unit:08d}."
        self._own = folder / f"{self._prefix}{session_id}.json"

    def verdict(self, num_rows: int) -> Verdict:
        """The verdict on the notes of earlier engine processes on the unit."""
        notes = []
        for path in self._paths():
            if path == self._own:
                continue
            note = _read(path)
            if note.is_vague and self._only_waited(path):
                path.unlink(missing_ok=True)
            else:
                notes.append(note)
        return judge(notes, num_rows)

    def write(self, note: Note) -> None:
        """Replace this process's note."""
        write_atomic(self._own, json.dumps(asdict(note)).encode())

    def withdraw(self) -> None:
        """Withdraw this process's note.

        The unit left the engine undone and nothing died.
        """
        self._own.unlink(missing_ok=True)

    def clear(self) -> None:
        """The unit is committed: no note of it matters."""
        for path in self._paths():
            path.unlink(missing_ok=True)

    def _only_waited(self, path: Place) -> bool:
        """Whether another unit's row was alone in the engine of this note's process."""
        session_id = path.name.split(".")[1]
        return any(_read(other).alone for other in self._folder.glob(f"unit-*.{session_id}.json") if other != path)

    def _paths(self) -> list[Place]:
        return sorted(self._folder.glob(f"{self._prefix}*.json"), key=lambda path: path.name)


class RowsInEngine:
    """The rows that are in an engine now, by unit.

    Where the engine dies, the notes of their units accuse them.
    """

    def __init__(self) -> None:
        self._notes: dict[int, UnitNotes] = {}
        self._rows: defaultdict[int, list[int]] = defaultdict(list)

    def begin(self, unit: int, notes: UnitNotes) -> UnitNotes:
        """A unit whose rows are about to go in, with its notes."""
        self._notes[unit] = notes
        return notes

    def end(self, unit: int) -> None:
        """A unit that is done or given up; a process that had it twice may end it twice."""
        self._notes.pop(unit, None)

    @contextlib.contextmanager
    def inside(self, unit: int, index: int) -> Iterator[None]:
        """Have a row in the engine for as long as the block lasts."""
        self._rows[unit].append(index)
        try:
            yield
        finally:
            self._rows[unit].remove(index)

    def any(self) -> bool:
        """Whether a row is in the engine."""
        return any(self._rows.values())

    def accuse(self, *, alone: bool) -> None:
        """Note the rows that are in an engine that dies.

        Units that had none in it are cleared.

        Args:
            alone: the row that is in it has it for itself.
        """
        for unit, notes in list(self._notes.items()):
            if rows := self._rows[unit]:
                notes.write(Note(rows=tuple(sorted(rows)), alone=alone, died=True))
            else:
                notes.withdraw()


def forgettable(folder: Place, committed: set[int]) -> list[Place]:
    """Notes to forget when no engine runs.

    They say only that a driver was killed, or are of committed units.
    """
    return [path for path in folder.glob("unit-*.json") if _unit(path) in committed or _read(path).is_vague]


def _read(path: Place) -> Note:
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:  # cleared at this moment, by the attempt that committed the unit
        return Note(rows=(), died=True)
    rows: Sequence[int] | None = values["rows"]
    return Note(rows=None if rows is None else tuple(rows), alone=values["alone"], died=values["died"])


def _unit(path: Place) -> int:
    return int(path.name.removeprefix("unit-").partition(".")[0])
