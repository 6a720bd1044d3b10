"""Folders of a store: their listing, ranges of files, and copies on a disk.

A file is fetched in pieces, each of the very content that the listing saw (`If-Match`), into a hidden file beside its
name. A piece is on the disk before the next one is asked for, so the copy that a killed process left is continued, also
after a power cut.

It knows names and bytes; it does not know what they mean.
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
    """A file of a folder, as its listing has it."""

    name: str
    num_bytes: int
    etag: str


def list_files(folder: S3Path) -> tuple[list[FolderFile], list[str]]:
    """A folder's files by name, without hidden ones, and the folders within it.

    Raises:
        StorageError: the store refuses, or does not answer.
    """
    listed = sorted(store().names(Address(folder.bucket, folder.key)), key=lambda one: one.name)
    files = [FolderFile(one.name, one.num_bytes, one.etag) for one in listed if one.etag is not None]
    return [file for file in files if not file.name.startswith(".")], [one.name for one in listed if one.etag is None]


def read_ranges(folder: S3Path, file: FolderFile, ranges: list[range]) -> bytes:
    """The bytes of a file at these places.

    Raises:
        StorageError: the file is not what the listing saw any more, or the store refuses.
    """
    return b"".join(_read(folder, file, one) for one in ranges)


def copy_path(file: FolderFile, to: Path) -> Path:
    """Where the beginning of a file lies in the folder `to` until it is whole."""
    return to / f".{file.name}.{hashlib.sha256(file.etag.encode()).hexdigest()[:8]}.part"


def fetch_file(
    folder: S3Path, file: FolderFile, to: Path, *, count: Callable[[int], None], is_given_up: Callable[[], bool]
) -> None:
    """Copy a file into the folder `to`; go on where an earlier process ended.

    Nobody else may be fetching it.

    Args:
        count: told of bytes that are there, those of earlier processes too.
        is_given_up: asked before each piece.

    Raises:
        StorageError: as `read_ranges`.
        OSError: the disk is full, or the folder cannot be written.
    """
    part = copy_path(file, to)
    with part.open("ab") as out:
        there = min(os.fstat(out.fileno()).st_size, file.num_bytes)
        begin = max(0, there - 1) // _PIECE_BYTES * _PIECE_BYTES  # the last piece may have been cut by a power cut
        out.truncate(begin)
        count(begin)
        for first in range(begin, file.num_bytes, _PIECE_BYTES):
            if is_given_up():
                return
            piece = range(first, min(first + _PIECE_BYTES, file.num_bytes))
            out.write(_read(folder, file, piece))
            out.flush()
            os.fdatasync(out.fileno())
            count(len(piece))
    part.replace(to / file.name)
    sync_folder(to)


def _read(folder: S3Path, file: FolderFile, piece: range) -> bytes:
    at = Address(folder.bucket, f"{folder.key}/{file.name}")
    try:
        data = store().read_range(at, piece.start, piece.stop - 1, file.etag)
    except FileNotFoundError as error:
        raise StorageError(f"{at}: was deleted while it was read", hint="repeat the command") from error
    if len(data) != len(piece):
        raise StorageError(f"{at}: the store gave {len(data)} of {len(piece)} bytes", hint="repeat the command")
    return data
