"""A clock that tests move, and one thread for each worker's arithmetic."""

import os

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # workers share the cores, and threads that wait for each other burn them


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()
