"""A run directory's files: plans, footers of units, and leftovers.

Each plan is created once, by the first driver.

    run.json            the manifest, with the name of the plan's file
    plan.ID.parquet     a plan, under a name that no other driver uses
    plan-N.parquet      the units of the N-th retry

A plan is written first, then `run.json`, which exists once: of several drivers one gets its plan into it, and the
others read that one. A retry is numbered from the plan that it was made from, so of two that were made from the same
plan one is written. It knows places; it knows neither units' results nor leases.

A unit's file holds its rows and its usage, so output and account are committed together.
"""

import io
import json
import re
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from peagle.corpus.extensions import plain
from peagle.economics.usage import UnitUsage
from peagle.errors import ConfigError, PeagleError
from peagle.files import TEMPORARY_SUFFIX, json_bytes
from peagle.runs.plan import Plan, Retry, plan_from_bytes, plan_to_bytes, retries_from_bytes, retries_to_bytes
from peagle.storage import Place, is_remote, open_to_read, write_once

PLAN_FILE = re.compile(r"plan\.[0-9a-f]{12}\.parquet")
_Parsed = TypeVar("_Parsed")
_NEW = "start a new run directory"


class PlanFiles:
    """The manifest and the plans of one run directory."""

    def __init__(self, root: Place) -> None:
        self._root = root
        self._manifest = root / "run.json"

    @property
    def exists(self) -> bool:
        """Whether a run was started here."""
        return self._manifest.exists()

    def create(self, manifest: dict[str, Any], plan: Plan) -> bool:
        """Write a plan and the manifest that names it.

        False where another driver's manifest is there already.

        Raises:
            OSError, StorageError: they cannot be written.
        """
        path = self._root / f"plan.{uuid.uuid4().hex[:12]}.parquet"
        write_once(path, plan_to_bytes(plan))
        is_first = write_once(self._manifest, json_bytes({**manifest, "plan": path.name}))
        if not is_first:
            path.unlink(missing_ok=True)
        return is_first

    def manifest(self) -> dict[str, Any]:
        """`run.json`.

        Raises:
            ConfigError: there is no run here, or its manifest is damaged.
        """
        try:
            manifest: dict[str, Any] = json.loads(self._manifest.read_bytes())
        except FileNotFoundError as error:
            raise ConfigError(f"{self._root} is no run directory: it has no run.json") from error
        except ValueError as error:
            raise ConfigError(f"{self._manifest} is damaged: {error}", hint=_NEW) from error
        return manifest

    def plan(self) -> Plan:
        """The plan that the manifest names, and the units of retries.

        Raises:
            ConfigError: missing or damaged.
        """
        return self.with_retries(_parsed(self._root / self._plan_name(), plan_from_bytes))

    def with_retries(self, plan: Plan) -> Plan:
        """A plan with the units of all retries.

        Raises:
            ConfigError: a plan of a retry is damaged.
        """
        for path in self._retries():
            plan = plan.with_retries(_parsed(path, retries_from_bytes))
        return plan

    def num_retries(self) -> int:
        """How many retries were planned."""
        return len(self._retries())

    def add_retries(self, retries: Sequence[Retry], number: int) -> bool:
        """Plan the retry of that number; False where another driver has planned it."""
        return write_once(self._root / f"plan-{number:04d}.parquet", retries_to_bytes(retries))

    def losers(self) -> list[Place]:
        """Plans that no manifest will ever name.

        Their drivers were not the first, or were killed before.
        """
        mine = self._plan_name()
        return [path for path in self._root.glob("plan.*.parquet") if path.name != mine]

    def _plan_name(self) -> str:
        name = self.manifest().get("plan")
        if not isinstance(name, str) or not PLAN_FILE.fullmatch(name):
            raise ConfigError(f"{self._manifest} is damaged: it names no plan", hint=_NEW)
        return name

    def _retries(self) -> list[Place]:
        return sorted(self._root.glob("plan-*.parquet"), key=lambda path: path.name)


def _parsed(path: Place, parse: Callable[[bytes], _Parsed]) -> _Parsed:
    try:
        return parse(path.read_bytes())
    except (OSError, pa.ArrowException, KeyError) as error:
        raise ConfigError(f"{path} is damaged: {error}", hint=_NEW) from error


def is_stand_in(manifest: Mapping[str, Any]) -> bool:
    """Whether the fake engine answers a run, by its `run.json`."""
    return bool(manifest.get("config", {}).get("engine") == "fake")


_USAGE = b"peagle.usage"
_FAILED = b"peagle.failed"
BATCH_ROWS = 1024
_READERS = 16  # requests at once where each takes a while


@dataclass(frozen=True, slots=True)
class Footer:
    """The description of a unit in its file.

    `failed_name` is empty where no row failed.
    """

    usage: UnitUsage
    failed_name: str


def unit_bytes(table: pa.Table, footer: Footer) -> bytes:
    """The file of a unit."""
    ours = {_USAGE: footer.usage.to_json(), _FAILED: footer.failed_name.encode()}
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({**(table.schema.metadata or {}), **ours}), sink, compression="zstd")
    return sink.getvalue()


def read_footer(path: Place) -> Footer:
    """Read the description of a unit from its file.

    Raises:
        PeagleError: it is damaged, or none of ours.
    """
    try:
        with open_to_read(path) as file:
            metadata: dict[bytes, bytes] = pq.read_schema(file).metadata or {}
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path, error) from error
    if _USAGE not in metadata or _FAILED not in metadata:
        raise PeagleError(f"{path} was not written by peagle", hint="move it out of the run directory")
    return Footer(UnitUsage.from_json(metadata[_USAGE]), metadata[_FAILED].decode())


def read_rows(path: Place, columns: frozenset[str] | None) -> Generator[pa.RecordBatch, None, None]:
    """Rows of a unit, `BATCH_ROWS` at a time.

    `columns` are those that are read, None is all.

    Raises:
        PeagleError: it is damaged.
    """
    try:
        with open_to_read(path) as file, pq.ParquetFile(file) as parquet:
            read = [name for name in parquet.schema_arrow.names if columns is None or name in columns]
            for batch in parquet.iter_batches(BATCH_ROWS, columns=read):
                yield plain(batch.replace_schema_metadata(None))
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path, error) from error


def _damaged(path: Place, error: Exception) -> PeagleError:
    return PeagleError(
        f"{path} is damaged: {error}", hint="delete that file and run again: its rows are then done anew"
    )


class Footers:
    """The footers of a run.

    Where each takes a request it is read once, which can be done for many at once.
    """

    def __init__(self, path_of: Callable[[int], Place]) -> None:
        self._path_of = path_of
        self._kept: dict[int, Footer] = {}

    def read(self, unit: int) -> Footer:
        """That of one committed unit.

        Raises:
            PeagleError: its file is damaged, or none of ours.
        """
        self.read_ahead([unit])
        return self._kept.get(unit) or read_footer(self._path_of(unit))

    def read_ahead(self, units: Iterable[int]) -> None:
        """Read those of these committed units, where it helps."""
        unread = [unit for unit in units if unit not in self._kept and is_remote(self._path_of(unit))]
        if unread:
            with ThreadPoolExecutor(_READERS) as readers:
                footers = readers.map(read_footer, map(self._path_of, unread))
                self._kept.update(zip(unread, footers, strict=True))


_LETTERS = re.compile(r"unit-(\d{8,})\.\w+\.jsonl")


def is_temporary(name: str) -> bool:
    """Whether a file is one that its writer has not finished."""
    return name.startswith(".") and name.endswith(TEMPORARY_SUFFIX)


def temporaries(folders: Iterable[Place]) -> list[Place]:
    """Unfinished files of these folders.

    A store has none, for an object is there as a whole or not at all.
    """
    local = (folder for folder in folders if not is_remote(folder))
    return [path for folder in local for path in folder.glob(f".*{TEMPORARY_SUFFIX}")]


def orphans(letters: Iterable[Place], named: Mapping[int, str]) -> list[Place]:
    """Files of dead letters that their committed unit does not name.

    Those of a unit that is not committed may be named in a moment, by the attempt that wrote them.

    Args:
        named: the file that each committed unit names; empty where it has no dead letters.
    """
    found = ((path, _LETTERS.fullmatch(path.name)) for path in letters)
    return [path for path, match in found if match and named.get(int(match[1]), path.name) != path.name]
