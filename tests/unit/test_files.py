import errno
import os
import threading

import pytest

from peagle import files
from peagle.errors import ConfigError
from peagle.files import GroupSync, append_line


def test_write_atomic_replaces_the_file(tmp_path):
    path = tmp_path / "a.json"
    files.write_atomic(path, b"long old content")
    files.write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a"
    files.write_atomic(path, b"old")

    def full_disk(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_write_once_has_one_winner(tmp_path):
    path, winners = tmp_path / "unit", []
    barrier = threading.Barrier(8)

    def write(number):
        barrier.wait()
        if files.write_once(path, str(number).encode()):
            winners.append(number)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 1
    assert path.read_bytes() == str(winners[0]).encode()
    assert list(tmp_path.iterdir()) == [path]


def test_only_temporary_files_are_removed(tmp_path):
    (tmp_path / ".unit-1.parquet.0123.tmp").touch()
    (tmp_path / "unit-1.parquet").touch()
    assert files.remove_temporaries(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["unit-1.parquet"]


def test_atomic_file_is_visible_only_when_complete(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def write_and_fail():
        with files.atomic_file(path) as file:
            file.write(b"half")
            raise ValueError("interrupted")

    with pytest.raises(ValueError, match="interrupted"):
        write_and_fail()
    assert path.read_bytes() == b"old"
    with files.atomic_file(path) as file:
        file.write(b"one ")
        assert path.read_bytes() == b"old"
        file.write(b"two")
    assert path.read_bytes() == b"one two"
    assert list(tmp_path.iterdir()) == [path]


# --- lost responses, as on NFS: the operation succeeds, but the client repeats it, and the repetition fails


def with_lost_response(operation, error):
    def operate(*args):
        operation(*args)
        raise error(errno.EEXIST, "the response to a repeated request")

    return operate


@pytest.mark.parametrize("error", [FileExistsError, OSError, TimeoutError])
def test_write_once_succeeds_if_the_response_to_link_is_lost(tmp_path, monkeypatch, error):
    path = tmp_path / "unit"
    with monkeypatch.context() as nfs:
        nfs.setattr(files.os, "link", with_lost_response(os.link, error))
        assert files.write_once(path, b"own")
    assert not files.write_once(path, b"another's")
    assert path.read_bytes() == b"own"
    assert list(tmp_path.iterdir()) == [path]


def test_write_atomic_succeeds_if_the_response_to_rename_is_lost(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    monkeypatch.setattr(files.os, "replace", with_lost_response(os.replace, FileNotFoundError))
    files.write_atomic(path, b"new")
    with files.atomic_file(path) as file:
        file.write(b"newer")
    assert path.read_bytes() == b"newer"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("write", "operation"), [(files.write_once, "link"), (files.write_atomic, "replace")])
@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC])
def test_failed_operation_is_an_error(tmp_path, monkeypatch, write, operation, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files.os, operation, refuse)
    for call in (lambda: write(tmp_path / "a", b"x"), lambda: files.require_links(tmp_path)):
        with pytest.raises(OSError, match=os.strerror(code)):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("write", "operation"), [(files.write_once, "link"), (files.write_atomic, "replace")])
def test_removed_temporary_file_is_rewritten(tmp_path, monkeypatch, write, operation):
    path, original, removed = tmp_path / "a", getattr(os, operation), []

    def remove_once_before(temporary, target):
        if not removed:
            removed.append(files.remove_temporaries(tmp_path))
        original(temporary, target)

    monkeypatch.setattr(files.os, operation, remove_once_before)
    write(path, b"all of it")
    assert removed == [1]
    assert path.read_bytes() == b"all of it"


def test_removed_unfinished_file_is_an_error(tmp_path):
    def write_during_cleanup():
        with files.atomic_file(tmp_path / "a"):
            files.remove_temporaries(tmp_path)

    with pytest.raises(FileNotFoundError):
        write_during_cleanup()


# --- required features of a file system


def test_require_links_leaves_no_files(tmp_path):
    files.require_links(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_file_system_without_links_is_refused(tmp_path, monkeypatch, code):
    def no_links(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files.os, "link", no_links)
    with pytest.raises(ConfigError, match=r"no hard links(.|\n)*NFS") as error:
        files.require_links(tmp_path)
    assert error.value.exit_code == 2
    with pytest.raises(OSError, match="the file system has no hard links"):
        files.write_once(tmp_path / "a", b"1")
    assert list(tmp_path.iterdir()) == []


def test_file_system_without_exclusive_links_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files.os, "link", lambda temporary, path: temporary.replace(path))
    with pytest.raises(ConfigError, match="two writers can create the same name"):
        files.require_links(tmp_path)


def test_require_links_retries_if_another_process_removes_its_file(tmp_path, monkeypatch):
    link, linked_paths = os.link, []

    def link_and_remove_first(temporary, path):
        link(temporary, path)
        linked_paths.append(path)
        if len(linked_paths) == 1:
            path.unlink()

    monkeypatch.setattr(files.os, "link", link_and_remove_first)
    files.require_links(tmp_path)
    assert list(tmp_path.iterdir()) == []


class FakeDisk:
    """Replaces `os.fdatasync` by a function that counts, delays and fails syncs."""

    def __init__(self, monkeypatch):
        self.num_syncs, self.error = 0, None
        self.started, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        monkeypatch.setattr(os, "fdatasync", self._sync)

    def _sync(self, _):
        self.started.release()
        assert self.may_end.acquire(timeout=20)
        self.num_syncs += 1
        if self.error:
            raise self.error


@pytest.fixture
def disk(monkeypatch):
    return FakeDisk(monkeypatch)


@pytest.fixture
def group_sync(tmp_path):
    path = tmp_path / "requests.jsonl"
    append_line(path, b"{}")
    return GroupSync(path)


def test_waiters_that_arrive_during_a_group_sync_share_the_next_one(disk, group_sync):
    first = group_sync.sync()
    disk.started.acquire()
    others = [group_sync.sync() for _ in range(20)]
    disk.may_end.release()
    first.result(20)
    disk.started.acquire()
    assert not any(other.done() for other in others)  # their lines might have been written after the first sync started
    disk.may_end.release()
    for other in others:
        other.result(20)
    assert disk.num_syncs == 2


def test_group_sync_reports_errors_and_recovers(disk, group_sync):
    disk.error = OSError(5, "Input/output error")
    disk.may_end.release()
    with pytest.raises(OSError, match="Input/output"):
        group_sync.sync().result(20)
    disk.error = None
    disk.may_end.release()
    group_sync.sync().result(20)


def test_group_sync_continues_after_a_cancelled_waiter(disk, group_sync):
    group_sync.sync()
    disk.started.acquire()
    cancelled, waiting = group_sync.sync(), group_sync.sync()
    assert cancelled.cancel()
    for _ in range(2):
        disk.may_end.release()
    waiting.result(20)


def test_group_sync_syncs_the_folder_once(tmp_path, monkeypatch):
    folders = []
    monkeypatch.setattr("peagle.files.sync_folder", folders.append)
    path = tmp_path / "requests.jsonl"
    append_line(path, b"{}")
    group_sync = GroupSync(path)
    for _ in range(3):
        group_sync.sync().result(20)
    assert folders == [tmp_path]
