import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from peagle.errors import ConfigError, PeagleError, RunInUse
from pipelines.batch import lease as lease_module
from pipelines.batch.lease import hold_lease, read_lease


def hold(root, *, expiry_s=30.0, announce=lambda _: None):
    return hold_lease(root, expiry_s=expiry_s, command=["peagle", "generate", "--input", "a b"], announce=announce)


def put(root, lease):
    (root / ".lease" / f"{lease.number}.json").write_bytes(lease_module._to_bytes(lease))


@pytest.fixture
def foreign(tmp_path):
    """The lease of a driver of another host, which was never given back."""
    with hold(tmp_path):
        mine = read_lease(tmp_path)
    theirs = replace(mine, outcome=None, host="elsewhere", where="another boot", pid=7, expiry_s=1.0)
    put(tmp_path, theirs)
    return theirs


def test_a_lease_says_who_drives_and_then_how_it_ended(tmp_path):
    with hold(tmp_path):
        held = read_lease(tmp_path)
        assert (held.pid, held.command, held.outcome) == (os.getpid(), "peagle generate --input 'a b'", None)
        assert held.seems_alive()
    after = read_lease(tmp_path)
    assert (after.number, after.outcome) == (1, "ended")
    assert not after.seems_alive()


def test_an_error_is_the_outcome_and_the_next_driver_does_not_wait(tmp_path):
    with pytest.raises(PeagleError), hold(tmp_path):
        raise PeagleError("the disk is full", hint="buy one")
    assert read_lease(tmp_path).outcome == "PeagleError: the disk is full"
    started = time.monotonic()
    with hold(tmp_path) as second:
        assert second.number == 2
    assert time.monotonic() - started < 1
    assert [path.name for path in (tmp_path / ".lease").iterdir()] == ["2.json"]


def test_a_second_driver_is_refused_as_soon_as_the_first_one_shows_life(tmp_path):
    with hold(tmp_path, expiry_s=3.0):
        said, started = [], time.monotonic()
        with pytest.raises(RunInUse) as refused, hold(tmp_path, announce=said.append):
            pass
        assert time.monotonic() - started < 3
        for part in (f"process {os.getpid()}", "peagle generate --input 'a b'", "expires 3 s after", "Ctrl-C"):
            assert part in str(refused.value)
        assert "watching for 3 s" in said[0]
        assert read_lease(tmp_path).number == 1


def test_a_driver_that_stays_silent_is_replaced_after_its_expiry_whatever_the_clocks_say(tmp_path, foreign):
    put(tmp_path, replace(foreign, renewed_at=time.time() + 1e6, since=time.time() + 1e6))
    started = time.monotonic()
    with hold(tmp_path) as mine:
        assert mine.number == foreign.number + 1
    assert 1.0 <= time.monotonic() - started < 3


def test_a_driver_whose_clock_stands_years_back_is_alive_while_its_beat_changes(tmp_path, foreign):
    beat = threading.Timer(0.3, lambda: put(tmp_path, replace(foreign, beat=1, renewed_at=0.0)))
    beat.start()
    with pytest.raises(RunInUse, match="elsewhere"), hold(tmp_path):
        pass
    beat.join()


def test_a_killed_driver_of_this_host_is_replaced_at_once(tmp_path):
    code = (
        "import os, signal, sys, pathlib; from pipelines.batch.lease import hold_lease\n"
        "with hold_lease(pathlib.Path(sys.argv[1]), expiry_s=600, command=['x'], announce=print):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert read_lease(tmp_path).is_gone()
    (tmp_path / ".lease" / ".1.json.0123.tmp").touch()
    with hold(tmp_path) as mine:
        assert mine.number == 2
        assert [path.name for path in (tmp_path / ".lease").glob("*json*")] == ["2.json"]


def test_a_process_id_that_was_given_to_another_process_is_not_the_driver(tmp_path):
    with hold(tmp_path):
        mine = read_lease(tmp_path)
    assert not mine.is_gone()
    assert replace(mine, birth=mine.birth - 1).is_gone()


def test_a_driver_that_was_replaced_learns_of_it_and_leaves_its_successors_lease_alone(tmp_path):
    with hold(tmp_path, expiry_s=1.0) as slow:
        theirs = replace(read_lease(tmp_path), number=2, host="elsewhere", where="another boot")
        put(tmp_path, theirs)
        assert slow.lost.wait(2)
    assert read_lease(tmp_path) == theirs


def test_of_drivers_that_start_at_once_one_wins(tmp_path, foreign):
    outcomes, all_done = [], threading.Barrier(4)

    def drive():
        try:
            with hold(tmp_path):
                outcomes.append("won")
                all_done.wait(20)
        except RunInUse:
            outcomes.append("refused")
            all_done.wait(20)

    threads = [threading.Thread(target=drive) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["refused"] * 3 + ["won"]


def test_a_damaged_lease_is_named(tmp_path):
    (tmp_path / ".lease").mkdir()
    (tmp_path / ".lease" / "3.json").write_text(json.dumps({"number": 3}))
    with pytest.raises(PeagleError, match=r"3\.json is damaged"):
        read_lease(tmp_path)


def test_a_folder_that_cannot_be_written_is_bad_usage(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"), hold(tmp_path / "file" / "run"):
        pass
