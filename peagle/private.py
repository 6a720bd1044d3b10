"""Protect new files from other users of the machine.

New files have no permissions for others; the user's umask determines the group's permissions. Temporary files are in a
folder that only the user can enter. In a shared `/tmp`, others could read or replace the files of Ray, torch and vLLM:
logs, sockets and compiled code.
"""

import os
import stat
import tempfile
from pathlib import Path

from peagle.errors import ConfigError

SECRET_MODE = 0o600
_OTHERS = 0o007
_ALL_BUT_OWNER = 0o077
_MAX_SOCKET_PATH = 107  # bytes; Linux's limit is 108 including the final zero


def restrict_new_files() -> None:
    """Make new files of this process and its children private, and use a private folder for temporary files.

    Raises ConfigError if the temporary folder belongs to another user.
    """
    os.umask(os.umask(_ALL_BUT_OWNER) | _OTHERS)  # the umask can only be read by setting it
    folder = str(temporary_folder())
    os.environ["TMPDIR"] = folder  # for Ray, torch and vLLM
    tempfile.tempdir = folder


def temporary_folder(name: str | None = None) -> Path:
    """Return the user's private folder for temporary files, or its subfolder `name`; create it if it is missing.

    A TMPDIR that only the user can enter is used as it is. A folder of another user raises ConfigError.
    """
    folder = Path(tempfile.gettempdir())
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & _ALL_BUT_OWNER:
        folder = _private_folder(folder / f"peagle-{os.geteuid()}")
    return folder if name is None else _private_folder(folder / name)


def user_path(path: str | Path) -> Path:
    """Expand `~` in a path. Raises ConfigError for a user without a home folder, as in some containers."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: {error}", hint="set HOME to a folder that this user can write") from error


def require_short_sockets(program: str, folder: str, num_bytes: int) -> None:
    """Raise ConfigError if the path of a temporary folder is too long for Unix sockets that `program` creates in it.

    `num_bytes` is the length of the longest socket path below the folder.
    """
    length, max_length = len(os.fsencode(folder)), _MAX_SOCKET_PATH - num_bytes
    if length > max_length:
        raise ConfigError(
            f"temporary folder {folder}: its path has {length} bytes; the limit for {program} is {max_length}",
            hint="set TMPDIR to a folder with a shorter path that only you can enter (mkdir -m 700)",
        )


def _private_folder(folder: Path) -> Path:
    """Return a folder that only the user can enter; create it if it is missing. A symbolic link is an error."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise _unusable(folder, f"cannot be created: {error.strerror}") from error
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:  # a link, a file, or another user's private folder
        raise _unusable(folder, f"is not a folder of this user ({error.strerror})") from error
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise _unusable(folder, f"belongs to another user (uid {status.st_uid})")
        if stat.S_IMODE(status.st_mode) & _ALL_BUT_OWNER:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return folder


def _unusable(folder: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"temporary folder {folder} {reason}",
        hint="set TMPDIR to a folder that only you can enter (mkdir -m 700), or ask its owner to remove this folder",
    )
