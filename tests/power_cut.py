"""What a power cut may leave of a folder: a model of a file system that keeps only what it was told to.

While `recording(folder)` lasts, each `fsync` is noted: of a file, the bytes that it has then; of a folder, the names
that are in it then and the files behind them. `Disk.images` makes folders that the disk may hold after a cut at this
moment. The worst one has nothing that was not synced: no name, no deletion, and no byte. In others some of it got there
by itself, each name and each file by chance, in any order.

Real file systems keep more. So what holds here holds on them; and a real ext4 is in `test_power_cut.py`, too.
"""

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

File = int
"""An inode; it is held open while the model lasts, so its number is not used again."""


class Disk:
    """What is on the disk below a folder, which is on it itself."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._names: dict[File, dict[str, tuple[File, bool]]] = {}
        self._bytes: dict[File, bytes] = {}
        self._held: dict[File, int] = {}
        self._note_folder(root)

    def synced(self, descriptor: int) -> None:
        """A file or a folder was synced."""
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if self._root not in (path, *path.parents):
            return
        if path.is_dir():
            self._note_folder(path)
        else:
            self._hold(path)
            self._bytes[os.fstat(descriptor).st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def images(self, where: Path, *, num_chances: int = 6, seed: int = 0) -> Iterator[Path]:
        """Folders that may be there after a cut at this moment, one after the other."""
        rng = random.Random(seed)
        for number in range(1 + num_chances):
            image = where / f"image-{number}"
            self._copy(self._root, image, (lambda: False) if number == 0 else (lambda: rng.random() < 0.5))
            yield image

    def close(self) -> None:
        """Forget it."""
        for descriptor in self._held.values():
            os.close(descriptor)

    def _note_folder(self, folder: Path) -> None:
        found = {}
        for path in folder.iterdir():
            self._hold(path)
            found[path.name] = (path.stat().st_ino, path.is_dir())
        self._names[folder.stat().st_ino] = found

    def _hold(self, path: Path) -> None:
        inode = path.stat().st_ino if path.exists() else None
        if inode is not None and inode not in self._held:
            self._held[inode] = os.open(path, os.O_PATH)

    def _copy(self, folder: Path, image: Path, by_itself: Callable[[], bool]) -> None:
        """A folder as it is on the disk; whatever differs now may have got there by itself."""
        image.mkdir(parents=True)
        now = {path.name: (path.stat().st_ino, path.is_dir()) for path in folder.iterdir()}
        kept = self._names.get(folder.stat().st_ino, {})
        for name in sorted(now.keys() | kept.keys()):
            entry = now.get(name) if now.get(name) == kept.get(name) or by_itself() else kept.get(name)
            if entry is None:
                continue
            inode, is_folder = entry
            if is_folder:
                if now.get(name) == entry:
                    self._copy(folder / name, image / name, by_itself)
            else:
                (image / name).write_bytes(self._content(inode, folder / name, now.get(name) == entry, by_itself))

    def _content(self, inode: File, path: Path, is_there: bool, by_itself: Callable[[], bool]) -> bytes:
        kept = self._bytes.get(inode, b"")
        if is_there and path.read_bytes() != kept and by_itself():
            return path.read_bytes()
        return kept


@contextlib.contextmanager
def recording(root: Path) -> Iterator[Disk]:
    """Note what is synced below a folder, by this process."""
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
