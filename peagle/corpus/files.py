"""The files of a corpus: discovery, format, compression, bytes.

A compressed file or a Parquet row group can only be read from the beginning. A process usually gets the units of a file
in order, so it keeps the reader open, skips ahead, and reads each file only once. For an earlier unit, the file is read
again from the beginning.
"""

import atexit
import contextlib
import fnmatch
import glob
import gzip
import io
import os
import stat
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Generic, NoReturn, Protocol, TypeVar, cast

import pyarrow as pa

from peagle.errors import InputError
from peagle.private import user_path

FORMATS = ("parquet", "jsonl", "csv", "text", "openai-batch")
SUFFIXES = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".txt": "text"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_KNOWN_SUFFIXES = f"{', '.join(SUFFIXES)}; all but .parquet also with .gz or .zst"
# Suffixes of data formats that are not supported. A note names such files in a folder.
_OTHER_DATA = frozenset({
    ".json", ".jsonlines", ".tsv", ".tab", ".psv", ".xls", ".xlsx", ".ods", ".arrow", ".feather", ".ipc", ".avro",
    ".orc", ".parq", ".pq", ".pkl", ".npy", ".npz", ".msgpack", ".db", ".sqlite", ".zip", ".tar", ".tgz", ".7z", ".rar",
    ".bz2", ".xz", ".lz4", ".br", ".snappy", ".z", ".gzip",
})  # fmt: skip
# Text files with these names are ignored without a note.
_DOCUMENTS = frozenset({"readme", "license", "licence", "notice", "changelog", "requirements"})
# Input format -> format of its files in `SUFFIXES`; OpenAI batches are JSONL files.
_SUFFIX_FORMATS = {"jsonl": "jsonl", "openai-batch": "jsonl", "parquet": "parquet", "csv": "csv", "text": "text"}
# Files that other programs leave next to data: Spark, Hadoop, Hive, Delta Lake, archives and desktops.
_MARKERS = (
    "_SUCCESS", "_FAILURE", "_committed_*", "_started_*", "_metadata", "_common_metadata", "*.crc", "*_$folder$",
    "_temporary", "_delta_log", "_change_data", "_spark_metadata", "__MACOSX", "Thumbs.db", "desktop.ini",
)  # fmt: skip
_SPECIAL_FILES = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_MAX_ENTRIES = 1000  # files of a subfolder that are checked
_READ_ERRORS = (OSError, EOFError, zlib.error, pa.ArrowException)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of a corpus. `path` is absolute, or begins with `s3://`."""

    path: str
    format: str
    size: int


def write_note(note: str) -> None:
    sys.stderr.write(f"note: {note}\n")


def discover(
    uri: str, input_format: str = "auto", *, exclude: str | None = None, announce: Callable[[str], None] = write_note
) -> list[SourceFile]:
    """Find the files of a corpus: a file, a folder (not its subfolders), or a glob. The result is sorted.

    The name of an existing file is taken literally, even if it contains wildcards. A glob skips hidden files and
    markers such as `_SUCCESS`, unless a part of it begins like them, as in `_*`. Suffixes are not case-sensitive.

    Args:
        exclude: the run directory; a glob does not match files in it.
        announce: called with a note for each reason to ignore files of a folder that might be data.

    Raises:
        InputError: a file does not exist or is not a regular file, or the scheme or suffix is unknown.
    """
    matches_or_folder = _locate_remote(uri, exclude) if "://" in uri else _locate_local(uri, exclude)
    if isinstance(matches_or_folder, _Folder):
        files = _files_in_folder(uri, matches_or_folder, input_format, announce)
    else:
        files = [(path, size, _required_format(path, input_format)) for path, size in matches_or_folder]
    for path, size, _ in files:
        try:
            path.encode()
        except UnicodeEncodeError as error:
            hint = "rename the file or the folder"
            raise InputError(f"input {os.fsencode(path)!r}: its name is not valid UTF-8", hint=hint) from error
        if size == 0:
            raise InputError(f"input {path}: the file is empty")
    return [SourceFile(path=path, format=kind, size=size) for path, size, kind in files]


def compression_of(path: str) -> str | None:
    """Return the compression by the last suffix, or None.

    >>> compression_of("a.jsonl.GZ"), compression_of("a.jsonl")
    ('gzip', None)
    """
    return COMPRESSIONS.get(PurePosixPath(path).suffix.lower())


def open_raw(path: str) -> io.BufferedReader:
    """Open a seekable file with the stored bytes."""
    if "://" in path:
        return io.BufferedReader(filesystem(path).open(path, "rb"), 1 << 20)
    return Path(path).open("rb")


def decompress(path: str, raw: BinaryIO) -> BinaryIO:
    """Return a forward-only stream of the decompressed bytes; the file name determines the compression."""
    compression = compression_of(path)
    if compression == "gzip":
        return cast(BinaryIO, io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 20))
    if compression == "zstd":
        return cast(BinaryIO, io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), 1 << 20))
    return raw


@contextlib.contextmanager
def read_errors_as_input_error(path: str) -> Iterator[None]:
    """Convert read errors to an InputError with the file name."""
    try:
        yield
    except _READ_ERRORS as error:
        compression = compression_of(path)
        if compression is not None and not isinstance(error, FileNotFoundError | PermissionError):
            hint = "compress the file again"
            raise InputError(f"input {path}: damaged, or not {compression}: {error}", hint=hint) from error
        raise InputError(f"input {path}: cannot be read: {error}") from error


def filesystem(path: str) -> Any:
    """Return fsspec's S3 file system, which reads AWS's environment variables; all remote paths are on S3."""
    import fsspec

    return fsspec.filesystem("s3")


@dataclass(frozen=True, kw_only=True)
class _Folder:
    """The files of a folder with their sizes, and subfolders that might contain data."""

    files: list[tuple[str, int]]
    sub_folders: list[str]


def _locate_local(uri: str, exclude: str | None) -> "list[tuple[str, int]] | _Folder":
    """Return the matching files with their sizes, or the content of a folder."""
    path = user_path(uri).absolute()  # workers have other working directories
    try:
        if (path.is_relative_to("/dev") or path.is_relative_to("/proc")) and path.is_file():
            path = path.resolve()  # workers have other open files; /dev/stdin may be a regular file
        if path.is_dir():
            folder = _Folder(files=[], sub_folders=[])
            for entry in sorted(path.iterdir()):
                if entry.is_dir():
                    if _has_data(entry):
                        folder.sub_folders.append(str(entry))
                elif entry.is_file() or (_format_by_suffix(str(entry)) is not None and not entry.name.startswith(".")):
                    folder.files.append(_with_size(entry))  # refuses a pipe or a device with a data suffix
            return folder
        if os.path.lexists(path):
            return [_with_size(path)]
        run_folder = None if exclude is None or "://" in exclude else Path(exclude).resolve()
        matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - Path.glob would also match hidden files
        matches = [name for name in matches if not Path(name).is_dir()]
        files = [Path(name) for name in _without_markers(uri, str(path), matches)]
        files = [file for file in files if run_folder is None or not file.resolve().is_relative_to(run_folder)]
        return [_with_size(file) for file in files] or _raise_no_such_file(uri)
    except OSError as error:
        raise InputError(f"input {uri!r}: cannot be read: {error.strerror}") from error


def _has_data(folder: Path) -> bool:
    """Return whether the first files of a subfolder include data other than text. False for a run directory."""
    if _is_skipped(folder.name, []) or (folder / "run.json").exists():
        return False
    # A folder without files counts as one entry, so that a tree of empty folders is not searched completely.
    names = (name for _, _, files in os.walk(folder) for name in files or ("",))
    return any(_format_by_suffix(name) not in (None, "text") for name in islice(names, _MAX_ENTRIES))


def _with_size(path: Path) -> tuple[str, int]:
    """Return a file's path and size, or raise InputError if it is not a regular file."""
    if path.is_symlink() and not path.exists():
        target = str(path.readlink())
        raise InputError(
            f"input {str(path)!r}: a symbolic link to {target!r}, which does not exist",
            hint="repair or remove the link",
        )
    status = path.stat()
    if file_type := _SPECIAL_FILES.get(stat.S_IFMT(status.st_mode)):
        raise InputError(
            f"input {str(path)!r}: {file_type}; the input is read several times, by several processes",
            hint="write it to a file first (COMMAND > prompts.jsonl), and use that file",
        )
    return str(path), status.st_size


def _locate_remote(uri: str, exclude: str | None) -> "list[tuple[str, int]] | _Folder":
    if not uri.startswith("s3://"):
        raise InputError(f"input {uri!r}: only local files and s3:// are read", hint="copy the corpus to one of them")
    try:
        infos, is_folder = _listing(filesystem(uri), uri, exclude)
    except FileNotFoundError:
        _raise_no_such_file(uri)
    except InputError:
        raise
    except Exception as error:  # the client raises errors of several libraries
        raise InputError(
            f"input {uri!r}: the store returned {type(error).__name__}: {error}",
            hint="check AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
        ) from error
    files = sorted((f"s3://{info['name']}", int(info["size"])) for info in infos if info["type"] == "file")
    if is_folder:
        folders = sorted(info["name"].rstrip("/") for info in infos if info["type"] == "directory")
        skipped = [(name or "").removeprefix("s3://").rstrip("/") for name in (uri, exclude)]
        folders = [name for name in folders if name not in skipped and not _is_skipped(PurePosixPath(name).name, [])]
        return _Folder(files=files, sub_folders=folders)
    return files or _raise_no_such_file(uri)


def _listing(store: Any, uri: str, exclude: str | None) -> tuple[list[dict[str, Any]], bool]:
    """Return the objects that match, and whether `uri` names a folder."""
    if not uri.endswith("/") and store.isfile(uri) and not _is_folder_object(store, info := store.info(uri)):
        return [info], False
    is_folder = not any(c in uri for c in "*?[") or store.isdir(uri)
    infos = store.ls(uri, detail=True) if is_folder else list(store.glob(uri, detail=True).values())
    if is_folder:
        return [info for info in infos if info["type"] != "file" or not _is_folder_object(store, info)], True
    infos = [info for info in infos if info["type"] == "file" and not _is_folder_object(store, info)]
    run_prefix = None if exclude is None else exclude.removeprefix("s3://").rstrip("/") + "/"
    names = set(_without_markers(uri, uri.removeprefix("s3://"), [info["name"] for info in infos]))
    return [i for i in infos if i["name"] in names and not (run_prefix and i["name"].startswith(run_prefix))], False


def _is_folder_object(store: Any, info: dict[str, Any]) -> bool:
    """Return whether an object is empty and only represents a folder."""
    if info["size"]:
        return False
    return info["name"].endswith("/") or any(
        child["name"] != info["name"] for child in store.ls(info["name"], detail=True)
    )


def _without_markers(uri: str, pattern: str, names: list[str]) -> list[str]:
    """Return the matches of a glob that are neither hidden nor markers, or raise InputError if all of them are."""
    allowed_patterns = [part for part in PurePosixPath(pattern).parts if part[0] in "._"]
    data = [
        name for name in names if not any(_is_skipped(part, allowed_patterns) for part in PurePosixPath(name).parts)
    ]
    if names and not data:
        marker = PurePosixPath(names[0]).name
        raise InputError(
            f"input {uri!r}: it only matches hidden files and markers such as {marker}, which have no rows"
        )
    return data


def _is_skipped(part: str, allowed_patterns: list[str]) -> bool:
    """Return whether a part of a path is hidden or a marker, and matches no pattern in `allowed_patterns`."""
    is_special = part.startswith(".") or any(fnmatch.fnmatchcase(part, marker) for marker in _MARKERS)
    return is_special and not any(fnmatch.fnmatchcase(part, pattern) for pattern in allowed_patterns)


def _raise_no_such_file(uri: str) -> NoReturn:
    if uri == "-":
        hint = "write it to a file first, and use that file"
        raise InputError("input '-': standard input is not supported", hint=hint)
    raise InputError(f"input {uri!r}: no such file", hint="use a file, a folder or a quoted glob")


def _files_in_folder(
    uri: str, folder: _Folder, input_format: str, announce: Callable[[str], None]
) -> list[tuple[str, int, str]]:
    """Return a folder's corpus files, and announce which files are ignored."""
    # A README is not a corpus: text files only count in folders without other formats.
    visible = [(path, size) for path, size in folder.files if not PurePosixPath(path).name.startswith(".")]
    data_files = [
        (path, size, kind)
        for path, size in visible
        if (kind := _format_by_suffix(path)) and not _is_compressed_parquet(path)
    ]
    if input_format == "auto":
        chosen = [file for file in data_files if file[2] != "text"] or data_files
    else:
        suffix_format = _SUFFIX_FORMATS[input_format]
        chosen = [(path, size, input_format) for path, size, kind in data_files if kind == suffix_format]
    chosen_paths = {path for path, *_ in chosen}
    ignored = [
        path for path, _ in visible if path not in chosen_paths and not _is_skipped(PurePosixPath(path).name, [])
    ]
    notes = list(_notes_on_ignored(uri, ignored, folder.sub_folders, input_format))
    if not chosen:
        kinds = SUFFIXES.values() if input_format == "auto" else (input_format, _SUFFIX_FORMATS[input_format])
        suffixes = [suffix for suffix, kind in SUFFIXES.items() if kind in kinds]
        raise InputError(f"input {uri!r}: the folder has no {' or '.join(suffixes)} file", hint="; ".join(notes))
    for note in notes:
        announce(f"input {uri}: {note}")
    return chosen


def _notes_on_ignored(uri: str, ignored: list[str], sub_folders: list[str], input_format: str) -> Iterator[str]:
    """Yield a sentence for each reason to ignore files, with the names of these files."""
    names: dict[str, list[str]] = {}
    for path in ignored:
        name = PurePosixPath(path)
        if _is_compressed_parquet(path):
            reason = "compressed Parquet is not supported; decompress it"
        elif kind := _format_by_suffix(path):
            if name.name.partition(".")[0].lower() in _DOCUMENTS:
                continue
            is_text = kind == "text" and input_format == "auto"
            reason = "text is only read in folders without other formats" if is_text else f"not {input_format}"
        elif name.suffix.lower() in {*_OTHER_DATA, *COMPRESSIONS} or name.name.startswith("part-"):
            reason = f"unknown format; known: {_KNOWN_SUFFIXES}"
        else:
            continue
        names.setdefault(reason, []).append(name.name)
    for reason, ignored_names in names.items():
        yield f"{_abbreviated(ignored_names)} ignored: {reason}"
    if sub_folders:
        folders = _abbreviated([f"{PurePosixPath(path).name}/" for path in sub_folders])
        yield f"{folders} ignored: subfolders need a glob such as '{uri.rstrip('/')}/**/*.parquet'"


def _abbreviated(names: list[str]) -> str:
    """Return the first three names, and the number of the others.

    >>> _abbreviated(["a", "b"]), _abbreviated(["a", "b", "c", "d", "e"])
    ('a and b', 'a, b, c and 2 more')
    """
    parts = names[:3] + [f"{len(names) - 3:,} more"] * (len(names) > 3)
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _is_compressed_parquet(path: str) -> bool:
    return _format_by_suffix(path) == "parquet" and compression_of(path) is not None


def _required_format(path: str, input_format: str) -> str:
    kind = input_format if input_format != "auto" else _format_by_suffix(path)
    if kind is None:
        if _is_skipped(PurePosixPath(path).name, []):
            raise InputError(
                f"input {path}: a marker or a hidden file, which has no rows", hint="use the data files next to it"
            )
        suffix = "".join(PurePosixPath(path).suffixes[-2:]) or "no suffix"
        raise InputError(
            f"input {path}: unknown format {suffix!r}", hint=f"known: {_KNOWN_SUFFIXES}; or set --input-format"
        )
    if kind == "parquet" and (compression := compression_of(path)):
        message = f"input {path}: Parquet compressed with {compression} is not supported"
        raise InputError(message, hint="decompress the file")
    return kind


def _format_by_suffix(path: str) -> str | None:
    name = PurePosixPath(path.lower())
    return SUFFIXES.get(PurePosixPath(name.stem).suffix if name.suffix in COMPRESSIONS else name.suffix)


_MAX_READERS = 4  # per process


class _PositionedReader(Protocol):
    position: int

    def close(self) -> None: ...


Reader = TypeVar("Reader", bound=_PositionedReader)


class ForwardReaders(Generic[Reader]):
    """Open readers by path. A caller takes a reader out, and puts it back only after success."""

    def __init__(self) -> None:
        self._readers: OrderedDict[str, Reader] = OrderedDict()
        atexit.register(self.close)  # otherwise the interpreter warns about unclosed files

    def take(self, path: str, position: int) -> Reader | None:
        """Return a reader of `path` that is not past `position`, or None."""
        reader = self._readers.pop(path, None)
        if reader is not None and reader.position > position:
            reader.close()
            return None
        return reader

    def put_back(self, path: str, reader: Reader) -> None:
        """Keep a reader for the next unit of its file."""
        if (other := self._readers.pop(path, None)) is not None:
            other.close()
        self._readers[path] = reader
        while len(self._readers) > _MAX_READERS:
            self._readers.popitem(last=False)[1].close()

    def close(self) -> None:
        while self._readers:
            self._readers.popitem()[1].close()
