"""Make the wall clock jump by up to two hours every two seconds in Python processes with this folder in PYTHONPATH.

Only `time.time` jumps, which peagle's driver and workers and Ray's Python code read. The monotonic clock,
`datetime.now` and code in C++ keep the true time.
"""

import random
import time

_true_time = time.time


def _jumping_time() -> float:
    period = int(time.monotonic() // 2)  # the same in all processes on a machine
    return _true_time() + random.Random(period).uniform(-7200, 7200)


time.time = _jumping_time
