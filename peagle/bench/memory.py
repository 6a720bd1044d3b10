"""The most memory that an engine held while something ran, looked at again and again from a thread.

On a CPU it is the resident memory of this process and everything below it (pages that two of them share count twice);
on a GPU it is what the driver says is in use, less what was before the first engine started. vLLM fills a GPU up to
`gpu_memory_utilization` with its KV cache, so there the figure says what it took, not what it needed.
"""

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from peagle.hardware import Hardware

_GIB = 1024**3
_EVERY_S = 1.0


class PeakMemory:
    """The largest reading between enter and exit.

    Args:
        read: memory in GiB; None where it cannot be told.
    """

    def __init__(self, read: Callable[[], float | None], every_s: float = _EVERY_S) -> None:
        self._read, self._every_s = read, every_s
        self.gib: float | None = None

    def __enter__(self) -> Self:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._ended.wait(self._every_s):
            self._look()

    def _look(self) -> None:
        found = self._read()
        if found is not None:
            self.gib = max(found, self.gib or 0.0)


def memory_reader(hardware: Hardware) -> Callable[[], float | None]:
    """What to read on this hardware; made before the first engine starts."""
    if hardware.platform == "cpu":
        return tree_rss_gib
    before = device_gib()

    def read() -> float | None:
        now = device_gib()
        return None if now is None or before is None else max(now - before, 0.0)

    return read


def tree_rss_gib(pid: int | None = None, proc: Path = Path("/proc")) -> float | None:
    """Resident memory of a process and all below it; of this one where none is named. None without a `/proc`."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    parents: dict[int, int] = {}
    pages: dict[int, int] = {}
    for stat in proc.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        process = int(stat.parent.name)
        parents[process], pages[process] = int(fields[1]), int(fields[21])
    root = os.getpid() if pid is None else pid
    if root not in pages:
        return None
    return sum(pages[process] for process in _tree(root, parents)) * page_bytes / _GIB


def device_gib() -> float | None:
    """Memory in use on all GPUs, None where the driver does not say."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return sum(float(line) for line in answer.split()) / 1024
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _tree(root: int, parents: dict[int, int]) -> list[int]:
    """A process and all below it."""
    found = [root]
    for process in found:  # grows while it is walked
        found += [child for child, parent in parents.items() if parent == process and child != process]
    return found
