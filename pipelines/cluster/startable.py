"""Checks of folders, limits and variables before Ray starts. Otherwise Ray fails late with misleading errors."""

import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil

from peagle import hardware
from peagle.errors import ConfigError
from peagle.private import require_short_sockets
from pipelines.cluster import token

_RAY_SOCKET = "/ray/session_2026-11-25_08-51-03_647271_4194304/sockets/plasma_store"  # the longest path of Ray 2.60
_MIN_OPEN_FILES = 1024
_OPEN_FILES_PER_CPU = 16  # Ray starts a worker for each CPU, and its raylet had 11 open files per worker (Ray 2.60)
_MIN_THREADS = 800  # an endpoint on two cores had 412 threads without its engine (Ray 2.60); an engine has 100 to 200
_GIB = 1024**3
_MEMORY_LIMITS = (  # the limit, its name, GiB, and its names in a shell and in limits.conf
    (resource.RLIMIT_AS, "address space", 64, "v", "as"),  # a worker reserves 10 to 20 GiB without using them
    (resource.RLIMIT_DATA, "data", 64, "d", "data"),
    (resource.RLIMIT_FSIZE, "file size", 64, "f", "fsize"),
)
# The limit of processes and threads in a container, for cgroup versions 2 and 1.
_PIDS_MAX_FILES = (Path("/sys/fs/cgroup/pids.max"), Path("/sys/fs/cgroup/pids/pids.max"))


def require_startable() -> None:
    """Raise a ConfigError for the first obstacle to starting Ray here."""
    for check in _CHECKS:
        check()


def obstacles() -> list[ConfigError]:
    """Return all obstacles to starting Ray here."""
    errors = []
    for check in _CHECKS:
        try:
            check()
        except ConfigError as error:
            errors.append(error)
    return errors


def require_short_temporary_folder() -> None:
    """Refuse a temporary folder if its path is too long for Ray's sockets."""
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    require_short_sockets("Ray", folder, num_bytes=len(_RAY_SOCKET))


def require_open_files() -> None:
    """Refuse a limit of open files that is too low for Ray's processes."""
    needed = max(_MIN_OPEN_FILES, _OPEN_FILES_PER_CPU * hardware.detect().num_cpus)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # Ray raises the soft limit itself
    _require_limit(hard, "open files", needed, f"ulimit -n {needed}", "nofile")


def require_threads() -> None:
    """Refuse a limit of processes that leaves too little room for Ray's threads."""
    num_own_threads = 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        uids = process.info["uids"]
        if uids and uids.real == os.getuid():
            num_own_threads += process.info["num_threads"] or 0
    if os.geteuid() != 0:  # the limit does not apply to root
        needed = num_own_threads + _MIN_THREADS
        limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        _require_limit(limit, "processes and threads", needed, f"ulimit -u {needed}", "nproc")
    for path in _PIDS_MAX_FILES:
        if path.is_file() and (max_pids := path.read_text().strip()).isdecimal():
            current = int(path.with_name("pids.current").read_text())
            if int(max_pids) - current < _MIN_THREADS:
                raise ConfigError(
                    f"this container is limited to {max_pids} processes and threads and has {current}; Ray and an "
                    f"engine need {_MIN_THREADS:,} more",
                    hint=f"start the container with --pids-limit {current + 2 * _MIN_THREADS}; on Kubernetes, set "
                    "podPidsLimit",
                )


def require_memory_limits() -> None:
    """Refuse limits of memory and file size that are too low for Ray."""
    for limit_id, name, needed_gib, flag, conf_name in _MEMORY_LIMITS:
        limit, _ = resource.getrlimit(limit_id)
        _require_limit(limit, name, needed_gib * _GIB, f"ulimit -{flag} unlimited", conf_name, unit=_GIB)


def require_python_variables() -> None:
    """Refuse Python environment variables that make Ray's processes fail."""
    level = os.environ.get("PYTHONOPTIMIZE", "")
    if level.isdecimal() and int(level) >= 2:
        raise ConfigError(
            f"PYTHONOPTIMIZE={level} removes docstrings, which Ray's processes need",
            hint="unset PYTHONOPTIMIZE",
        )
    warnings = os.environ.get("PYTHONWARNINGS", "")
    if any(entry.strip().partition(":")[0] == "error" for entry in warnings.split(",")):
        raise ConfigError(
            f"PYTHONWARNINGS={warnings} turns warnings into errors, and Ray's processes fail with them",
            hint="unset PYTHONWARNINGS",
        )


def _require_limit(limit: int, name: str, needed: int, command: str, conf_name: str, *, unit: int = 1) -> None:
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return
    raise ConfigError(
        f"the limit of {name} is {_amount(limit, unit)}, and Ray and an engine need {_amount(needed, unit)}",
        hint=f"raise the limit: `{command}` in this shell; permanently in /etc/security/limits.conf ({conf_name}), "
        "systemd or the container's --ulimit",
    )


def _amount(value: int, unit: int) -> str:
    return f"{value:,}" if unit == 1 else f"{value / unit:.3g} GiB"


_CHECKS: tuple[Callable[[], None], ...] = (
    token.prepare_to_start,
    require_short_temporary_folder,
    require_open_files,
    require_threads,
    require_memory_limits,
    require_python_variables,
)
