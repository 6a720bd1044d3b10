"""Stop workers within a grace period, and tell the user how to continue the run."""

import contextlib
import json
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from peagle.errors import PeagleError
from peagle.storage import StoragePath, is_remote, write_json


class StopSignal:
    """A driver's stop signal to its own workers, as a file in the run directory.

    The file is in the folder of the leases, so the next driver deletes it with this driver's lease.
    """

    def __init__(self, folder: StoragePath, driver: int) -> None:
        self._path = folder / f"{driver}.stop.json"

    def request(self, grace_s: float) -> None:
        """Tell workers to start no more units, and to abandon units not committed within `grace_s` seconds."""
        write_json(self._path, {"grace_s": grace_s})

    def grace_s(self) -> float | None:
        """Return the grace period in seconds if the run is being stopped, or None."""
        try:
            return float(json.loads(self._path.read_bytes())["grace_s"])
        except FileNotFoundError:
            return None

    def reader(self) -> Callable[[], float | None]:
        """Return a function like `grace_s` that is cheap to call: on S3, a thread polls the file."""
        return PolledStop(self.grace_s) if is_remote(self._path) else self.grace_s

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)


class PolledStop:
    """A stop signal on S3, polled by a thread. If a read fails, the last value is kept."""

    def __init__(self, read_grace_s: Callable[[], float | None], *, every_s: float = 1.0) -> None:
        self._read_grace_s = read_grace_s
        self._every_s = every_s
        self._grace_s: float | None = None
        threading.Thread(target=self._poll, daemon=True).start()

    def __call__(self) -> float | None:
        return self._grace_s

    def _poll(self) -> None:
        while True:
            with contextlib.suppress(OSError, PeagleError):
                self._grace_s = self._read_grace_s()
            time.sleep(self._every_s)


class GraceClock:
    """The grace period of a worker, which starts when the worker first sees the stop signal.

    `read_grace_s` returns the grace period in seconds if the run is being stopped, or None.
    """

    def __init__(
        self, read_grace_s: Callable[[], float | None], *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._read_grace_s = read_grace_s
        self._monotonic = monotonic
        self._over_at: float | None = None

    def is_stopping(self) -> bool:
        """Whether the run is being stopped, in which case nothing new may be started."""
        if self._over_at is None and (grace_s := self._read_grace_s()) is not None:
            self._over_at = self._monotonic() + grace_s
        return self._over_at is not None

    def is_over(self) -> bool:
        """Whether unfinished units must be abandoned."""
        return self.is_stopping() and self._over_at is not None and self._monotonic() >= self._over_at


def resume_command(command: Sequence[str], flags: Mapping[str, str | None]) -> str:
    """Return the command line that continues a run: this attempt's command with changed flags.

    A flag whose value is None has no value.

    >>> resume_command(["peagle", "generate", "--budget-usd=1", "--retry-failed"], {"--budget-usd": "2"})
    'peagle generate --budget-usd 2'
    """
    arguments, is_value_of_changed_flag = [], False
    for argument in command:
        name = argument.partition("=")[0]
        if is_value_of_changed_flag:
            is_value_of_changed_flag = False
        elif name in flags and flags[name] is not None:
            is_value_of_changed_flag = "=" not in argument
        elif name != "--retry-failed":
            arguments.append(argument)
    for name, value in flags.items():
        arguments += [name] if value is None else [name, value]
    return shlex.join(arguments)
