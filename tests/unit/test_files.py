import errno
import os
import threading

import pytest

from peagle import files
from peagle.errors import ConfigError
from peagle.files import GroupSync, append_line


def test_write_atomic_replaces_the_whole_file(tmp_path):
    path = tmp_path / "a.json"
    files.write_atomic(path, b"long old content")
    files.write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path, monkeypatch):
    path = tmp_path / "a"
    files.write_atomic(path, b"old")

    def full_disk(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_of_many_writers_exactly_one_wins_and_its_bytes_stay(tmp_path):
    path, won = tmp_path / "unit", []
    barrier = threading.Barrier(8)

    def write(number):
        barrier.wait()
        if files.write_once(path, str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert path.read_bytes() == str(won[0]).encode()
    assert list(tmp_path.iterdir()) == [path]


def test_remove_temporaries_takes_only_what_writers_left(tmp_path):
    (tmp_path / ".unit-1.parquet.0123.tmp").touch()
    (tmp_path / "unit-1.parquet").touch()
    assert files.remove_temporaries(tmp_path) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["unit-1.parquet"]


def test_a_file_takes_its_place_only_when_it_is_whole(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def break_off():
        with files.atomic_file(path) as file:
            file.write(b"half")
            raise ValueError("broken off")

    with pytest.raises(ValueError, match="broken off"):
        break_off()
    assert path.read_bytes() == b"old"
    with files.atomic_file(path) as file:
        file.write(b"one ")
        assert path.read_bytes() == b"old"
        file.write(b"two")
    assert path.read_bytes() == b"one two"
    assert list(tmp_path.iterdir()) == [path]


# --- answers that get lost, as on NFS: the operation is done, its repetition says that it could not be


def losing_the_answer(operation, error):
    def done_twice(*args):
        operation(*args)
        raise error(17, "the answer of a request that was sent again")

    return done_twice


def test_a_link_whose_answer_was_lost_is_won(tmp_path, monkeypatch):
    path = tmp_path / "unit"
    with monkeypatch.context() as nfs:
        nfs.setattr(files.os, "link", losing_the_answer(os.link, FileExistsError))
        assert files.write_once(path, b"mine")
    assert not files.write_once(path, b"another's")
    assert path.read_bytes() == b"mine"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, TimeoutError])
def test_a_link_that_was_made_although_it_failed_is_won(tmp_path, monkeypatch, error):
    monkeypatch.setattr(files.os, "link", losing_the_answer(os.link, error))
    assert files.write_once(tmp_path / "unit", b"mine")


def test_a_rename_whose_answer_was_lost_is_done(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    monkeypatch.setattr(files.os, "replace", losing_the_answer(os.replace, FileNotFoundError))
    files.write_atomic(path, b"new")
    with files.atomic_file(path) as file:
        file.write(b"newer")
    assert path.read_bytes() == b"newer"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("operation", ["link", "replace"])
def test_an_operation_that_failed_is_not_taken_for_done(tmp_path, monkeypatch, operation):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.os, operation, refuse)
    with pytest.raises(PermissionError):
        (files.write_once if operation == "link" else files.write_atomic)(tmp_path / "a", b"x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("write", "operation"), [(files.write_once, "link"), (files.write_atomic, "replace")])
def test_a_writer_whose_temporary_file_was_swept_away_writes_it_again(tmp_path, monkeypatch, write, operation):
    path, before, swept = tmp_path / "a", getattr(os, operation), []

    def swept_once(temporary, target):
        if not swept:
            swept.append(files.remove_temporaries(tmp_path))
        before(temporary, target)

    monkeypatch.setattr(files.os, operation, swept_once)
    write(path, b"all of it")
    assert swept == [1]
    assert path.read_bytes() == b"all of it"


def test_an_unfinished_file_that_was_swept_away_says_so(tmp_path):
    def write_while_somebody_sweeps():
        with files.atomic_file(tmp_path / "a"):
            files.remove_temporaries(tmp_path)

    with pytest.raises(FileNotFoundError):
        write_while_somebody_sweeps()


# --- what a file system has to offer


def test_a_file_system_with_links_is_taken(tmp_path):
    files.require_links(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_links_is_refused_with_the_cause(tmp_path, monkeypatch, code):
    def no_links(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files.os, "link", no_links)
    with pytest.raises(ConfigError, match=r"no hard links(.|\n)*NFS") as refused:
        files.require_links(tmp_path)
    assert refused.value.exit_code == 2
    with pytest.raises(OSError, match="its file system has no hard links"):
        files.write_once(tmp_path / "a", b"1")
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_creates_a_name_twice_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files.os, "link", lambda temporary, path: temporary.replace(path))
    with pytest.raises(ConfigError, match="two writers create the same name"):
        files.require_links(tmp_path)


def test_a_trial_that_another_driver_clears_under_way_is_repeated(tmp_path, monkeypatch):
    link, num_links = os.link, []

    def link_and_clear(temporary, path):
        link(temporary, path)
        num_links.append(path)
        if len(num_links) == 1:
            path.unlink()

    monkeypatch.setattr(files.os, "link", link_and_clear)
    files.require_links(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_is_no_file_system_without_links(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "link", full)
    with pytest.raises(OSError, match="No space"):
        files.require_links(tmp_path)


class Disk:
    """Counts what is synced, holds it up, and fails it."""

    def __init__(self, monkeypatch):
        self.num_syncs, self.error = 0, None
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        monkeypatch.setattr(os, "fdatasync", self._sync)

    def _sync(self, _):
        self.begun.release()
        assert self.may_end.acquire(timeout=20)
        self.num_syncs += 1
        if self.error:
            raise self.error


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


@pytest.fixture
def ledger(tmp_path):
    path = tmp_path / "requests.jsonl"
    append_line(path, b"{}")
    return GroupSync(path)


def test_who_asks_while_the_disk_is_busy_shares_the_next_sync(disk, ledger):
    first = ledger.sync()
    disk.begun.acquire()
    others = [ledger.sync() for _ in range(20)]
    disk.may_end.release()
    first.result(20)
    disk.begun.acquire()
    assert not any(other.done() for other in others)  # what they wrote came after the first sync had begun
    disk.may_end.release()
    for other in others:
        other.result(20)
    assert disk.num_syncs == 2


def test_a_disk_that_fails_tells_all_who_waited_and_is_tried_again(disk, ledger):
    disk.error = OSError(5, "Input/output error")
    disk.may_end.release()
    with pytest.raises(OSError, match="Input/output"):
        ledger.sync().result(20)
    disk.error = None
    disk.may_end.release()
    ledger.sync().result(20)


def test_who_gives_up_waiting_leaves_the_others_their_sync(disk, ledger):
    ledger.sync()
    disk.begun.acquire()
    gone, stays = ledger.sync(), ledger.sync()
    assert gone.cancel()
    for _ in range(2):
        disk.may_end.release()
    stays.result(20)


def test_a_new_files_name_is_synced_once(tmp_path, monkeypatch):
    folders = []
    monkeypatch.setattr("peagle.files.sync_folder", folders.append)
    path = tmp_path / "requests.jsonl"
    append_line(path, b"{}")
    ledger = GroupSync(path)
    for _ in range(3):
        ledger.sync().result(20)
    assert folders == [tmp_path]
