"""A wall clock that jumps every two seconds by up to two hours, for Python processes with this folder in PYTHONPATH.

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
