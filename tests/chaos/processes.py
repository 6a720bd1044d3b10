"""Find the processes of a run in /proc (Linux only).

The standard output of an engine actor and its children is `OUT/logs/engine-SESSION.log`, which identifies their run.
"""

import contextlib
import os
import signal
from collections import defaultdict
from pathlib import Path

from peagle.engine.fake import CORE_NAME

_CORE_NAMES = (CORE_NAME, "EngineCore")


def actors(run_dir: Path) -> list[int]:
    """Return the engine actors of a run: of the processes that share a log, the one whose parent does not share it."""
    groups = _by_log(run_dir).values()
    return [pid for group in groups for pid in group if _parent(pid) not in group]


def engine_processes(run_dir: Path) -> list[int]:
    """Return all processes that write to the engine logs of a run."""
    return [pid for group in _by_log(run_dir).values() for pid in group]


def cores(run_dir: Path) -> list[int]:
    """Return the engine core processes of a run."""
    return [pid for pid in engine_processes(run_dir) if any(name in command_line(pid) for name in _CORE_NAMES)]


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for other in _pids():
        children[_parent(other)].append(other)
    result, queue = [], [pid]
    while queue:
        queue += (child_pids := children[queue.pop()])
        result += child_pids
    return result


def raylets(pid: int) -> list[int]:
    """Return the raylets (Ray's main process on each node) among the descendants of a process."""
    return [
        process_id for process_id in descendants(pid) if command_line(process_id).partition(" ")[0].endswith("/raylet")
    ]


def kill(*pids: int) -> bool:
    """Send SIGKILL; return whether the first process existed."""
    for number, pid in enumerate(pids):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            if number == 0:
                return False
    return bool(pids)


def command_line(pid: int) -> str:
    """Return the command line, or an empty string if the process is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _by_log(run_dir: Path) -> dict[str, set[int]]:
    prefix = f"{run_dir}/logs/engine-"
    groups: defaultdict[str, set[int]] = defaultdict(set)
    for pid in _pids():
        with contextlib.suppress(OSError):
            log = str(Path(f"/proc/{pid}/fd/1").readlink())
            if log.startswith(prefix):
                groups[log].add(pid)
    return groups


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
