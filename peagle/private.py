"""Privacy of new files from the machine's other users.

New files and folders get no permissions for others; what the group may do is left to the user's umask. Temporary files
go into a folder that belongs to the user alone: in a shared `/tmp` anybody could create a name before we do, and what
Ray, torch and vLLM keep there (session logs, sockets, compiled code) would be read or replaced.
"""

import os
import stat
import tempfile
from pathlib import Path

from peagle.errors import ConfigError

SECRET_MODE = 0o600
_OTHERS = 0o007
_ALL_BUT_OWNER = 0o077
_MAX_SOCKET_PATH = 107  # bytes; Linux has 108 with the one that ends it


def keep_private() -> None:
    """Make new files of this process and its children private from now on.

    Temporary ones go to a private folder.

    Raises:
        ConfigError: somebody else has taken the name of that folder.
    """
    os.umask(os.umask(_ALL_BUT_OWNER) | _OTHERS)  # a mask can be read only by setting one: a strict one, for a moment
    folder = str(temporary_folder())
    os.environ["TMPDIR"] = folder  # Ray, torch and vLLM look there
    tempfile.tempdir = folder


def temporary_folder(name: str | None = None) -> Path:
    """The user's own folder for temporary files, or its folder `name`.

    It is made where it is missing.

    A TMPDIR that only the user can enter is taken as it is.

    Raises:
        ConfigError: somebody else has taken its name.
    """
    folder = Path(tempfile.gettempdir())
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & _ALL_BUT_OWNER:
        folder = _own(folder / f"peagle-{os.geteuid()}")
    return folder if name is None else _own(folder / name)


def user_path(path: str | Path) -> Path:
    """A path in which `~` stands for this user's home folder.

    Raises:
        ConfigError: there is none: a container's user often has no name, and then HOME has to say it.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: {error}", hint="set HOME to a folder that this user can write") from error


def require_short_sockets(what: str, folder: str, num_bytes: int) -> None:
    """Refuse a temporary folder whose path is too long for sockets in it.

    Args:
        what: makes them.
        num_bytes: the most that the names of sockets in it have.

    Raises:
        ConfigError: it is too long.
    """
    length, most = len(os.fsencode(folder)), _MAX_SOCKET_PATH - num_bytes
    if length > most:
        raise ConfigError(
            f"temporary folder {folder}: its path has {length} bytes, and {what} can use at most {most}",
            hint="set TMPDIR to a folder with a shorter path that only you can enter (mkdir -m 700)",
        )


def _own(folder: Path) -> Path:
    """A folder that only the user can enter.

    Nothing is followed or entered before it is known whose it is.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise _unusable(folder, f"cannot be made: {error.strerror}") from error
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:  # a link, a file, or a folder that somebody else keeps to himself
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


def _unusable(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        f"temporary folder {folder} {why}",
        hint="set TMPDIR to a folder that only you can enter (mkdir -m 700), or have that name removed",
    )
