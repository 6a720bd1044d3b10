import threading

import pytest

from peagle.errors import StorageError
from peagle.runs.stopping import GraceClock, PolledStop, resume_command


def test_grace_period_starts_when_the_worker_sees_the_signal():
    grace_s, now = [None], [100.0]
    grace = GraceClock(lambda: grace_s[0], monotonic=lambda: now[0])
    assert not grace.is_stopping()
    assert not grace.is_over()
    grace_s[0] = 20.0
    assert grace.is_stopping()
    now[0] = 119.9
    assert not grace.is_over()
    now[0] = 120.0
    assert grace.is_over()


def test_polled_stop_continues_after_store_failures():
    results = iter([None, StorageError("gone"), OSError("gone"), 7.5, StorageError("gone")])
    reads = threading.Semaphore(0)

    def read():
        reads.release()
        result = next(results, 7.5)
        if isinstance(result, Exception):
            raise result
        return result

    polled = PolledStop(read, every_s=0.01)
    for _ in range(8):
        assert reads.acquire(timeout=10)
    assert polled() == 7.5


@pytest.mark.parametrize(
    ("command", "flags", "expected"),
    [
        (["peagle", "generate", "--input", "a b"], {}, "peagle generate --input 'a b'"),
        (["g", "--budget-usd", "1", "--limit", "3"], {"--budget-usd": "2"}, "g --limit 3 --budget-usd 2"),
        (["g", "--budget-usd=1"], {"--budget-usd": "2"}, "g --budget-usd 2"),
        (["g", "--retry-failed", "--limit", "3"], {}, "g --limit 3"),
        (["g"], {"--retry-failed": None}, "g --retry-failed"),
        (["g", "--retry-failed"], {"--retry-failed": None}, "g --retry-failed"),
    ],
)
def test_resume_command_changes_flags_and_drops_retry_failed(command, flags, expected):
    assert resume_command(command, flags) == expected
