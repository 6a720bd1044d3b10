import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from peagle.errors import ConfigError, PeagleError, RunInUse
from peagle.runs import lease as lease_module
from peagle.runs.lease import hold_lease, read_lease
from peagle.storage import storage_path, write_atomic


def hold(root, *, expiry_s=30.0, announce=lambda _: None):
    return hold_lease(root, expiry_s=expiry_s, command=["peagle", "generate", "--input", "a b"], announce=announce)


def write_lease(root, lease):
    write_atomic(root / ".lease" / f"{lease.number}.json", lease_module._lease_to_bytes(lease))


@pytest.fixture
def lease_of_other_host(root):
    """A lease that a driver on another host has not released."""
    with hold(root):
        lease = read_lease(root)
    lease = replace(lease, outcome=None, host="elsewhere", where="another boot", pid=7, expiry_s=1.0)
    write_lease(root, lease)
    return lease


def test_lease_describes_driver_and_outcome(root):
    with hold(root):
        lease = read_lease(root)
        assert (lease.pid, lease.command, lease.outcome) == (os.getpid(), "peagle generate --input 'a b'", None)
        assert lease.seems_alive()
    after = read_lease(root)
    assert (after.number, after.outcome) == (1, "ended")
    assert not after.seems_alive()


def test_lease_is_released_with_the_error_of_its_driver(root):
    with pytest.raises(PeagleError), hold(root):
        raise PeagleError("the disk is full", hint="buy one")
    assert read_lease(root).outcome == "PeagleError: the disk is full"
    started_at = time.monotonic()
    with hold(root) as second:
        assert second.number == 2
    assert time.monotonic() - started_at < 15  # the new driver did not wait for the expiry after 30 s
    assert [path.name for path in (root / ".lease").iterdir()] == ["2.json"]


def test_second_driver_is_refused_while_the_first_is_alive(root):
    with hold(root, expiry_s=20.0):
        messages, started_at = [], time.monotonic()
        with pytest.raises(RunInUse) as error, hold(root, announce=messages.append):
            pass
        assert time.monotonic() - started_at < 20
        for part in (f"process {os.getpid()}", "peagle generate --input 'a b'", "expires 20 s after", "Ctrl-C"):
            assert part in str(error.value)
        assert "waiting 20 s" in messages[0]
        assert read_lease(root).number == 1


def test_silent_driver_is_replaced_after_expiry(root, lease_of_other_host):
    # The clock of the other host is wrong.
    write_lease(root, replace(lease_of_other_host, renewed_at=time.time() + 1e6, since=time.time() + 1e6))
    started_at = time.monotonic()
    with hold(root) as lease:
        assert lease.number == lease_of_other_host.number + 1
    assert 1.0 <= time.monotonic() - started_at < 15  # the old lease expires after 1 s, the new one after 30 s


def test_wrong_clock_does_not_expire_a_lease(root, lease_of_other_host):
    heartbeat = threading.Timer(0.3, lambda: write_lease(root, replace(lease_of_other_host, beat=1, renewed_at=0.0)))
    heartbeat.start()
    with pytest.raises(RunInUse, match="elsewhere"), hold(root):
        pass
    heartbeat.join()


def test_killed_driver_on_this_host_is_replaced_immediately(tmp_path):
    code = (
        "import os, signal, sys, pathlib; from peagle.runs.lease import hold_lease\n"
        "with hold_lease(pathlib.Path(sys.argv[1]), expiry_s=600, command=['x'], announce=print):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert read_lease(tmp_path).is_gone()
    (tmp_path / ".lease" / ".1.json.0123.tmp").touch()
    with hold(tmp_path) as lease:
        assert lease.number == 2
        assert [path.name for path in (tmp_path / ".lease").glob("*json*")] == ["2.json"]


def test_driver_is_gone_if_another_process_has_its_pid(root):
    with hold(root):
        lease = read_lease(root)
    assert not lease.is_gone()
    assert replace(lease, birth=lease.birth - 1).is_gone()


def test_replaced_driver_notices_and_keeps_the_new_lease(root):
    with hold(root, expiry_s=1.0) as replaced:
        other = replace(read_lease(root), number=2, host="elsewhere", where="another boot")
        write_lease(root, other)
        assert replaced.lost.wait(2)
    assert read_lease(root) == other


def test_one_of_several_simultaneous_drivers_gets_the_lease(root, lease_of_other_host):
    outcomes, all_tried = [], threading.Barrier(4)

    def drive():
        try:
            with hold(root):
                outcomes.append("holds the lease")
                all_tried.wait(20)
        except RunInUse:
            outcomes.append("refused")
            all_tried.wait(20)

    threads = [threading.Thread(target=drive) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["holds the lease"] + ["refused"] * 3


def test_damaged_lease_is_named(root):
    (root / ".lease").mkdir(parents=True)
    write_atomic(root / ".lease" / "3.json", json.dumps({"number": 3}).encode())
    with pytest.raises(PeagleError, match=r"3\.json is damaged"):
        read_lease(root)


def test_unwritable_lease_folder_is_a_config_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"), hold(tmp_path / "file" / "run"):
        pass


def test_leases_are_listed_again_if_the_listed_lease_is_gone(root, monkeypatch):
    with hold(root):
        pass
    with hold(root):
        pass
    listings = [[1]]  # a listing from before the second driver removed the first lease
    monkeypatch.setattr(lease_module, "_lease_numbers", lambda _: listings.pop() if listings else [2])
    assert read_lease(root).number == 2


def make_next_read_return_none(monkeypatch):
    """Make the next read of the lease return None, as if it had been read before any driver started."""
    stale_reads = [None]
    monkeypatch.setattr(
        lease_module, "read_lease", lambda place: stale_reads.pop() if stale_reads else read_lease(place)
    )


def test_stale_lease_number_is_skipped(root, monkeypatch):
    for _ in range(3):
        with hold(root):
            pass
    make_next_read_return_none(monkeypatch)
    with hold(root) as lease:
        assert lease.number == 4
        assert [path.name for path in (root / ".lease").iterdir()] == ["4.json"]


def test_suspended_driver_with_stale_number_is_refused(root, monkeypatch):
    for _ in range(2):
        with hold(root):
            pass
    with hold(root) as other:
        make_next_read_return_none(monkeypatch)
        with pytest.raises(RunInUse, match=f"process {os.getpid()}"), hold(root):
            pass
        other.require_held()


def test_lost_lease_is_refused_when_required(root):
    with hold(root) as lease:
        lease.require_held()
        write_lease(root, replace(read_lease(root), number=2, token="another's"))
        with pytest.raises(RunInUse, match="taken over"):
            lease.require_held()


def test_deleted_lease_folder_means_a_lost_lease(tmp_path):
    with hold(tmp_path) as first:
        shutil.rmtree(tmp_path / ".lease")
        with pytest.raises(RunInUse):
            first.require_held()
    with hold(tmp_path) as first:
        shutil.rmtree(tmp_path / ".lease")
        with hold(tmp_path) as second:
            assert (first.number, second.number) == (1, 1)
            assert first.is_lost()
            assert not second.is_lost()


def test_error_after_a_takeover_names_the_takeover(root):
    def drive():
        with hold(root):
            write_lease(root, replace(read_lease(root), number=2, token="another's"))
            raise ConfigError("a file vanished")

    with pytest.raises(RunInUse, match="taken over"):
        drive()


def test_file_system_without_hard_links_is_refused(tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(ConfigError, match="no hard links"), hold(tmp_path / "run"):
        pass
    assert list((tmp_path / "run" / ".lease").iterdir()) == []


# --- on S3


def test_lease_is_kept_during_short_store_failures(s3):
    root = storage_path("s3://bucket/run")
    with hold(root, expiry_s=1.0) as lease:
        before = read_lease(root).beat
        s3.fail(403, method="PUT", times=2)
        deadline = time.monotonic() + 10
        while read_lease(root).beat < before + 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert not lease.lost.is_set()
    assert read_lease(root).outcome == "ended"


def test_probe_objects_of_killed_drivers_are_removed(s3):
    root = storage_path("s3://bucket/run")
    write_atomic(root / ".lease" / "0.0123.json", b"{}")
    with hold(root):
        assert [path.name for path in (root / ".lease").iterdir()] == ["1.json"]
