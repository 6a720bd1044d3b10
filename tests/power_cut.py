"""A model of a folder's content after a power cut. It guarantees only what was synced.

`recording(folder)` records each `fsync`. For a file, it records the bytes at that moment. For a folder, it records the
names and the files to which they refer. `Disk.images` creates the possible contents of the folder after a power cut at
the time of the call. In the worst image, every name, deletion and byte that was not synced is lost. In the other
images, each unsynced change is present at random.

Real file systems keep more, so code that is correct in this model is correct on them. `test_power_cut.py` also uses a
real ext4 file system.
"""

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

File = int
"""An inode number. The model keeps the file open, so that the number is not reused."""


class Disk:
    """What is on disk in a folder. The folder itself is assumed to be synced."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._names: dict[File, dict[str, tuple[File, bool]]] = {}
        self._bytes: dict[File, bytes] = {}
        self._descriptors: dict[File, int] = {}
        self._record_folder(root)

    def record_sync(self, descriptor: int) -> None:
        """Record the sync of a file or folder."""
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if self._root not in (path, *path.parents):
            return
        if path.is_dir():
            self._record_folder(path)
        else:
            self._keep_open(path)
            self._bytes[os.fstat(descriptor).st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def images(self, folder: Path, *, num_random: int = 6, seed: int = 0) -> Iterator[Path]:
        """Create and yield possible copies of the folder after a power cut at this moment."""
        rng = random.Random(seed)
        for number in range(1 + num_random):
            image = folder / f"image-{number}"
            self._copy(self._root, image, (lambda: False) if number == 0 else (lambda: rng.random() < 0.5))
            yield image

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def _record_folder(self, folder: Path) -> None:
        result = {}
        for path in folder.iterdir():
            self._keep_open(path)
            result[path.name] = (path.stat().st_ino, path.is_dir())
        self._names[folder.stat().st_ino] = result

    def _keep_open(self, path: Path) -> None:
        inode = path.stat().st_ino if path.exists() else None
        if inode is not None and inode not in self._descriptors:
            self._descriptors[inode] = os.open(path, os.O_PATH)

    def _copy(self, folder: Path, image: Path, is_written: Callable[[], bool]) -> None:
        """Copy a folder as it is on disk. `is_written` decides whether an unsynced change is on disk."""
        image.mkdir(parents=True)
        current_names = {path.name: (path.stat().st_ino, path.is_dir()) for path in folder.iterdir()}
        synced_names = self._names.get(folder.stat().st_ino, {})
        for name in sorted(current_names.keys() | synced_names.keys()):
            entry = (
                current_names.get(name)
                if current_names.get(name) == synced_names.get(name) or is_written()
                else synced_names.get(name)
            )
            if entry is None:
                continue
            inode, is_folder = entry
            if is_folder:
                if current_names.get(name) == entry:
                    self._copy(folder / name, image / name, is_written)
            else:
                (image / name).write_bytes(
                    self._content(inode, folder / name, current_names.get(name) == entry, is_written)
                )

    def _content(self, inode: File, path: Path, exists: bool, is_written: Callable[[], bool]) -> bytes:
        content = self._bytes.get(inode, b"")
        if exists and path.read_bytes() != content and is_written():
            return path.read_bytes()
        return content


@contextlib.contextmanager
def recording(root: Path) -> Iterator[Disk]:
    """Record what this process syncs in a folder."""
    disk, names = Disk(root), ("fsync", "fdatasync")
    original = {name: getattr(os, name) for name in names}

    def with_recording(name: str):
        def sync(descriptor: int) -> None:
            original[name](descriptor)
            disk.record_sync(descriptor)

        return sync

    for name in names:
        setattr(os, name, with_recording(name))
    try:
        yield disk
    finally:
        for name in names:
            setattr(os, name, original[name])
        disk.close()
