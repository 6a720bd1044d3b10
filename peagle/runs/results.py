"""The results of a bulk run, read from its directory: rows, failed rows, report and status."""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from peagle.corpus.extensions import to_values
from peagle.runs.directory import RunDirectory
from peagle.runs.export import batches_in_order
from peagle.runs.report import make_report
from peagle.runs.status import RunStatus, StatusReader
from peagle.storage import StoragePath

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

_MAX_DEPTH = 3


class Run:
    """A bulk run that was started, finished or not. Reads only committed rows, in the order of the corpus.

    Attributes:
        path: the run directory.
    """

    def __init__(self, directory: RunDirectory) -> None:
        directory.manifest()
        self.path = str(directory)
        self._directory = directory

    @classmethod
    def open(cls, path: str | StoragePath) -> Self:
        """Open a run directory, local or `s3://BUCKET/FOLDER`.

        Raises:
            ConfigError: there is no run.
        """
        return cls(RunDirectory(path))

    def __repr__(self) -> str:
        return f"Run.open({self.path!r})"

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """Yield the rows with the input's and the output's columns, or only with `columns`.

        Raises:
            PeagleError: a file is damaged.
        """
        for batch in self._batches(columns):
            yield from to_values(batch)

    def failed_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the failed rows, except those that were retried, with `id`, `reason`, `message` and the input `row`.

        Raises:
            PeagleError: a file is damaged.
        """
        yield from self._directory.dead_letters()

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows as a table, which has no columns if no row is committed."""
        batches = list(self._batches(columns))
        return pa.Table.from_batches(batches) if batches else pa.table({})

    def to_pandas(self, columns: Sequence[str] | None = None) -> "pd.DataFrame":
        """Return the rows as a pandas DataFrame."""
        return self.to_arrow(columns).to_pandas()

    @property
    def report(self) -> dict[str, Any]:
        """The content of `report.json`, which is written if it does not exist."""
        path = self._directory.root / "report.json"
        if not path.exists():
            return make_report(self._directory)
        report: dict[str, Any] = json.loads(path.read_bytes())
        return report

    def status(self) -> RunStatus:
        """Return the current state, progress and cost."""
        return StatusReader(self._directory).read()

    def _batches(self, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        return batches_in_order(self._directory, None if columns is None else frozenset(columns), as_stored=True)


def find_runs(folder: StoragePath, *, max_depth: int = _MAX_DEPTH) -> Iterator[RunDirectory]:
    """Yield the bulk runs in a folder and in its subfolders, by name."""
    run = RunDirectory(folder)
    if run.exists:
        if "plan" in run.manifest():  # the run.json of a training run has no plan
            yield run
    elif max_depth and folder.is_dir():
        for child in sorted(folder.iterdir(), key=str):
            if child.is_dir():
                yield from find_runs(child, max_depth=max_depth - 1)
