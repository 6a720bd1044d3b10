"""The files of a run directory that say what is to be done: each is created once, by the first driver.

    run.json            the manifest, with the name of the plan's file
    plan.ID.parquet     a plan, under a name that no other driver uses
    plan-N.parquet      the units of the N-th retry

A plan is written first, then `run.json`, which exists once: of several drivers one gets its plan into it, and the
others read that one. A retry is numbered from the plan that it was made from, so of two that were made from the same
plan one is written. It knows places; it knows neither units' results nor leases.
"""

import json
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from peagle.errors import ConfigError
from peagle.files import json_bytes
from peagle.storage import Place, write_once
from pipelines.batch.plan import (
    Plan,
    Retry,
    plan_from_bytes,
    plan_to_bytes,
    retries_from_bytes,
    retries_to_bytes,
)

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
        """Write a plan and the manifest that names it; False where another driver's manifest is there already.

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
        """Plans that no manifest will ever name: of drivers that were not the first, or were killed before."""
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
