import os
import threading

import pytest

from peagle.files import append_line
from peagle.group_sync import GroupSync


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
    monkeypatch.setattr("peagle.group_sync.sync_folder", folders.append)
    path = tmp_path / "requests.jsonl"
    append_line(path, b"{}")
    ledger = GroupSync(path)
    for _ in range(3):
        ledger.sync().result(20)
    assert folders == [tmp_path]
