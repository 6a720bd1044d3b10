"""Folders of an object store: list, read ranges, download.

A download fetches pieces of the listed version (`If-Match`) into a hidden file next to its final name, and flushes each
piece to the disk, so that it can continue after a kill or a power cut.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from peagle.errors import StorageError
from peagle.files import sync_folder
from peagle.storage.s3_client import Address, store
from peagle.storage.s3_path import S3Path

_PIECE_BYTES = 1 << 25


@dataclass(frozen=True, slots=True)
class FolderFile:
    """A file of a listing."""

    name: str
    num_bytes: int
    etag: str


def list_files(folder: S3Path) -> tuple[list[FolderFile], list[str]]:
    """Return the files of a folder, except hidden ones, and the names of its subfolders."""
    listed = sorted(store().entries(Address(folder.bucket, folder.key)), key=lambda entry: entry.name)
    files = [
        FolderFile(entry.name, entry.num_bytes, entry.etag)
        for entry in listed
        if entry.etag is not None and not entry.name.startswith(".")
    ]
    return files, [entry.name for entry in listed if entry.etag is None]


def read_ranges(folder: S3Path, file: FolderFile, ranges: list[range]) -> bytes:
    """Return the bytes of these ranges of a file; StorageError if the file changed after it was listed."""
    return b"".join(_read(folder, file, part) for part in ranges)


def partial_path(file: FolderFile, to: Path) -> Path:
    """Return the path of a file in the folder `to` while it is being downloaded."""
    return to / f".{file.name}.{hashlib.sha256(file.etag.encode()).hexdigest()[:8]}.part"


def fetch_file(
    folder: S3Path, file: FolderFile, to: Path, *, count: Callable[[int], None], is_cancelled: Callable[[], bool]
) -> None:
    """Download a file into the folder `to`, or continue its download. No other process may be downloading it.

    Args:
        count: called with the number of bytes of each piece, and first with the bytes of an earlier download.
        is_cancelled: called before each piece; the download stops if it returns True.
    """
    part = partial_path(file, to)
    with part.open("ab") as out:
        num_bytes = min(os.fstat(out.fileno()).st_size, file.num_bytes)
        begin = max(0, num_bytes - 1) // _PIECE_BYTES * _PIECE_BYTES  # a power cut might have truncated the last piece
        out.truncate(begin)
        count(begin)
        for first in range(begin, file.num_bytes, _PIECE_BYTES):
            if is_cancelled():
                return
            piece = range(first, min(first + _PIECE_BYTES, file.num_bytes))
            out.write(_read(folder, file, piece))
            out.flush()
            os.fdatasync(out.fileno())
            count(len(piece))
    part.replace(to / file.name)
    sync_folder(to)


def _read(folder: S3Path, file: FolderFile, piece: range) -> bytes:
    address = Address(folder.bucket, f"{folder.key}/{file.name}")
    try:
        data = store().read_range(address, piece.start, piece.stop - 1, file.etag)
    except FileNotFoundError as error:
        raise StorageError(f"{address}: was deleted while it was read", hint="repeat the command") from error
    if len(data) != len(piece):
        raise StorageError(
            f"{address}: the store returned {len(data)} of {len(piece)} bytes", hint="repeat the command"
        )
    return data
