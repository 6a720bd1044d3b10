"""A wall clock that is set anew every two seconds, up to two hours forward or back, for every Python process that has
this folder on its PYTHONPATH.

It covers `time.time`, which is the wall clock that peagle's driver and workers read, and Ray's Python. The monotonic
clock, `datetime.now` and everything written in C++ keep the true time.
"""

import random
import time

_true_time = time.time


def _jumping_time() -> float:
    period = int(time.monotonic() // 2)  # the same on all processes of a machine
    return _true_time() + random.Random(period).uniform(-7200, 7200)


time.time = _jumping_time
