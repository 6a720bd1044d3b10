"""Keep the terminal's signals from Ray, and Ray's output from the terminal.

Ctrl-C, `timeout` and many supervisors signal a whole process group. If Ray's processes were in the command's process
group, the raylet and the engines would end before units in progress could be committed.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

_starting_threads: set[int] = set()  # ids of threads that are starting Ray
_is_registered = False


@contextlib.contextmanager
def new_process_groups() -> Iterator[None]:
    """Start each process of this thread in its own process group.

    Python calls fork handlers in every child that has a `preexec_fn`, and Ray 2.60 starts its processes with a
    `preexec_fn` (`_private/services.py: start_ray_process`).
    """
    global _is_registered
    if not _is_registered:
        os.register_at_fork(after_in_child=_lead_own_group)
        _is_registered = True
    thread = threading.get_ident()
    _starting_threads.add(thread)
    try:
        yield
    finally:
        _starting_threads.discard(thread)


def send_ray_messages_to_stderr() -> None:
    """Send Ray's messages about failed processes to standard error, which is a log while a command uses Ray.

    Ray 2.60 prints them to the driver's standard output even with `log_to_driver=False`. For example, it reports after
    each regular shutdown of Serve that Serve's controller is dead.
    """
    from ray._private import worker

    original = worker.print_to_stdstream
    if getattr(original, "redirects_to_stderr", False):
        return

    def print_on_stderr(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        original({**data, "is_err": True}, *args, **kwargs)

    print_on_stderr.redirects_to_stderr = True  # type: ignore[attr-defined]
    worker.print_to_stdstream = print_on_stderr


def _lead_own_group() -> None:
    if threading.get_ident() in _starting_threads:
        os.setpgid(0, 0)
