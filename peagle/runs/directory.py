"""The run directory: its files, and how a unit is committed.

    run.json                      configuration, fingerprint, versions, and the name of the plan; written once
    plan.ID.parquet               the units; only the file that run.json names is valid
    plan-N.parquet                units of retry N, each with the unit whose dead letters it retries; written once
    data/unit-N.parquet           a committed unit: its rows, and its usage in the file's metadata
    failed/unit-N.ATTEMPT.jsonl   dead letters of unit N; valid if unit-N.parquet names the file, until they are retried
    ledger/session-*.parquet      one engine process each, rewritten at each heartbeat
    report.json  report.html      the report
    logs/                         output of Ray and the engines; for a run on S3, copies of it (`logs.py`)
    suspects/                     rows that might have crashed an engine (`suspects.py`); empty in a finished run
    .lease/                       the current driver (`lease.py`), and the stop signal to its workers (`stopping.py`)

A unit is committed when its file exists. The file appears atomically, by one exclusive link or one conditional PUT. So
the first of two attempts wins, and the second has no effect. `run.json` and the plans are created the same way.
"""

import functools
import io
import json
import re
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from peagle.corpus.extensions import cast_to_plain
from peagle.economics.ledger import read_sessions, write_session
from peagle.economics.usage import EngineSession, UnitUsage
from peagle.errors import ConfigError, PeagleError, RunInUse
from peagle.files import TEMPORARY_SUFFIX, converted_write_errors, json_bytes
from peagle.plain_json import to_json
from peagle.runs.columns import internal_names
from peagle.runs.lease import FOLDER as LEASE_FOLDER
from peagle.runs.lease import HeldLease
from peagle.runs.logs import logs_folder
from peagle.runs.plan import Plan, Retry, plan_from_bytes, plan_to_bytes, retries_from_bytes, retries_to_bytes
from peagle.runs.stopping import StopSignal
from peagle.runs.suspects import stale_notes
from peagle.storage import (
    StoragePath,
    is_remote,
    make_folder,
    open_to_read,
    storage_path,
    write_atomic,
    write_once,
)

PLAN_FILE = re.compile(r"plan\.[0-9a-f]{12}\.parquet")
UNIT_FILE = re.compile(r"unit-(\d{8,})\.parquet")
DEAD_LETTERS_FILE = re.compile(r"unit-(\d{8,})\.\w+\.jsonl")
_FOLDERS = {"data", "failed", "ledger", "logs", "suspects", LEASE_FOLDER}
_WRITABLE_HINT = "free some space, or make the folder writable; the same command continues the run"
_LETTERS_HINT = "restore the file, or delete the unit's file in data/ to run its rows again"
_NEW_RUN_HINT = "start a new run directory"
_USAGE, _FAILED = b"peagle.usage", b"peagle.failed"  # metadata keys of a unit's file
BATCH_ROWS = 1024  # rows per batch of `read_rows`
_READERS = 16  # threads that read units' metadata from S3
_Parsed = TypeVar("_Parsed")


@dataclass(frozen=True, slots=True)
class UnitMetadata:
    usage: UnitUsage
    failed_name: str  # empty if no row failed


class RunDirectory:
    """A run directory on a local or shared file system, or on S3.

    `driver` is the lease number of the driver that this process works for, or 0 without a driver.
    """

    def __init__(self, root: str | StoragePath, *, driver: int = 0) -> None:
        self.root = storage_path(root)
        self.driver = driver
        self.stop = StopSignal(self.root / LEASE_FOLDER, driver)  # from the driver to its workers
        self.data = self.root / "data"
        self.failed = self.root / "failed"
        self.ledger = self.root / "ledger"
        self.logs = logs_folder(self.root)  # always local, since a log that is being written cannot be on S3
        self.suspects = self.root / "suspects"
        self._manifest = self.root / "run.json"
        self._folders = (self.root, self.data, self.failed, self.ledger, self.suspects)
        self._metadata: dict[int, UnitMetadata] = {}  # cache for units on S3, where each read is slow
        self.lease: HeldLease | None = None  # only if this process is the run's driver

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the location and the driver's number; the lease itself stays in this process."""
        return functools.partial(RunDirectory, driver=self.driver), (str(self.root),)

    def __str__(self) -> str:
        return str(self.root)

    # --- the run

    @property
    def exists(self) -> bool:
        return self._manifest.exists()

    def hold(self, lease: HeldLease) -> None:
        """Make this process the run's driver."""
        self.lease, self.driver = lease, lease.number
        self.stop = StopSignal(self.root / LEASE_FOLDER, lease.number)

    def require_lease(self) -> None:
        """Check that this driver still has its lease; raises RunInUse if another driver has taken over."""
        if self.lease is not None:
            self.lease.require_held()

    def create(self, manifest: dict[str, Any], plan: Plan) -> bool:
        """Create the run, and return whether this driver was the first to do so.

        If another driver was first, only its manifest and plan are valid. Raises ConfigError if the folder contains
        other files.
        """
        self.require_own()
        try:
            self._make_folders()
            self._delete(_temporary_files(self._folders))
            path = self.root / f"plan.{uuid.uuid4().hex[:12]}.parquet"
            write_once(path, plan_to_bytes(plan))
            is_first = write_once(self._manifest, json_bytes({**manifest, "plan": path.name}))
            if not is_first:
                path.unlink(missing_ok=True)
            return is_first
        except OSError as error:
            raise ConfigError(f"output {self}: cannot be written: {error}") from error

    def require_own(self) -> None:
        """Check that the folder, if it exists, contains only a run; raises ConfigError if it contains other files."""
        if self.exists or not self.root.is_dir():
            return
        names = {path.name for path in self.root.glob("*")} - _FOLDERS
        names -= {path.name for path in self.root.glob(f".*{TEMPORARY_SUFFIX}")}
        foreign = {name for name in names if not PLAN_FILE.fullmatch(name)}
        if foreign:
            message = f"output {self}: the folder has other files, such as {min(foreign)}"
            raise ConfigError(message, hint="use a new folder")

    def open(self) -> None:
        """Delete leftovers of killed writers before another attempt."""
        try:
            self._make_folders()
            self._delete(
                [
                    *_temporary_files(self._folders),
                    *self._orphaned_plans(),
                    *stale_notes(self.suspects, self.committed()),
                ]
            )
        except OSError as error:
            raise ConfigError(f"output {self}: cannot be written: {error}") from error

    def manifest(self) -> dict[str, Any]:
        """Return `run.json`; raises ConfigError if there is no run, or the file is damaged."""
        try:
            manifest: dict[str, Any] = json.loads(self._manifest.read_bytes())
        except FileNotFoundError as error:
            raise ConfigError(f"{self} is not a run directory: it has no run.json") from error
        except ValueError as error:
            raise ConfigError(f"{self._manifest} is damaged: {error}", hint=_NEW_RUN_HINT) from error
        return manifest

    @property
    def keeps_inputs(self) -> bool:
        """Whether input columns keep their names in the files of this run; older versions renamed some."""
        return bool(self.manifest().get("keeps_inputs"))

    # --- the plan

    def plan(self) -> Plan:
        """Return the run's plan, with the units of retries; raises ConfigError if a file is missing or damaged."""
        return self.with_retries(_parse_file(self.root / self._plan_name(), plan_from_bytes))

    def with_retries(self, plan: Plan) -> Plan:
        """Add the units of all retries to a plan of this corpus, in the order in which they were planned."""
        for path in self._retry_plans():
            plan = plan.with_retries(_parse_file(path, retries_from_bytes))
        return plan

    def add_retries(self, retries: Sequence[Retry], *, number: int) -> None:
        """Plan retry `number`. From then on, its units are responsible for the rows that they retry.

        Raises RunInUse if another driver has planned a retry with this number, or has taken over.
        """
        self.require_lease()
        if not write_once(self.root / f"plan-{number:04d}.parquet", retries_to_bytes(retries)):
            raise RunInUse(
                f"{self}: another driver has planned retry {number} at the same time",
                hint="let that driver finish, then repeat this command if dead letters remain",
            )

    def superseded(self) -> frozenset[int]:
        """Return the committed units whose dead letters are retried in other units."""
        if not self._retry_plans():
            return frozenset()
        plan = self.plan()
        retried = plan.retried_rows().keys() & self.committed()
        self.read_ahead(retried)
        usages = {unit: self.usage(unit) for unit in retried}
        return plan.superseded({unit: usage.num_rows + usage.num_failed_rows for unit, usage in usages.items()})

    def _plan_name(self) -> str:
        name = self.manifest().get("plan")
        if not isinstance(name, str) or not PLAN_FILE.fullmatch(name):
            raise ConfigError(f"{self._manifest} is damaged: it names no plan", hint=_NEW_RUN_HINT)
        return name

    def _retry_plans(self) -> list[StoragePath]:
        return sorted(self.root.glob("plan-*.parquet"), key=lambda path: path.name)

    def _orphaned_plans(self) -> list[StoragePath]:
        """Return plans of drivers that lost the race to create the run, or were killed before they wrote `run.json`."""
        valid = self._plan_name()
        return [path for path in self.root.glob("plan.*.parquet") if path.name != valid]

    # --- units

    def committed(self) -> set[int]:
        """Return the numbers of the committed units."""
        return set(unit_files(self.root))

    def commit(self, unit: int, table: pa.Table, usage: UnitUsage, dead_letters: Sequence[dict[str, Any]]) -> bool:
        """Commit a unit. Return False if another attempt committed it first; then this attempt has no effect.

        Raises:
            CapacityError: the disk is full, or the folder cannot be written. The unit is not committed.
            StorageError: S3 does not answer. The unit might be committed nevertheless.
        """
        failed_name = ""
        if dead_letters:
            # The name is unique to this attempt, so a slower attempt cannot replace the dead letters of the winner.
            failed_name = f"unit-{unit:08d}.{uuid.uuid4().hex[:8]}.jsonl"
        with converted_write_errors(self.unit_path(unit), hint=_WRITABLE_HINT):
            if failed_name:
                lines = "".join(to_json(letter) + "\n" for letter in dead_letters)
                write_atomic(self.failed / failed_name, lines.encode())
            metadata = {_USAGE: usage.to_json(), _FAILED: failed_name.encode()}
            table = table.replace_schema_metadata({**(table.schema.metadata or {}), **metadata})
            sink = io.BytesIO()
            pq.write_table(table, sink, compression="zstd")
            is_first = write_once(self.unit_path(unit), sink.getvalue())
        if not is_first and failed_name:
            (self.failed / failed_name).unlink(missing_ok=True)
        return is_first

    def unit_path(self, unit: int) -> StoragePath:
        """Return the path of the file that commits a unit."""
        return self.data / f"unit-{unit:08d}.parquet"

    def usages(self) -> Iterator[UnitUsage]:
        """Yield the usage of every committed unit, in order.

        Rows that are retried do not count as failed rows of the unit where they failed.
        """
        superseded, committed = self.superseded(), self.committed()
        self.read_ahead(committed)
        for unit in sorted(committed):
            usage = self.usage(unit)
            yield replace(usage, num_failed_rows=0) if unit in superseded else usage

    def usage(self, unit: int) -> UnitUsage:
        """Return the usage of a committed unit; raises PeagleError if the file is damaged."""
        return self._cached_metadata(unit).usage

    def dead_letters(self) -> Iterator[dict[str, Any]]:
        """Yield every valid dead letter: those of committed units, except rows that are retried."""
        superseded, committed = self.superseded(), self.committed()
        self.read_ahead(committed - superseded)
        for unit in sorted(committed - superseded):
            yield from self.letters_of_unit(unit)

    def letters_of_unit(self, unit: int) -> Iterator[dict[str, Any]]:
        """Yield the dead letters of a committed unit, including those that were retried."""
        if name := self.dead_letters_name(unit):
            path = self.failed / name
            try:
                with open_to_read(path) as lines:
                    yield from (json.loads(line) for line in lines)
            except (OSError, ValueError) as error:
                raise PeagleError(f"{path}, the dead letters of unit {unit}: {error}", hint=_LETTERS_HINT) from error

    def dead_letters_name(self, unit: int) -> str:
        """Return the name of a committed unit's file in `failed/`, or "" if it has no dead letters."""
        return self._cached_metadata(unit).failed_name

    def read_ahead(self, units: Iterable[int]) -> None:
        """Read the metadata of committed units on S3, many at a time. Does nothing for local files."""
        unread = [unit for unit in units if unit not in self._metadata and is_remote(self.unit_path(unit))]
        if unread:
            with ThreadPoolExecutor(_READERS) as readers:
                metadata = readers.map(read_metadata, map(self.unit_path, unread))
                self._metadata.update(zip(unread, metadata, strict=True))

    def _cached_metadata(self, unit: int) -> UnitMetadata:
        self.read_ahead([unit])
        return self._metadata.get(unit) or read_metadata(self.unit_path(unit))

    # --- the ledger

    def write_session(self, session: EngineSession) -> None:
        """Replace the heartbeat of an engine process."""
        write_session(self.ledger, session)

    def sessions(self) -> list[EngineSession]:
        """Return the last heartbeat of every engine process of this run."""
        return read_sessions(self.ledger)

    # --- leftovers

    def remove_leftovers(self) -> int:
        """Delete leftovers of killed or slower attempts, and return their number.

        Leftovers are temporary files, orphaned plans, and dead letters that their committed unit does not name. Notes
        (`suspects.py`) of committed units are also deleted, but not counted.
        """
        letters, committed = list(self.failed.glob("unit-*.jsonl")), self.committed()
        self.read_ahead(committed)
        leftovers = [*_temporary_files(self._folders), *self._orphaned_plans()]
        for path in letters:
            # The attempt that wrote dead letters of an uncommitted unit might commit it at any moment.
            match = DEAD_LETTERS_FILE.fullmatch(path.name)
            if match and int(match[1]) in committed and self.dead_letters_name(int(match[1])) != path.name:
                leftovers.append(path)
        self._delete([*leftovers, *stale_notes(self.suspects, committed)])
        return len(leftovers)

    def _delete(self, paths: Iterable[StoragePath]) -> None:
        """Delete files that were listed while this driver had the lease.

        A suspended driver may resume after its successor has finished. File names are never reused, and the lease is
        checked after the listing, so a successor's files are never deleted.
        """
        paths = list(paths)
        self.require_lease()
        for path in paths:
            path.unlink(missing_ok=True)

    def _make_folders(self) -> None:
        for folder in (*self._folders, self.root / LEASE_FOLDER):
            make_folder(folder)
        self.logs.mkdir(parents=True, exist_ok=True)


def unit_files(root: StoragePath) -> dict[int, StoragePath]:
    """Return the files of the committed units by number; empty if there is no run."""
    matches = ((path, UNIT_FILE.fullmatch(path.name)) for path in (root / "data").glob("unit-*.parquet"))
    return {int(match[1]): path for path, match in matches if match}


def uses_fake_engine(manifest: Mapping[str, Any]) -> bool:
    """Return whether a run uses the fake engine, by its `run.json`."""
    return bool(manifest.get("config", {}).get("engine") == "fake")


def read_metadata(path: StoragePath) -> UnitMetadata:
    """Read the metadata of a unit's file; raises PeagleError if the file is damaged, or was not written by peagle."""
    try:
        with open_to_read(path) as file:
            metadata: dict[bytes, bytes] = pq.read_schema(file).metadata or {}
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path, error) from error
    if _USAGE not in metadata or _FAILED not in metadata:
        raise PeagleError(f"{path} was not written by peagle", hint="move it out of the run directory")
    return UnitMetadata(UnitUsage.from_json(metadata[_USAGE]), metadata[_FAILED].decode())


def read_rows(
    path: StoragePath, columns: frozenset[str] | None, *, as_stored: bool = False
) -> Generator[pa.RecordBatch, None, None]:
    """Yield the rows of a unit in batches, by default with all columns; raises PeagleError if the file is damaged.

    Args:
        as_stored: use the column names in the file instead of the internal ones (`columns.py`).
    """
    try:
        with open_to_read(path) as file, pq.ParquetFile(file, pre_buffer=False) as parquet:
            stored_names = parquet.schema_arrow.names
            output_names = dict(
                zip(stored_names, stored_names if as_stored else internal_names(parquet.schema_arrow), strict=True)
            )
            selected = [name for name in stored_names if columns is None or output_names[name] in columns]
            new_names = [output_names[name] for name in selected]
            for batch in parquet.iter_batches(BATCH_ROWS, columns=selected, use_threads=False):
                yield cast_to_plain(batch.replace_schema_metadata(None)).rename_columns(new_names)
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path, error) from error


def _damaged(path: StoragePath, error: Exception) -> PeagleError:
    return PeagleError(
        f"{path} is damaged: {error}", hint="delete this file and run again: its rows will be generated again"
    )


def _parse_file(path: StoragePath, parse: Callable[[bytes], _Parsed]) -> _Parsed:
    try:
        return parse(path.read_bytes())
    except (OSError, pa.ArrowException, KeyError) as error:
        raise ConfigError(f"{path} is damaged: {error}", hint=_NEW_RUN_HINT) from error


def _temporary_files(folders: Iterable[StoragePath]) -> list[StoragePath]:
    """Return unfinished files. S3 has none, since objects are created atomically."""
    local = (folder for folder in folders if not is_remote(folder))
    return [path for folder in local for path in folder.glob(f".*{TEMPORARY_SUFFIX}")]
