from types import SimpleNamespace

import pytest

from pipelines.online.batches.store import TRUST_AFTER_S, SteadyClock

YEAR_S = 365 * 24 * 3600.0
START = 1.8e9


@pytest.fixture
def machine():
    """A wall clock that can be set, and the monotonic clock."""
    return SimpleNamespace(ahead=0.0, uptime=1000.0)


@pytest.fixture
def make_clock(machine):
    def make(boot="a"):
        return SteadyClock(
            wall=lambda: START + machine.uptime + machine.ahead, monotonic=lambda: machine.uptime, boot=boot
        )

    return make


@pytest.mark.parametrize("jump_s", [YEAR_S, 60.0, -60.0, -YEAR_S])
def test_clock_jump_is_trusted_after_a_day(machine, make_clock, jump_s):
    clock = make_clock()
    before = clock()
    machine.uptime += 10
    machine.ahead = jump_s
    assert clock() == before + 10
    machine.uptime += TRUST_AFTER_S - 1
    assert clock() == before + 10 + TRUST_AFTER_S - 1
    machine.uptime += 1
    assert clock() == START + machine.uptime + jump_s


def test_jump_that_is_corrected_within_a_day_is_ignored(machine, make_clock):
    clock = make_clock()
    for _ in range(5):
        for ahead in (YEAR_S, -YEAR_S, 0.0):
            machine.ahead = ahead
            machine.uptime += TRUST_AFTER_S / 2
            assert clock() == START + machine.uptime


def test_small_corrections_are_followed(machine, make_clock):
    clock = make_clock()
    for _ in range(100):
        machine.ahead += 1
        machine.uptime += 60
        assert clock() == START + machine.uptime + machine.ahead


def test_clock_continues_in_the_next_process(machine, make_clock):
    clock = make_clock()
    machine.ahead = YEAR_S
    clock()
    machine.uptime += TRUST_AFTER_S / 2
    note = clock.state()
    machine.uptime += 3600  # no process in the meantime
    later = make_clock()
    later.resume(note)
    assert later() == START + machine.uptime
    machine.uptime += TRUST_AFTER_S / 2 - 3600
    assert later() == START + machine.uptime + YEAR_S  # trusted: unchanged for a day, across a restart


@pytest.mark.parametrize("boot", ["b", None])
def test_clock_continues_from_the_saved_time_after_a_reboot(machine, make_clock, boot):
    note = make_clock().state()
    machine.ahead, machine.uptime = YEAR_S, 5.0
    later = make_clock(boot)
    later.resume(note)
    assert later() == note["now"]
    machine.uptime += TRUST_AFTER_S
    assert later() == START + machine.uptime + YEAR_S


@pytest.mark.parametrize("jump_s", [YEAR_S, -YEAR_S])
def test_lifetime_holds_for_both_clocks(machine, make_clock, jump_s):
    clock = make_clock()
    machine.ahead = jump_s
    assert clock.after(3600) == START + machine.uptime + max(0, jump_s) + 3600
