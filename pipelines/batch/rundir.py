"""The run directory: what is where, and how a unit becomes committed.

    run.json                      what the run is (configuration, fingerprint, versions); written once
    plan.parquet                  the units; written once
    plan-N.parquet                units of the N-th retry: which unit's dead letters they take up; written once
    data/unit-N.parquet           a committed unit: its rows, and its usage in the file's metadata
    failed/unit-N.ATTEMPT.jsonl   its dead letters; valid only if the committed file names it and no retry took them up
    ledger/session-*.parquet      one engine process each: where its seconds went; rewritten at each heartbeat
    report.json  report.html      the account
    logs/                         what Ray and the engines print; of a run on S3, copies of it (`logs.py`)
    suspects/                     rows that may have killed an engine (`suspects.py`); empty when the run is finished
    .stop.json                    only while a run is being stopped: the driver's word to the workers
    .lease/                       who drives the run (`lease.py`)

A unit is committed when its file exists. The file appears whole, by one exclusive link or one conditional PUT, so of
two attempts at a unit the first wins and the other leaves nothing valid. It knows places and records; it does not know
whether they are on a disk or on S3 (`peagle.storage`), nor engines or Ray.
"""

import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa

from peagle.economics.ledger import read_sessions, write_session
from peagle.economics.usage import EngineSession, UnitUsage
from peagle.errors import ConfigError, PeagleError
from peagle.files import TEMPORARY_SUFFIX, writing
from peagle.plain_json import to_json
from peagle.storage import (
    Place,
    is_remote,
    open_to_read,
    place,
    remove_temporaries,
    require_usable,
    write_atomic,
    write_json,
    write_once,
)
from pipelines.batch.footers import Footer, Footers, unit_bytes
from pipelines.batch.logs import logs_folder
from pipelines.batch.plan import (
    Plan,
    Retry,
    plan_from_bytes,
    plan_to_bytes,
    retries_from_bytes,
    retries_to_bytes,
)
from pipelines.batch.stopping import PolledStop
from pipelines.batch.suspects import forget_killed_driver

_Parsed = TypeVar("_Parsed")
_WRITABLE = "make room, or the folder writable; the same command continues the run"
_LETTERS = "put it back; or delete the unit's file in data/, and its rows are done anew"
UNIT_FILE = re.compile(r"unit-(\d{8,})\.parquet")
_LAID_OUT = {"data", "failed", "ledger", "logs", "suspects", "plan.parquet", ".lease"}


class RunDirectory:
    """A run directory on a local or shared file system, or on S3.

    Attributes:
        logs: always local: a log that is being written cannot lie on S3.
    """

    def __init__(self, root: str | Place) -> None:
        self.root = place(root)
        self.data = self.root / "data"
        self.failed = self.root / "failed"
        self.ledger = self.root / "ledger"
        self.logs = logs_folder(self.root)
        self.suspects = self.root / "suspects"
        self._footers = Footers(self.unit_path)

    def __str__(self) -> str:
        return str(self.root)

    # --- the whole

    @property
    def exists(self) -> bool:
        """Whether a run was started here."""
        return (self.root / "run.json").exists()

    def require_usable(self) -> None:
        """Make sure that the store, if it is one, can hold a run.

        Raises:
            ConfigError: it cannot be written, or lets two engines commit the same unit.
        """
        require_usable(self.root / ".lease")

    def create(self, manifest: dict[str, Any], plan: Plan) -> None:
        """Lay the directory out, over what a driver left that was killed at it. `run.json` comes last: with it, the run
        exists.

        Raises:
            ConfigError: the folder holds something else, or cannot be written.
        """
        self.require_own()
        try:
            self._make_folders()
            self._remove_temporaries()
            write_atomic(self.root / "plan.parquet", plan_to_bytes(plan))
            write_json(self.root / "run.json", manifest)
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
        foreign = {name for name in names if not (name.startswith(".") and name.endswith(TEMPORARY_SUFFIX))}
        if foreign:
            raise ConfigError(
                f"output {self}: the folder holds other files ({min(foreign)}, ...)", hint="name a new one"
            )

    def open(self) -> None:
        """Make the directory ready for another attempt: clear what killed writers left.

        Raises:
            ConfigError: the folder cannot be written.
        """
        try:
            self._make_folders()
            self.clear_stop()
            self._remove_temporaries()
            forget_killed_driver(self.suspects, self.committed())
        except OSError as error:
            raise ConfigError(f"output {self}: cannot be written: {error}") from error

    def manifest(self) -> dict[str, Any]:
        """`run.json`.

        Raises:
            ConfigError: there is no run here, or its manifest is damaged.
        """
        try:
            manifest: dict[str, Any] = json.loads((self.root / "run.json").read_bytes())
        except FileNotFoundError as error:
            raise ConfigError(f"{self} is no run directory: it has no run.json") from error
        except ValueError as error:
            raise ConfigError(f"{self}/run.json is damaged: {error}", hint="start a new run directory") from error
        return manifest

    def plan(self) -> Plan:
        """`plan.parquet`, and the units of retries.

        Raises:
            ConfigError: missing or damaged.
        """
        return _parsed(self.root / "plan.parquet", plan_from_bytes).with_retries(self.retries())

    def retries(self) -> list[Retry]:
        """The units of all retries, in the order in which they were planned.

        Raises:
            ConfigError: a plan of a retry is damaged.
        """
        return [retry for path in self._retry_plans() for retry in _parsed(path, retries_from_bytes)]

    def add_retries(self, retries: Sequence[Retry]) -> None:
        """Plan these units; from now on they answer for the rows that they take up."""
        write_once(self.root / f"plan-{len(self._retry_plans()) + 1:04d}.parquet", retries_to_bytes(retries))

    def superseded(self) -> frozenset[int]:
        """Committed units whose dead letters a retry took up, not counting those that were done again since."""
        if not self._retry_plans():
            return frozenset()
        plan = self.plan()
        earlier = plan.taken_up().keys() & self.committed()
        self.read_ahead(earlier)
        usages = {unit: self.usage(unit) for unit in earlier}
        return plan.superseded({unit: usage.num_rows + usage.num_failed_rows for unit, usage in usages.items()})

    def _retry_plans(self) -> list[Place]:
        return sorted(self.root.glob("plan-*.parquet"), key=lambda path: path.name)

    # --- units

    def committed(self) -> set[int]:
        """Numbers of the committed units, from a listing; a file with another name is none of ours."""
        names = (UNIT_FILE.fullmatch(path.name) for path in self.data.glob("unit-*.parquet"))
        return {int(name[1]) for name in names if name}

    def commit(self, unit: int, table: pa.Table, usage: UnitUsage, dead_letters: Sequence[dict[str, Any]]) -> bool:
        """Commit a unit; False when another attempt at it came first, and this one counts for nothing.

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
        """Every valid dead letter: those that a committed unit names, and no retry took up."""
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
        """The file in `failed` that a committed unit names; empty where it has no dead letters.

        Raises:
            PeagleError: the unit's file is damaged.
        """
        return self._footers.read(unit).failed_name

    def remove_leftovers(self) -> int:
        """Delete what killed or slower attempts left, when nobody writes any more; the number of files deleted.

        Temporary files, and dead letters that no committed unit names. Notes of committed units go too: their engine
        was killed between the commit and their removal.
        """
        committed = self.committed()
        forget_killed_driver(self.suspects, committed)
        self.read_ahead(committed)
        valid = {self.letters_name(unit) for unit in committed}
        orphans = [path for path in self.failed.glob("unit-*.jsonl") if path.name not in valid]
        for orphan in orphans:
            orphan.unlink(missing_ok=True)
        return len(orphans) + self._remove_temporaries()

    def read_ahead(self, units: Iterable[int]) -> None:
        """Read what the files of these committed units say of them, many at once where each takes a request."""
        self._footers.read_ahead(units)

    # --- stopping

    def request_stop(self, grace_s: float) -> None:
        """Tell every worker: start nothing new, and give up what is not committed in `grace_s` seconds."""
        write_json(self._stop_path, {"grace_s": grace_s})

    def stop_grace_s(self) -> float | None:
        """The seconds that work under way has since a stop was asked for; None while the run goes on."""
        try:
            return float(json.loads(self._stop_path.read_bytes())["grace_s"])
        except FileNotFoundError:
            return None

    def stop_reader(self) -> Callable[[], float | None]:
        """`stop_grace_s` for somebody who asks all the time and must not wait for the answer."""
        return PolledStop(self.stop_grace_s) if is_remote(self.root) else self.stop_grace_s

    def clear_stop(self) -> None:
        """The run goes on."""
        self._stop_path.unlink(missing_ok=True)

    @property
    def _stop_path(self) -> Place:
        return self.root / ".stop.json"

    # --- the ledger

    def write_session(self, session: EngineSession) -> None:
        """Replace the heartbeat of one engine process."""
        write_session(self.ledger, session)

    def sessions(self) -> list[EngineSession]:
        """The last heartbeat of every engine process that this run ever had."""
        return read_sessions(self.ledger)

    def _remove_temporaries(self) -> int:
        if is_remote(self.root):
            return 0  # what is there is one object, there as a whole or not at all
        folders = (self.root, self.data, self.failed, self.ledger, self.suspects)
        return sum(map(remove_temporaries, folders))

    def _make_folders(self) -> None:
        for folder in (self.data, self.failed, self.ledger, self.logs, self.suspects):
            folder.mkdir(parents=True, exist_ok=True)


def _parsed(path: Place, parse: Callable[[bytes], _Parsed]) -> _Parsed:
    try:
        return parse(path.read_bytes())
    except (OSError, pa.ArrowException, KeyError) as error:
        raise ConfigError(f"{path} is damaged: {error}", hint="start a new run directory") from error
