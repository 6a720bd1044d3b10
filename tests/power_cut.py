"""What a power cut may leave of a folder: a model of a file system that keeps only what was synced.

`recording(folder)` records each `fsync`: of a file, its bytes at that moment; of a folder, its names and the files
behind them. `Disk.images` creates folders that the disk may hold after a cut at this moment. The worst one has
nothing that was not synced: no name, deletion or byte. In the others, each unsynced name and file is randomly present.

Real file systems keep more, so code that is correct here is correct there; `test_power_cut.py` also uses a real ext4.
"""

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

File = int
"""An inode; it is held open while the model lasts, so its number is not used again."""


class Disk:
    """What is on disk below a folder, which is itself synced."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._names: dict[File, dict[str, tuple[File, bool]]] = {}
        self._bytes: dict[File, bytes] = {}
        self._held: dict[File, int] = {}
        self._note_folder(root)

    def synced(self, descriptor: int) -> None:
        """Record the sync of a file or folder."""
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if self._root not in (path, *path.parents):
            return
        if path.is_dir():
            self._note_folder(path)
        else:
            self._hold(path)
            self._bytes[os.fstat(descriptor).st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def images(self, where: Path, *, num_chances: int = 6, seed: int = 0) -> Iterator[Path]:
        """Yield folders that may exist after a power cut at this moment."""
        rng = random.Random(seed)
        for number in range(1 + num_chances):
            image = where / f"image-{number}"
            self._copy(self._root, image, (lambda: False) if number == 0 else (lambda: rng.random() < 0.5))
            yield image

    def close(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)

    def _note_folder(self, folder: Path) -> None:
        result = {}
        for path in folder.iterdir():
            self._hold(path)
            result[path.name] = (path.stat().st_ino, path.is_dir())
        self._names[folder.stat().st_ino] = result

    def _hold(self, path: Path) -> None:
        inode = path.stat().st_ino if path.exists() else None
        if inode is not None and inode not in self._held:
            self._held[inode] = os.open(path, os.O_PATH)

    def _copy(self, folder: Path, image: Path, by_itself: Callable[[], bool]) -> None:
        """Copy a folder as it is on disk; unsynced changes are randomly present."""
        image.mkdir(parents=True)
        now = {path.name: (path.stat().st_ino, path.is_dir()) for path in folder.iterdir()}
        names = self._names.get(folder.stat().st_ino, {})
        for name in sorted(now.keys() | names.keys()):
            entry = now.get(name) if now.get(name) == names.get(name) or by_itself() else names.get(name)
            if entry is None:
                continue
            inode, is_folder = entry
            if is_folder:
                if now.get(name) == entry:
                    self._copy(folder / name, image / name, by_itself)
            else:
                (image / name).write_bytes(self._content(inode, folder / name, now.get(name) == entry, by_itself))

    def _content(self, inode: File, path: Path, is_there: bool, by_itself: Callable[[], bool]) -> bytes:
        content = self._bytes.get(inode, b"")
        if is_there and path.read_bytes() != content and by_itself():
            return path.read_bytes()
        return content


@contextlib.contextmanager
def recording(root: Path) -> Iterator[Disk]:
    """Record what this process syncs below a folder."""
    disk, names = Disk(root), ("fsync", "fdatasync")
    true = {name: getattr(os, name) for name in names}

    def noting(name: str):
        def sync(descriptor: int) -> None:
            true[name](descriptor)
            disk.synced(descriptor)

        return sync

    for name in names:
        setattr(os, name, noting(name))
    try:
        yield disk
    finally:
        for name in names:
            setattr(os, name, true[name])
        disk.close()
