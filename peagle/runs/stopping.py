"""Stop workers within a time of grace, and continue a run later."""

import contextlib
import json
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from peagle.errors import PeagleError
from peagle.storage import Place, is_remote, write_json


class StopWord:
    """A driver's word to its workers that they are to stop, in the run directory.

    It is that driver's own. One that is written late, by a driver that was replaced, stops no engine of another.

    Args:
        folder: of the leases; the next driver clears the word with the lease.
        driver: the number of the driver's lease.
    """

    def __init__(self, folder: Place, driver: int) -> None:
        self._path = folder / f"{driver}.stop.json"

    def request(self, grace_s: float) -> None:
        """Start nothing new, and give up what is not committed in `grace_s` seconds."""
        write_json(self._path, {"grace_s": grace_s})

    def grace_s(self) -> float | None:
        """The seconds that work under way has since the stop was asked for.

        None while the run goes on.
        """
        try:
            return float(json.loads(self._path.read_bytes())["grace_s"])
        except FileNotFoundError:
            return None

    def reader(self) -> Callable[[], float | None]:
        """`grace_s` for somebody who asks all the time and must not wait for the answer."""
        return PolledStop(self.grace_s) if is_remote(self._path) else self.grace_s

    def clear(self) -> None:
        """The run has stopped."""
        self._path.unlink(missing_ok=True)


class PolledStop:
    """A stop that a thread polls, where each look takes a request.

    Whoever wants to know is told at once.

    Args:
        read_grace_s: as of `GraceClock`; where it fails, what was known before is believed.
    """

    def __init__(self, read_grace_s: Callable[[], float | None], *, every_s: float = 1.0) -> None:
        self._read_grace_s = read_grace_s
        self._every_s = every_s
        self._grace_s: float | None = None
        threading.Thread(target=self._poll, daemon=True).start()

    def __call__(self) -> float | None:
        """The seconds of grace, if a stop was asked for when the thread last looked."""
        return self._grace_s

    def _poll(self) -> None:
        while True:
            with contextlib.suppress(OSError, PeagleError):
                self._grace_s = self._read_grace_s()
            time.sleep(self._every_s)


class GraceClock:
    """A worker's view of a stop: asked for or not, and grace over or not.

    The time begins when this process first learns of the stop, on its own monotonic clock: the driver's clock may be
    another machine's.

    Args:
        read_grace_s: seconds of grace if a stop is asked for, else None.
    """

    def __init__(
        self, read_grace_s: Callable[[], float | None], *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._read_grace_s = read_grace_s
        self._monotonic = monotonic
        self._over_at: float | None = None

    def is_asked(self) -> bool:
        """Whether the run is being stopped: nothing new is to be started."""
        if self._over_at is None and (grace_s := self._read_grace_s()) is not None:
            self._over_at = self._monotonic() + grace_s
        return self._over_at is not None

    def is_over(self) -> bool:
        """Whether what is under way has to be given up."""
        return self.is_asked() and self._over_at is not None and self._monotonic() >= self._over_at


def resume_command(command: Sequence[str], flags: Mapping[str, str | None]) -> str:
    """The command line that continues a run.

    That of this attempt, with some flags set anew (None: without a value).

    >>> resume_command(["peagle", "generate", "--budget-usd=1", "--retry-failed"], {"--budget-usd": "2"})
    'peagle generate --budget-usd 2'
    """
    words, skip = [], False
    for word in command:
        name = word.partition("=")[0]
        if skip:
            skip = False
        elif name in flags and flags[name] is not None:
            skip = "=" not in word
        elif name != "--retry-failed":
            words.append(word)
    for name, value in flags.items():
        words += [name] if value is None else [name, value]
    return shlex.join(words)
