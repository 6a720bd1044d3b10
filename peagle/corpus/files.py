"""The files of a corpus: location, format, compression, bytes.

Readers that only go forward are kept between units.

It knows local disks and `s3://`; it does not know what a row is.

A compressed file, or a Parquet row group, cannot be entered in the middle. A process that prepares units gets those of
one file in rising order, so it keeps the reader it has and skips ahead: each process passes over a file once, not once
a unit. A unit that lies behind starts again at the beginning, which is slow and right.
"""

import atexit
import contextlib
import fnmatch
import glob
import gzip
import io
import os
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Generic, Protocol, TypeVar, cast

import pyarrow as pa

from peagle.errors import InputError
from peagle.private import user_path

FORMATS = ("parquet", "jsonl", "csv", "text", "openai-batch")
SUFFIXES = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".txt": "text"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_SUFFIX_OF = {"jsonl": "jsonl", "openai-batch": "jsonl", "parquet": "parquet", "csv": "csv", "text": "text"}
_READ_ERRORS = (OSError, EOFError, zlib.error, pa.ArrowException)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of a corpus. `path` is absolute, or begins with `s3://`."""

    path: str
    format: str
    size: int


def discover(uri: str, input_format: str = "auto", *, outside: str | None = None) -> list[SourceFile]:
    """Find the files of a corpus, sorted: a file, a folder (no sub-folders), a glob.

    A name that is there is taken as it stands, whatever its characters. A glob leaves hidden files and folders out
    unless it names their dot, as shells do.

    Args:
        outside: a folder from which a glob takes nothing: the run's own.

    Raises:
        InputError: nothing there, an unknown scheme, or a suffix whose format is not known.
    """
    located = _remote(uri, outside) if "://" in uri else _local(uri, outside)
    if isinstance(located, _Folder):
        found = _of_folder(uri, located.files, input_format)
    else:
        found = [(path, size, _format(path, input_format)) for path, size in located]
    for path, size, _ in found:
        _require_unicode(path)
        if size == 0:
            raise InputError(f"input {path}: the file is empty")
    return [SourceFile(path=path, format=kind, size=size) for path, size, kind in found]


def compression_of(path: str) -> str | None:
    """Its compression by the last suffix, or None.

    >>> compression_of("a.jsonl.gz"), compression_of("a.jsonl")
    ('gzip', None)
    """
    return COMPRESSIONS.get(PurePosixPath(path).suffix)


def open_raw(path: str) -> io.BufferedReader:
    """The file's bytes as they are stored; it can seek."""
    if "://" in path:
        return io.BufferedReader(filesystem(path).open(path, "rb"), 1 << 20)
    return Path(path).open("rb")


def decompressed(path: str, raw: BinaryIO) -> BinaryIO:
    """The decompressed bytes of `raw`, to be read forward.

    The name of the file tells the compression.
    """
    compression = compression_of(path)
    if compression == "gzip":
        return cast(BinaryIO, io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 20))
    if compression == "zstd":
        return cast(BinaryIO, io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), 1 << 20))
    return raw


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Turn what goes wrong with a file's bytes into an error that names the file.

    Raises:
        InputError: it cannot be read, or does not decompress.
    """
    try:
        yield
    except _READ_ERRORS as error:
        compression = compression_of(path)
        if compression is not None and not isinstance(error, FileNotFoundError | PermissionError):
            raise InputError(
                f"input {path}: damaged, or not {compression}: {error}", hint="compress the file again"
            ) from error
        raise InputError(f"input {path}: cannot be read: {error}") from error


def filesystem(path: str) -> Any:
    """The fsspec file system of an `s3://` path.

    Endpoint and credentials come from the AWS variables.
    """
    import fsspec

    return fsspec.filesystem("s3")


class _Folder:
    def __init__(self, files: list[tuple[str, int]]) -> None:
        self.files = files


def _local(uri: str, outside: str | None) -> "list[tuple[str, int]] | _Folder":
    path = user_path(uri).absolute()  # workers have other working directories
    if path.is_dir():
        return _Folder(sorted((str(p), p.stat().st_size) for p in path.iterdir() if p.is_file()))
    files = [path]
    if not path.is_file():
        own = None if outside is None or "://" in outside else Path(outside).resolve()
        matches = sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207 - that one takes hidden ones
        files = [p for p in matches if p.is_file() and (own is None or not p.resolve().is_relative_to(own))]
    if not files:
        raise _no_such_file(uri)
    return [(str(p), p.stat().st_size) for p in files]


def _remote(uri: str, outside: str | None) -> "list[tuple[str, int]] | _Folder":
    if not uri.startswith("s3://"):
        raise InputError(f"input {uri!r}: only local files and s3:// are read", hint="copy the corpus to one of them")
    try:
        infos, is_folder = _listing(filesystem(uri), uri, outside)
    except FileNotFoundError as error:
        raise _no_such_file(uri) from error
    except Exception as error:  # the client raises what its layers raise
        raise InputError(
            f"input {uri!r}: the store answers {type(error).__name__}: {error}",
            hint="AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION say where and who",
        ) from error
    files = sorted((f"s3://{i['name']}", int(i["size"])) for i in infos if i["type"] == "file")
    if not files and not is_folder:
        raise _no_such_file(uri)
    return _Folder(files) if is_folder else files


def _listing(store: Any, uri: str, outside: str | None) -> tuple[list[dict[str, Any]], bool]:
    """A store's objects under a name, and whether the name is a folder's."""
    if not uri.endswith("/") and store.isfile(uri):
        return [store.info(uri)], False
    if not any(c in uri for c in "*?[") or store.isdir(uri):
        return store.ls(uri, detail=True), True
    shown = [part for part in PurePosixPath(uri).parts if part.startswith(".")]
    own = None if outside is None else outside.removeprefix("s3://").rstrip("/") + "/"
    infos = list(store.glob(uri, detail=True).values())
    return [i for i in infos if not _is_hidden(i["name"], shown) and not (own and i["name"].startswith(own))], False


def _is_hidden(name: str, shown: list[str]) -> bool:
    """Whether a part of the name begins with a dot that the glob does not match."""
    dotted = [part for part in PurePosixPath(name).parts if part.startswith(".")]
    return not all(any(fnmatch.fnmatchcase(part, pattern) for pattern in shown) for part in dotted)


def _require_unicode(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"input {os.fsencode(path)!r}: its name is not UTF-8", hint="rename the file or the folder"
        ) from error


def _no_such_file(uri: str) -> InputError:
    return InputError(f"input {uri!r}: no such file", hint="give a file, a folder or a quoted glob")


def _of_folder(uri: str, files: list[tuple[str, int]], input_format: str) -> list[tuple[str, int, str]]:
    """The corpus files among those of a folder.

    Text counts only where nothing else is: a README is no corpus.
    """
    visible = [(path, size) for path, size in files if not PurePosixPath(path).name.startswith(".")]
    known = [(path, size, kind) for path, size in visible if (kind := _kind(path))]
    if input_format == "auto":
        chosen = [file for file in known if file[2] != "text"] or known
    else:
        chosen = [(path, size, input_format) for path, size, kind in known if kind == _SUFFIX_OF[input_format]]
    if not chosen:
        wanted = [
            s for s, kind in SUFFIXES.items() if input_format in ("auto", kind) or _SUFFIX_OF[input_format] == kind
        ]
        raise InputError(f"input {uri!r}: the folder holds no {' or '.join(wanted)} file")
    return chosen


def _format(path: str, input_format: str) -> str:
    kind = input_format if input_format != "auto" else _kind(path)
    if kind is None:
        known = f"{', '.join(SUFFIXES)}, each but .parquet also with .gz or .zst"
        suffix = "".join(PurePosixPath(path).suffixes[-2:]) or "no suffix"
        raise InputError(
            f"input {path}: unknown format {suffix!r}", hint=f"known: {known}; or say it with --input-format"
        )
    if kind == "parquet" and compression_of(path):
        raise InputError(f"input {path}: Parquet in {compression_of(path)} is not read", hint="decompress the file")
    return kind


def _kind(path: str) -> str | None:
    name = PurePosixPath(path)
    return SUFFIXES.get(PurePosixPath(name.stem).suffix if name.suffix in COMPRESSIONS else name.suffix)


_KEPT = 4  # files that one process reads at the same time


class _Reader(Protocol):
    position: int

    def close(self) -> None:
        """Let the file go."""


Reader = TypeVar("Reader", bound=_Reader)


class ForwardReaders(Generic[Reader]):
    """Readers by path.

    One that is taken is nobody else's, and one that failed is not put back.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Reader] = OrderedDict()
        atexit.register(self.close)  # the interpreter would name each file that is still open

    def take(self, path: str, position: int) -> Reader | None:
        """A reader of `path` that is not yet past `position`, if there is one."""
        reader = self._kept.pop(path, None)
        if reader is not None and reader.position > position:
            reader.close()
            return None
        return reader

    def put_back(self, path: str, reader: Reader) -> None:
        """Keep a reader for the next unit of its file."""
        if (other := self._kept.pop(path, None)) is not None:
            other.close()
        self._kept[path] = reader
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)[1].close()

    def close(self) -> None:
        """Let all files go."""
        while self._kept:
            self._kept.popitem()[1].close()
