"""A clock that tests set, and settings of the process."""

import os

import pytest

# With auto-connect, a call of Ray without a cluster would join any cluster on this machine, or start one.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # workers share the cores


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()
