"""The run directory: what is where, and how a unit becomes committed.

    run.json                      what the run is (configuration, fingerprint, versions), and its plan; written once
    plan.ID.parquet               the units: the file that run.json names; another one counts for nothing
    plan-N.parquet                units of the N-th retry: which unit's dead letters they take up; written once
    data/unit-N.parquet           a committed unit: its rows, and its usage in the file's metadata
    failed/unit-N.ATTEMPT.jsonl   its dead letters; valid only if the committed file names it and no retry took them up
    ledger/session-*.parquet      one engine process each: where its seconds went; rewritten at each heartbeat
    report.json  report.html      the account
    logs/                         what Ray and the engines print; of a run on S3, copies of it (`logs.py`)
    suspects/                     rows that may have killed an engine (`suspects.py`); empty when the run is finished
    .lease/                       who drives the run (`lease.py`), and its word to the workers while it is being stopped

A unit is committed when its file exists. The file appears whole, by one exclusive link or one conditional PUT, so of
two attempts at a unit the first wins and the other leaves nothing valid. `run.json` and `plan-N.parquet` are created
in the same way. That is all that exactly once rests on.

A driver that was stopped may go on at any step after another one has finished, so no step of it may hurt then. What
is deleted is first listed, then the lease is looked at, then just those files are deleted: their names are never used
again, so no file of a later driver is among them.

It knows places and records; it does not know whether they are on a disk or on S3 (`peagle.storage`), nor engines or
Ray.
"""

import json
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from peagle.economics.ledger import read_sessions, write_session
from peagle.economics.usage import EngineSession, UnitUsage
from peagle.errors import ConfigError, PeagleError, RunInUse
from peagle.files import writing
from peagle.plain_json import to_json
from peagle.runs.files import PLAN_FILE, Footer, Footers, PlanFiles, is_temporary, orphans, temporaries, unit_bytes
from peagle.runs.lease import FOLDER as LEASE_FOLDER
from peagle.runs.lease import Holding
from peagle.runs.logs import logs_folder
from peagle.runs.plan import Plan, Retry
from peagle.runs.stopping import StopWord
from peagle.runs.suspects import forgettable
from peagle.storage import (
    Place,
    make_folder,
    open_to_read,
    place,
    require_usable,
    write_atomic,
    write_once,
)

_WRITABLE = "make room, or the folder writable; the same command continues the run"
_LETTERS = "put it back; or delete the unit's file in data/, and its rows are done anew"
UNIT_FILE = re.compile(r"unit-(\d{8,})\.parquet")
_LAID_OUT = {"data", "failed", "ledger", "logs", "suspects", LEASE_FOLDER}


def unit_files(root: Place) -> dict[int, Place]:
    """The committed units' files by number; empty where no run is."""
    found = ((path, UNIT_FILE.fullmatch(path.name)) for path in (root / "data").glob("unit-*.parquet"))
    return {int(match[1]): path for path, match in found if match}


class RunDirectory:
    """A run directory on a local or shared file system, or on S3.

    Args:
        driver: the number of the lease for whose holder this process works; 0 for none.

    Attributes:
        stop: the word by which that driver stops its workers.
        logs: always local: a log that is being written cannot lie on S3.
    """

    def __init__(self, root: str | Place, *, driver: int = 0) -> None:
        self.root = place(root)
        self.driver = driver
        self.stop = StopWord(self.root / LEASE_FOLDER, driver)
        self.data = self.root / "data"
        self.failed = self.root / "failed"
        self.ledger = self.root / "ledger"
        self.logs = logs_folder(self.root)
        self.suspects = self.root / "suspects"
        self._footers = Footers(self.unit_path)
        self._folders = (self.root, self.data, self.failed, self.ledger, self.suspects)
        self._plans = PlanFiles(self.root)
        self._lease: Holding | None = None

    def __str__(self) -> str:
        return str(self.root)

    # --- the whole

    @property
    def exists(self) -> bool:
        """Whether a run was started here."""
        return self._plans.exists

    def require_usable(self) -> None:
        """Make sure that the store, if it is one, can hold a run.

        Raises:
            ConfigError: it cannot be written, or lets two engines commit the same unit.
        """
        require_usable(self.root / ".lease")

    def hold(self, lease: Holding) -> None:
        """Have this process drive the run; without the lease it deletes nothing."""
        self._lease, self.driver = lease, lease.number
        self.stop = StopWord(self.root / LEASE_FOLDER, lease.number)

    def require_lease(self) -> None:
        """Require that this driver still has its lease, before it deletes or replaces.

        Raises:
            RunInUse: another driver has taken it over.
        """
        if self._lease is not None:
            self._lease.require()

    def create(self, manifest: dict[str, Any], plan: Plan) -> bool:
        """Lay the directory out, over what a driver left that was killed at it.

        `run.json` comes last: with it, the run exists, and of several drivers the first one has made it.

        Returns:
            Whether it was this one. If not, the manifest and the plan that count are another's.

        Raises:
            ConfigError: the folder holds something else, or cannot be written.
            RunInUse: another driver has taken over.
        """
        self.require_own()
        try:
            self._make_folders()
            self._sweep(temporaries(self._folders))
            return self._plans.create(manifest, plan)
        except OSError as error:
            raise ConfigError(f"output {self}: cannot be written: {error}") from error

    def require_own(self) -> None:
        """Make sure that the folder, if there is one, holds nothing but a run.

        Raises:
            ConfigError: it holds something else.
        """
        if self.exists or not self.root.is_dir():
            return
        names = {path.name for path in self.root.glob("*")} - _LAID_OUT
        foreign = {name for name in names if not (is_temporary(name) or PLAN_FILE.fullmatch(name))}
        if foreign:
            raise ConfigError(
                f"output {self}: the folder holds other files ({min(foreign)}, ...)", hint="name a new one"
            )

    def open(self) -> None:
        """Make the directory ready for another attempt: clear what killed writers left.

        Raises:
            ConfigError: the folder cannot be written.
            RunInUse: another driver has taken over.
        """
        try:
            self._make_folders()
            self._sweep(
                [*temporaries(self._folders), *self._plans.losers(), *forgettable(self.suspects, self.committed())]
            )
        except OSError as error:
            raise ConfigError(f"output {self}: cannot be written: {error}") from error

    def manifest(self) -> dict[str, Any]:
        """`run.json`.

        Raises:
            ConfigError: there is no run here, or its manifest is damaged.
        """
        return self._plans.manifest()

    def plan(self) -> Plan:
        """The plan that `run.json` names, and the units of retries.

        Raises:
            ConfigError: missing or damaged.
        """
        return self._plans.plan()

    def with_retries(self, plan: Plan) -> Plan:
        """A plan of this corpus with the units of all retries, in planning order.

        Raises:
            ConfigError: a plan of a retry is damaged.
        """
        return self._plans.with_retries(plan)

    def add_retries(self, retries: Sequence[Retry], *, number: int) -> None:
        """Plan these units; from now on they answer for the rows that they take up.

        Args:
            number: of the retry, counted from 1: one more than the plan had from which it was made.

        Raises:
            RunInUse: another driver has planned that retry, or has taken over.
        """
        self.require_lease()
        if not self._plans.add_retries(retries, number):
            raise RunInUse(
                f"{self}: another driver has planned retry {number} at the same time",
                hint="let it finish; then repeat this command if there are dead letters left",
            )

    def superseded(self) -> frozenset[int]:
        """Committed units whose dead letters a retry took up and has not committed."""
        if not self._plans.num_retries():
            return frozenset()
        plan = self.plan()
        earlier = plan.taken_up().keys() & self.committed()
        self.read_ahead(earlier)
        usages = {unit: self.usage(unit) for unit in earlier}
        return plan.superseded({unit: usage.num_rows + usage.num_failed_rows for unit, usage in usages.items()})

    # --- units

    def committed(self) -> set[int]:
        """Numbers of the committed units, from a listing without foreign files."""
        return set(unit_files(self.root))

    def commit(self, unit: int, table: pa.Table, usage: UnitUsage, dead_letters: Sequence[dict[str, Any]]) -> bool:
        """Commit a unit; False when another attempt came first, and this counts nothing.

        Raises:
            CapacityError: the disk is full, or the folder cannot be written. The unit is then not committed.
            StorageError: the store does not answer. The unit may be committed then, and counts all the same.
        """
        failed_name = ""
        if dead_letters:
            # A name of this attempt's own: a slower attempt cannot replace the letters of the one that won.
            failed_name = f"unit-{unit:08d}.{uuid.uuid4().hex[:8]}.jsonl"
        with writing(self.unit_path(unit), hint=_WRITABLE):
            if failed_name:
                lines = "".join(to_json(letter) + "\n" for letter in dead_letters)
                write_atomic(self.failed / failed_name, lines.encode())
            won = write_once(self.unit_path(unit), unit_bytes(table, Footer(usage, failed_name)))
        if not won and failed_name:
            (self.failed / failed_name).unlink(missing_ok=True)
        return won

    def unit_path(self, unit: int) -> Place:
        """The file that commits a unit."""
        return self.data / f"unit-{unit:08d}.parquet"

    def usages(self) -> Iterator[UnitUsage]:
        """Usage of every committed unit, in order, from the files' footers.

        Rows that a retry took up are no failed rows of the unit where they failed.

        Raises:
            PeagleError: a file is damaged.
        """
        superseded, committed = self.superseded(), self.committed()
        self.read_ahead(committed)
        for unit in sorted(committed):
            usage = self.usage(unit)
            yield replace(usage, num_failed_rows=0) if unit in superseded else usage

    def usage(self, unit: int) -> UnitUsage:
        """Usage of one committed unit.

        Raises:
            PeagleError: the file is damaged.
        """
        return self._footers.read(unit).usage

    def dead_letters(self) -> Iterator[dict[str, Any]]:
        """Every valid dead letter: a committed unit names it, no retry took it up."""
        superseded, committed = self.superseded(), self.committed()
        self.read_ahead(committed - superseded)
        for unit in sorted(committed):
            if unit not in superseded:
                yield from self.letters(unit)

    def letters(self, unit: int) -> Iterator[dict[str, Any]]:
        """The dead letters of one committed unit, whether a retry took them up or not.

        Raises:
            PeagleError: their file is missing or damaged.
        """
        if name := self.letters_name(unit):
            path = self.failed / name
            try:
                with open_to_read(path) as lines:
                    yield from (json.loads(line) for line in lines)
            except (OSError, ValueError) as error:
                raise PeagleError(f"{path}, the dead letters of unit {unit}: {error}", hint=_LETTERS) from error

    def letters_name(self, unit: int) -> str:
        """The `failed` file that a committed unit names; empty without dead letters.

        Raises:
            PeagleError: the unit's file is damaged.
        """
        return self._footers.read(unit).failed_name

    def remove_leftovers(self) -> int:
        """Delete the leftovers of killed or slower attempts; return their number.

        Temporary files, plans that lost, and dead letters of a committed unit that does not name them: it never will.
        Notes of committed units go too: their engine was killed between the commit and their removal.

        Raises:
            RunInUse: another driver has taken over.
        """
        letters, committed = list(self.failed.glob("unit-*.jsonl")), self.committed()
        self.read_ahead(committed)
        named = {unit: self.letters_name(unit) for unit in committed}
        found = [*temporaries(self._folders), *self._plans.losers(), *orphans(letters, named)]
        self._sweep([*found, *forgettable(self.suspects, committed)])
        return len(found)

    def read_ahead(self, units: Iterable[int]) -> None:
        """Read these committed units' footers, many at once in a store."""
        self._footers.read_ahead(units)

    # --- the ledger

    def write_session(self, session: EngineSession) -> None:
        """Replace the heartbeat of one engine process."""
        write_session(self.ledger, session)

    def sessions(self) -> list[EngineSession]:
        """The last heartbeat of every engine process that this run ever had."""
        return read_sessions(self.ledger)

    # --- what is left over

    def _sweep(self, listed: Iterable[Place]) -> None:
        """Delete files that were listed while this driver had the lease."""
        listed = list(listed)
        self.require_lease()
        for path in listed:
            path.unlink(missing_ok=True)

    def _make_folders(self) -> None:
        for folder in (*self._folders, self.root / LEASE_FOLDER):
            make_folder(folder)
        self.logs.mkdir(parents=True, exist_ok=True)
