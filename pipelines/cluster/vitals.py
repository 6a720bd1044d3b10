"""Watch the processes of Ray that a command depends on, and end the command with a message when one dies.

Ray itself reports nothing: a driver whose control service (GCS) died exits after a minute without a message, and a
driver whose raylet died waits forever.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from peagle.errors import EngineError

_POLL_S = 0.5
_UNWIND_S = 15.0  # time for the main thread to end; calls into a dead Ray may never return
_CONNECT_S = 2.0
_REPORT_AFTER_S = 10.0  # time until an unreachable part is reported
_RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
_LOCAL_PARTS = {"gcs_server": "control service (gcs_server)", "raylet": "raylet"}


class RayDied(EngineError):  # noqa: N818 - named after the event
    """A part of Ray died, and the command cannot continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A process of Ray.

    Attributes:
        name: subject of messages, such as "raylet, process 7,".
        patience_s: how long the part may be unreachable, since a control service with external storage can restart.
        log: path of the part's log; empty if unknown.
        pid: process id, if this process started the part.
    """

    name: str
    is_alive: Callable[[], bool]
    patience_s: float = 0.0
    log: str = ""
    pid: int | None = None


class Vitals:
    """Watches the parts of one Ray cluster in a thread.

    When a part dies, `RayDied` is raised in the main thread. If this process has not ended 15 s later, it is killed.

    Args:
        if_lost: the hint of `RayDied`: what was lost and how to continue.
    """

    def __init__(self, parts: Sequence[Part], if_lost: str) -> None:
        self._parts, self._if_lost = parts, if_lost
        self._unreachable_since: dict[str, float] = {}
        self._reported: set[str] = set()
        self._lock, self._signal_lock = threading.Lock(), threading.Lock()
        self._ended = threading.Event()
        self._error: RayDied | None = None
        self._is_handled = False
        self._thread = threading.Thread(target=self._watch, name="ray-vitals", daemon=True)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch during the block. An error inside becomes `RayDied` if a part is dead."""
        is_main = threading.current_thread() is threading.main_thread()
        self._is_handled = not is_main  # only the main thread can receive the exception; others end with the process
        previous_handler = signal.signal(signal.SIGUSR1, self._raise_in_main_thread) if is_main else None
        self._thread.start()
        try:
            yield
        except RayDied:
            raise
        except Exception as error:
            if ray_died := self.check():
                raise ray_died from error
            raise
        finally:
            with self._signal_lock:
                self._is_handled = True  # no signal is sent from here on
            if not self.check():
                self._ended.set()
            if is_main:
                signal.signal(signal.SIGUSR1, previous_handler or signal.SIG_DFL)

    def check(self) -> RayDied | None:
        """Return the error of the first part that is dead, or None."""
        with self._lock:
            if self._error is None:
                for part in self._parts:
                    if part.is_alive():
                        self._unreachable_since.pop(part.name, None)
                        self._reported.discard(part.name)
                    elif self._is_unreachable_too_long(part):
                        log = f"; the log is {part.log}" if part.log else ""
                        self._error = RayDied(
                            f"Ray's {part.name} died",
                            hint=f"{self._if_lost}. Often a machine was out of memory (`dmesg`){log}",
                        )
                        break
            return self._error

    def kill_leftovers(self) -> None:
        """Kill the local parts and their descendants, some of which wait for a minute for the control service."""
        for pid in [part.pid for part in self._parts if part.pid is not None]:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                for process_to_kill in [process, *process.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):
                        process_to_kill.kill()

    def _is_unreachable_too_long(self, part: Part) -> bool:
        now = time.monotonic()
        if part.name not in self._unreachable_since:
            self._unreachable_since[part.name] = now
        unreachable_s = now - self._unreachable_since[part.name]
        if part.patience_s > unreachable_s >= _REPORT_AFTER_S and part.name not in self._reported:
            self._reported.add(part.name)
            left_s = part.patience_s - unreachable_s
            _print(f"Ray's {part.name} cannot be reached; the command ends if it is not back in {left_s:.0f} s")
        return unreachable_s >= part.patience_s

    def _raise_in_main_thread(self, number: int, frame: Any) -> None:
        if self._error is not None and not self._is_handled:
            self._is_handled = True
            raise self._error

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            if error := self.check():
                with self._signal_lock, contextlib.suppress(ProcessLookupError):
                    if not self._is_handled:
                        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                if not self._ended.wait(_UNWIND_S):
                    _print(f"\npeagle: {error}")
                    self.kill_leftovers()
                    os._exit(error.exit_code)  # the main thread is blocked in a call into Ray
                return


def local_parts() -> list[Part]:
    """Return the parts of the Ray cluster that this process started."""
    parts = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if (name := _LOCAL_PARTS.get(process.name())) is not None:
                log = next(
                    (
                        argument.partition("=")[2]
                        for argument in process.cmdline()
                        if argument.lstrip("-").startswith("log_dir=")
                    ),
                    "",
                )
                is_alive = _process_check(process)
                parts.append(Part(name=f"{name}, process {process.pid},", is_alive=is_alive, log=log, pid=process.pid))
    return parts


def joined_parts() -> list[Part]:
    """Return the control service and this node's raylet of a joined cluster."""
    import ray

    context = ray.get_runtime_context()
    node_id = context.get_node_id()
    node = next((node for node in ray.nodes() if node["NodeID"] == node_id), None)
    # Ray waits 60 s by default for its control service, and then exits without a message. Report it 5 s earlier.
    patience_s = max(float(os.environ.get(_RECONNECT_VARIABLE, "60")) - 5, _REPORT_AFTER_S)
    parts = [_remote_part("control service", context.gcs_address, patience_s)]
    if node is not None:
        parts.append(_remote_part("raylet", f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}", _REPORT_AFTER_S))
    return parts


def _process_check(process: psutil.Process) -> Callable[[], bool]:
    def is_alive() -> bool:
        try:
            return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    return is_alive


def _remote_part(name: str, address: str, patience_s: float) -> Part:
    host, _, port = address.rpartition(":")

    def is_alive() -> bool:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S):
                return True
        except OSError:
            return False

    return Part(name=f"{name} at {address}", is_alive=is_alive, patience_s=patience_s)


def _print(line: str) -> None:
    """Print a line from any thread. While a command uses Ray, standard error is redirected to a log."""
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.stdout.fileno(), f"{line}\n".encode(errors="backslashreplace"))
