"""The lease of a run directory. One driver holds and renews it; if the renewals stop, another may take over.

    OUT/.lease/N.json         lease N; the highest number is valid, and the file stays when its driver ends
    OUT/.lease/N.stop.json    exists while that driver stops the run, to tell its workers (`stopping.py`)

A lease is acquired by exclusively creating the next number (`write_once`), so only one of several drivers succeeds. The
holder rewrites the lease every few seconds with an incremented beat. Another driver that wants the lease watches the
beat. If the beat does not change for `expiry_s`, the holder counts as dead. The waiting driver measures this on its own
monotonic clock, so clock jumps and differences between hosts do not matter. If the holder's process was on the
same host and no longer exists, there is no wait.

Exactly-once cannot depend on the lease, because a suspended driver may resume after another one has finished. Instead,
units and plans are created exclusively (`directory.py`). The lease prevents two drivers from paying twice, and
a driver checks it before it deletes or replaces anything.
"""

import contextlib
import getpass
import json
import os
import shlex
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from peagle.errors import ConfigError, PeagleError, RunInUse
from peagle.storage import WRITE_ERRORS, StoragePath, make_folder, require_links, write_atomic, write_once

FOLDER = ".lease"
_RENEWALS = 6  # per `expiry_s`
_WAIT_POLL_S = 0.2
_READ_ATTEMPTS, _READ_RETRY_S = 50, 0.1  # if listed leases disappear before they can be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The current or most recent driver of a run."""

    number: int  # increases with every driver of the run
    token: str  # unique to this driver; numbers are not, as they restart at 1 if the folder is deleted
    user: str
    host: str
    where: str  # the boot and the process namespace in which `pid` is valid
    pid: int
    birth: int  # the process's start in kernel ticks, because pids are reused
    command: str
    since: float  # Unix time at which the driver acquired the lease
    expiry_s: float  # the lease expires if it is not renewed for this long
    # Interval of the engines' heartbeats; None without engines, and in leases of older versions.
    heartbeat_s: float | None = None
    beat: int = 0  # renewals so far
    renewed_at: float  # Unix time by the holder's clock, only for display
    outcome: str | None = None  # how the driver ended; None while it holds the lease, and if it was killed

    def is_gone(self) -> bool:
        """Return whether the driver's process is known to be dead; False if this host cannot know."""
        return self.where == _process_namespace() and self.birth != _start_ticks(self.pid)

    def seems_alive(self) -> bool:
        """Return whether the driver is probably alive, only for display. Across hosts this compares clocks."""
        if self.outcome is not None or self.is_gone():
            return False
        return self.where == _process_namespace() or time.time() - self.renewed_at < self.expiry_s

    def describe(self) -> str:
        """Return who holds the lease, where and since when."""
        return f"{self.user} on {self.host}, process {self.pid}, since {format_time(self.since)}"


def read_lease(root: StoragePath) -> Lease | None:
    """Return the lease of the current or most recent driver, or None."""
    hint = "make sure that no driver is running, and delete the file"
    for _ in range(_READ_ATTEMPTS):
        if not (numbers := _lease_numbers(root)):
            return None
        path = root / FOLDER / f"{max(numbers)}.json"
        try:
            return Lease(**json.loads(path.read_bytes()))
        except FileNotFoundError:  # the next driver has just deleted this lease and written its own
            time.sleep(_READ_RETRY_S)
        except (ValueError, TypeError) as error:
            raise PeagleError(f"{path} is damaged: {error}", hint=hint) from error
    raise PeagleError(f"{path} is listed but cannot be read", hint=hint)


class HeldLease:
    """The lease of this process, renewed by a thread until `end`."""

    def __init__(self, root: StoragePath, lease: Lease) -> None:
        # Set if another driver has taken over because this driver could not renew in time.
        self.lost = threading.Event()
        self.outcome = "ended"  # written into the lease at the end
        self._root = root
        self._lease = lease
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    @property
    def number(self) -> int:
        return self._lease.number

    def require_held(self) -> None:
        """Raise RunInUse if another driver has taken over, or ConfigError if the folder cannot be read."""
        try:
            if self._is_taken_over():
                self.lost.set()
        except OSError as error:
            raise ConfigError(f"output {self._root}: cannot be read: {error}") from error
        if self.lost.is_set():
            raise taken_over_error(self._root)

    def is_lost(self) -> bool:
        """Return whether another driver is known to have taken over."""
        with contextlib.suppress(*WRITE_ERRORS, PeagleError):
            self.require_held()
        return self.lost.is_set()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(*WRITE_ERRORS, PeagleError):  # if the disk is full, the lease expires
            if not self._is_taken_over():
                self._write(replace(self._lease, renewed_at=time.time(), outcome=self.outcome))

    def _renew(self) -> None:
        while not self._ended.wait(self._lease.expiry_s / _RENEWALS):
            # The next renewal may succeed; otherwise the lease expires.
            with contextlib.suppress(*WRITE_ERRORS, PeagleError):
                if self._is_taken_over():
                    self.lost.set()
                    return
                self._lease = replace(self._lease, beat=self._lease.beat + 1, renewed_at=time.time())
                self._write(self._lease)

    def _is_taken_over(self) -> bool:
        lease = read_lease(self._root)
        if lease is None:  # the folder was deleted
            return True
        return (lease.number, lease.token) != (self._lease.number, self._lease.token)

    def _write(self, lease: Lease) -> None:
        write_atomic(self._root / FOLDER / f"{lease.number}.json", _lease_to_bytes(lease))


@contextlib.contextmanager
def hold_lease(
    root: StoragePath,
    *,
    expiry_s: float,
    heartbeat_s: float | None = None,
    command: Sequence[str],
    announce: Callable[[str], None],
) -> Iterator[HeldLease]:
    """Hold the run directory's lease. An exception in the block becomes the lease's outcome.

    Raises RunInUse if a live driver holds the lease or has taken over, and ConfigError or StorageError if the folder
    cannot be written. `heartbeat_s` is the interval of the engines' heartbeats, for `peagle status`.
    """
    try:
        held_lease = HeldLease(root, _acquire(root, expiry_s, heartbeat_s, command, announce))
    except OSError as error:
        raise ConfigError(f"output {root}: cannot be written: {error}") from error
    try:
        yield held_lease
    except BaseException as error:
        kind, message = type(error).__name__, getattr(error, "message", error)
        held_lease.outcome = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{kind}: {message}"
        if isinstance(error, PeagleError) and not isinstance(error, RunInUse) and held_lease.is_lost():
            raise taken_over_error(root) from error
        raise
    finally:
        held_lease.end()


def taken_over_error(root: StoragePath) -> RunInUse:
    """Return the error for a driver that has lost its lease."""
    return RunInUse(
        f"{root} was taken over by another driver while this driver did not respond",
        hint="committed units are kept; let the other driver finish",
    )


def format_time(at: float) -> str:
    """Format a Unix time."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def _acquire(
    root: StoragePath,
    expiry_s: float,
    heartbeat_s: float | None,
    command: Sequence[str],
    announce: Callable[[str], None],
) -> Lease:
    make_folder(root / FOLDER)
    require_links(root / FOLDER)
    while True:
        previous = read_lease(root)
        if previous is not None:
            _wait_until_free(root, previous, announce)
        now = time.time()
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # the user of a container may have no name
            user = str(os.getuid())
        lease = Lease(
            number=previous.number + 1 if previous else 1,
            token=uuid.uuid4().hex,
            user=user,
            host=socket.gethostname(),
            where=_process_namespace(),
            pid=os.getpid(),
            birth=_start_ticks(os.getpid()),
            command=shlex.join(command),
            since=now,
            renewed_at=now,
            expiry_s=expiry_s,
            heartbeat_s=heartbeat_s,
        )
        path = root / FOLDER / f"{lease.number}.json"
        is_created = write_once(path, _lease_to_bytes(lease))
        # If this process was suspended before `write_once`, there may be leases with higher numbers.
        if is_created and max(_lease_numbers(root), default=0) == lease.number:
            # Delete earlier leases and leftovers of killed drivers, but not files of drivers that are trying now.
            for other in (root / FOLDER).iterdir():
                number = other.name.lstrip(".").partition(".")[0]
                if number.isdecimal() and int(number) < lease.number:
                    other.unlink(missing_ok=True)
            return lease
        if is_created:  # with a number that is too low
            path.unlink(missing_ok=True)
        current = read_lease(root)
        if current is not None and current.outcome is None:
            raise _in_use_error(root, current)


def _wait_until_free(root: StoragePath, lease_before: Lease, announce: Callable[[str], None]) -> None:
    """Wait until the lease is free; raise RunInUse as soon as it is renewed."""
    if lease_before.outcome is not None or lease_before.is_gone():
        return
    announce(
        f"{root} is held by {lease_before.describe()}; waiting {lease_before.expiry_s:g} s to see whether that driver "
        "is alive"
    )
    expires_at = time.monotonic() + lease_before.expiry_s
    while time.monotonic() < expires_at:
        time.sleep(_WAIT_POLL_S)
        lease_now = read_lease(root) or lease_before
        if lease_now.number != lease_before.number or (
            lease_now.beat != lease_before.beat and lease_now.outcome is None
        ):
            raise _in_use_error(root, lease_now)
        if lease_now.outcome is not None or lease_now.is_gone():
            return


def _in_use_error(root: StoragePath, lease: Lease) -> RunInUse:
    return RunInUse(
        f"{root} is in use by {lease.describe()}: {lease.command}\n"
        f"  last renewed at {format_time(lease.renewed_at)}; it expires {lease.expiry_s:g} s after the last renewal",
        hint="wait for that driver, or stop it (Ctrl-C, or kill the process) and repeat this command",
    )


def _lease_to_bytes(lease: Lease) -> bytes:
    return (json.dumps(asdict(lease), indent=2) + "\n").encode()


def _lease_numbers(root: StoragePath) -> list[int]:
    return [int(path.stem) for path in (root / FOLDER).glob("*.json") if path.stem.isdecimal()]


def _process_namespace() -> str:
    """Return an id of this boot and process namespace, or an id of this process if the kernel provides none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return f"{socket.gethostname()}:{os.getpid()}"


def _start_ticks(pid: int) -> int:
    """Return when a process started, in ticks since boot; 0 if it does not exist or is a zombie."""
    try:
        fields: list[Any] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
