import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from peagle import private
from peagle.errors import ConfigError
from peagle.files import write_atomic, write_once
from peagle.private import require_short_sockets, restrict_new_files, temporary_folder, user_path


@pytest.fixture
def shared_folder(tmp_path, monkeypatch):
    """A world-writable folder for temporary files, and a permissive umask."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    previous_umask = os.umask(0)
    yield folder
    os.umask(previous_umask)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_temporary_folder_is_private(shared_folder):
    folder = temporary_folder()
    assert folder == shared_folder / f"peagle-{os.geteuid()}"
    assert temporary_folder("slots") == folder / "slots"
    assert [mode(folder), mode(folder / "slots")] == [0o700, 0o700]


def test_private_tmpdir_is_used(shared_folder):
    shared_folder.chmod(0o700)
    assert temporary_folder() == shared_folder


def test_readable_folder_is_made_private(shared_folder):
    folder = shared_folder / f"peagle-{os.geteuid()}"
    folder.mkdir(mode=0o777)
    temporary_folder()
    assert mode(folder) == 0o700


@pytest.mark.parametrize("kind", ["link to a folder", "link to nothing", "file"])
def test_foreign_temporary_folder_is_refused_and_not_followed(shared_folder, tmp_path, kind):
    target, name = tmp_path / "target", shared_folder / f"peagle-{os.geteuid()}"
    if kind == "file":
        name.touch()
    else:
        name.symlink_to(target)
    if kind == "link to a folder":
        target.mkdir(mode=0o777)
    with pytest.raises(ConfigError, match=rf"{name} (is not a folder of this user|.*)(.|\n)*set TMPDIR"):
        temporary_folder("slots")
    assert not target.exists() or list(target.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a folder")
def test_folder_of_another_user_is_refused(shared_folder):
    name = shared_folder / f"peagle-{os.geteuid()}"
    name.mkdir(mode=0o777)
    os.chown(name, 12345, 12345)
    with pytest.raises(ConfigError, match=r"belongs to another user \(uid 12345\)"):
        temporary_folder()
    assert mode(name) == 0o777


@pytest.mark.parametrize(
    ("umask", "file_mode", "folder_mode"), [(0o000, 0o660, 0o770), (0o022, 0o640, 0o750), (0o077, 0o600, 0o700)]
)
def test_restricted_files_respect_the_umask_for_the_group(shared_folder, tmp_path, umask, file_mode, folder_mode):
    os.umask(umask)
    restrict_new_files()
    restrict_new_files()  # has no effect, because a command and its actor can run in the same process
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    assert (mode(tmp_path / "file"), mode(tmp_path / "folder")) == (file_mode, folder_mode)


def test_restriction_of_new_files_applies_to_children(shared_folder):
    restrict_new_files()
    code = "import os, tempfile; print(tempfile.gettempdir(), oct(os.umask(0)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [str(shared_folder / f"peagle-{os.geteuid()}"), "0o7"]


@pytest.mark.parametrize("write", [write_atomic, write_once])
def test_secret_is_private_while_written(shared_folder, tmp_path, monkeypatch, write):
    modes, fsync = [], os.fsync

    def recording_fsync(descriptor):
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    write(tmp_path / "keys.json", b"secret", mode=private.SECRET_MODE)
    assert set(modes) == {0o600}
    assert mode(tmp_path / "keys.json") == 0o600


def test_command_writes_private_files(shared_folder, tmp_path):
    """The umask is permissive, so the command must restrict access."""
    root = Path(__file__).parents[2]
    keys, result = tmp_path / "keys" / "keys.json", tmp_path / "results" / "result.json"
    command = [sys.executable, "-m", "jobs.cli", "serve", "keys", "add", "alice", "--keys", keys, "--json", result]
    process = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert [mode(path) for path in (keys.parent, keys, result.parent, result)] == [0o770, 0o600, 0o770, 0o660]


def test_unknown_home_is_refused(monkeypatch):
    monkeypatch.delenv("HOME", raising=False)

    def raise_unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", raise_unknown)  # like the arbitrary user ids of some clusters
    with pytest.raises(ConfigError, match=r"~/.peagle: (.|\n)*set HOME to a folder") as error:
        user_path("~/.peagle")
    assert error.value.exit_code == 2
    assert user_path("/x/y") == Path("/x/y")
    with pytest.raises(ConfigError, match="~nobody-here/x"):
        user_path("~nobody-here/x")


def test_too_long_socket_path_is_refused():
    require_short_sockets("Ray", "/" + 56 * "x", num_bytes=50)
    with pytest.raises(ConfigError, match=r"58 bytes; the limit for Ray is 57(.|\n)*TMPDIR") as error:
        require_short_sockets("Ray", "/" + 57 * "x", num_bytes=50)
    assert error.value.exit_code == 2
