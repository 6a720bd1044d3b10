"""The time by which files and batches expire: steady, whatever is done to the wall clock.

Between two looks as much time passes as the machine's monotonic clock counts. Where the wall clock says otherwise it
was set anew, by NTP, by a person or because a virtual machine went on after a pause, and it may be wrong. It is
believed when it has gone on steadily for a day. So nothing expires early by a clock that is put right within a day,
and what should have expired in a pause does so a day late.

A process goes on where the last one was: by the monotonic clock, if the machine was not started anew meanwhile, else
from the last time that was noted, as after a jump. It knows clocks; where the note lies is for `store.py`.
"""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

BELIEVED_AFTER_S = 24 * 3600.0
_TOLERANCE_S = 2.0  # NTP corrects less than that without a jump, and a leap second is one
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str | None:
    """Of this start of this machine: the monotonic clock counts from there. None where the system has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None


class SteadyClock:
    """Unix time as it should be; threads may share it.

    Args:
        wall: Unix time as the system says it.
        monotonic: seconds since some moment, for all processes between two starts of the machine the same.
        boot: which start of which machine this is; None where nobody knows.
    """

    def __init__(
        self,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        boot: str | None = None,
    ) -> None:
        self._wall, self._monotonic, self._boot = wall, monotonic, boot
        self._lock = threading.Lock()
        self._offset = wall() - monotonic()
        self._doubted: tuple[float, float] | None = None  # another offset, and since when it has been the same

    def __call__(self) -> float:
        """The time now."""
        with self._lock:
            now = self._monotonic()
            offset = self._wall() - now
            if _is_near(offset, self._offset):
                self._offset, self._doubted = offset, None
            elif self._doubted is None or not _is_near(offset, self._doubted[0]):
                self._doubted = offset, now
            elif now - self._doubted[1] >= BELIEVED_AFTER_S:
                self._offset, self._doubted = offset, None
            return now + self._offset

    def after(self, seconds: float) -> float:
        """When something expires that is to be there for so long: late rather than early where clocks disagree."""
        return max(self(), self._wall()) + seconds

    def note(self) -> dict[str, Any]:
        """What the next process needs to go on."""
        now = self()
        with self._lock:
            return {"now": now, "monotonic": now - self._offset, "boot": self._boot, "doubted": self._doubted}

    def resume(self, note: Mapping[str, Any]) -> None:
        """Go on where another process was."""
        with self._lock:
            self._doubted = None
            if self._boot is not None and note["boot"] == self._boot:
                self._offset = note["now"] - note["monotonic"]
                self._doubted = note["doubted"] and (note["doubted"][0], note["doubted"][1])
            else:
                self._offset = note["now"] - self._monotonic()


def _is_near(offset: float, other: float) -> bool:
    return abs(offset - other) <= _TOLERANCE_S
