"""Stop an idle endpoint, and report its cost. Requests that the gate itself answers do not count."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from peagle.economics.account import account
from peagle.economics.ledger import SessionReader
from peagle.economics.prices import Price
from peagle.economics.report.figures import format_duration, format_usd
from peagle.errors import PeagleError
from pipelines.online.batches.store import BatchStore
from pipelines.online.config import ServeConfig

_CHECK_S = 5.0


class IdleWatch:
    """Measures how long all engines and batches have been idle.

    `has_batches` returns whether batches are running. The ledger omits their engines.
    """

    def __init__(
        self,
        ledger: Path,
        *,
        has_batches: Callable[[], bool] = lambda: False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sessions = SessionReader(ledger)
        self._has_batches = has_batches
        self._monotonic = monotonic
        self._worked_s = self._read()
        self._idle_since = monotonic()

    def idle_s(self) -> float:
        worked_s = self._read()
        if worked_s != self._worked_s or self._has_batches():
            self._worked_s, self._idle_since = worked_s, self._monotonic()
        return self._monotonic() - self._idle_since

    def _read(self) -> float:
        return sum(session.load_s + session.compile_s + session.busy_s for session in self._sessions.all())


@contextlib.contextmanager
def stop_when_idle(
    config: ServeConfig, price: Price, stopped: threading.Event, say: Callable[[str], None]
) -> Iterator[None]:
    """Set `stopped` when the endpoint has been idle for its `idle_timeout`, and report its cost at the end."""
    if config.idle_timeout is None:
        yield
        return
    ledger = config.state / "ledger"
    batches = BatchStore(config.batches) if config.batches else None
    watch = IdleWatch(ledger, has_batches=lambda: batches is not None and bool(batches.unfinished()))
    is_idle = threading.Event()
    args = (watch, config.idle_timeout, stopped, is_idle, say)
    thread = threading.Thread(target=_stop_if_idle, args=args, daemon=True)
    thread.start()
    yield
    stopped.set()
    thread.join()
    if is_idle.is_set():
        started_at = psutil.Process().create_time()
        say(f"the endpoint's engines cost {format_usd(engines_usd(ledger, price, since=started_at))}")


def engines_usd(ledger: Path, price: Price, *, since: float) -> float:
    return account((), SessionReader(ledger).since(since), price).total_usd


def _stop_if_idle(
    watch: IdleWatch,
    timeout_s: float,
    stopped: threading.Event,
    is_idle: threading.Event,
    say: Callable[[str], None],
) -> None:
    while not stopped.wait(min(_CHECK_S, timeout_s / 4)):
        try:
            idle_s = watch.idle_s()
        except (PeagleError, OSError) as error:
            say(f"cannot check whether the endpoint is idle: {error}")
            continue
        if idle_s >= timeout_s:
            say(f"no requests for {format_duration(timeout_s)}: stopping the endpoint")
            is_idle.set()
            stopped.set()
