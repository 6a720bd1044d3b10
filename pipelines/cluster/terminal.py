"""The terminal that Ray shares with a command: signals and lines.

Ray must not get the signals; the lines are ours.

A terminal's Ctrl-C, `timeout` and many supervisors send a signal to a whole process group. Ray's raylet and the engines
would be gone before they could commit what they have.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

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


def keep_off_standard_output() -> None:
    """Have Ray print its processes' failures on standard error.

    That is a log while a command has Ray.

    Ray 2.60 prints it on the driver's standard output, in colours, whatever `log_to_driver` says: after each clean end
    of Serve, for example, that its controller is dead.
    """
    from ray._private import worker

    original = worker.print_to_stdstream
    if getattr(original, "is_ours", False):
        return

    def print_on_stderr(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        original({**data, "is_err": True}, *args, **kwargs)

    print_on_stderr.is_ours = True  # type: ignore[attr-defined]
    worker.print_to_stdstream = print_on_stderr


def _lead_own_group() -> None:
    if threading.get_ident() in _starting:
        os.setpgid(0, 0)
