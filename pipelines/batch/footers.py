"""The file of a committed unit: its rows, and in the metadata its usage and the name of its dead letters.

So output and account are committed together. It knows one file's form; it does not know how the file becomes committed.
"""

import io
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from peagle.economics.usage import UnitUsage
from peagle.errors import PeagleError
from peagle.storage import Place, is_remote, open_to_read

_USAGE = b"peagle.usage"
_FAILED = b"peagle.failed"
_READERS = 16  # requests at once where each takes a while


@dataclass(frozen=True, slots=True)
class Footer:
    """What a file says of its unit. `failed_name` is empty where no row failed."""

    usage: UnitUsage
    failed_name: str


def unit_bytes(table: pa.Table, footer: Footer) -> bytes:
    """The file of a unit."""
    ours = {_USAGE: footer.usage.to_json(), _FAILED: footer.failed_name.encode()}
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({**(table.schema.metadata or {}), **ours}), sink, compression="zstd")
    return sink.getvalue()


def read_footer(path: Place) -> Footer:
    """What the file says of its unit.

    Raises:
        PeagleError: it is damaged, or none of ours.
    """
    try:
        with open_to_read(path) as file:
            metadata: dict[bytes, bytes] = pq.read_schema(file).metadata or {}
    except (OSError, pa.ArrowException) as error:
        raise PeagleError(
            f"{path} is damaged: {error}",
            hint="delete that file and run again: its rows are then done anew",
        ) from error
    if _USAGE not in metadata or _FAILED not in metadata:
        raise PeagleError(f"{path} was not written by peagle", hint="move it out of the run directory")
    return Footer(UnitUsage.from_json(metadata[_USAGE]), metadata[_FAILED].decode())


class Footers:
    """The footers of a run. Where each takes a request it is read once, which can be done for many at once."""

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
