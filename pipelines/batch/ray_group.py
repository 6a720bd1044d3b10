"""A process group for each of Ray's processes: what ends the group of ours must not end them under our feet.

A terminal's Ctrl-C, `timeout` and many supervisors send a signal to a whole process group. Ray's raylet and the engines
are then gone before they could commit what they have.
"""

import contextlib
import os
import threading
from collections.abc import Iterator

_starting: set[int] = set()  # threads that start Ray
_is_registered = False


@contextlib.contextmanager
def own_groups() -> Iterator[None]:
    """Each process that this thread starts in here leads a group of its own.

    Python calls what is registered for a fork in every child that has a `preexec_fn`, and Ray 2.60 starts its processes
    with one (`_private/services.py: start_ray_process`).
    """
    global _is_registered
    if not _is_registered:
        os.register_at_fork(after_in_child=_lead_own_group)
        _is_registered = True
    thread = threading.get_ident()
    _starting.add(thread)
    try:
        yield
    finally:
        _starting.discard(thread)


def _lead_own_group() -> None:
    if threading.get_ident() in _starting:
        os.setpgid(0, 0)
