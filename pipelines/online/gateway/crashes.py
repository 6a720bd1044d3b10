"""Engine crashes: which requests may be retried, and which keys are limited.

When an engine crashes, one of its requests might be the cause. The requests that entered the engine last are the
suspects, and get an error. Other requests are retried one by one, if they had no output yet and were not in an earlier
crash.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from pipelines.online.errors import ApiError, overloaded

CRASH_SETTLE_S = 0.5  # the requests of a crashed engine fail within this time; afterwards its replica is gone
_SAME_STEP_S = 0.05  # requests this close together might have entered the engine in the same step
_PROBATION_S = 2.0  # a retried request that ran this long, or has output, is no longer a suspect
_MAX_CRASHES, _WINDOW_S = 2, 300.0  # a key with this many crashes within this time is limited
_log = logging.getLogger("ray.serve")


@dataclass(eq=False, slots=True, kw_only=True)
class Attempt:
    """A request that an engine is running."""

    request_id: str
    key: str
    account: str
    model: str
    started_at: float
    num_crashes: int = 0  # engine crashes while this request was running without output


@dataclass(slots=True, kw_only=True)
class _Crash:
    reported_at: float
    attempts: list[Attempt] = field(default_factory=list)
    suspects: list[Attempt] | None = None  # None until all attempts have reported

    def find_suspects(self) -> list[Attempt]:
        """Return the attempts that might have caused the crash, the most likely one first."""
        if repeated := [attempt for attempt in self.attempts if attempt.num_crashes > 1]:
            return repeated
        newest = max(self.attempts, key=lambda attempt: attempt.started_at)
        others = (attempt for attempt in self.attempts if attempt is not newest)
        return [newest, *(attempt for attempt in others if attempt.started_at >= newest.started_at - _SAME_STEP_S)]


class EngineCrashes:
    """Engine crashes of the last minutes, by model and by account (of a key). `on_crash` is called once per crash."""

    def __init__(
        self,
        *,
        on_crash: Callable[[Attempt], None] = lambda suspect: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_crash = on_crash
        self._monotonic = monotonic
        self._latest: dict[str, _Crash] = {}  # by model
        self._retry_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by model
        self._crash_times: dict[str, list[float]] = {}  # by account, oldest first

    def start(self, *, request_id: str, key: str, account: str, model: str) -> Attempt:
        """Record that a request is sent to an engine."""
        return Attempt(request_id=request_id, key=key, account=account, model=model, started_at=self._monotonic())

    @contextlib.asynccontextmanager
    async def retry(self, attempt: Attempt) -> AsyncIterator[None]:
        """Wait for the attempt's turn to be retried after its engine crashed. Raises 503 like `report`."""
        await self.report(attempt)
        lock, loop = self._retry_locks[attempt.model], asyncio.get_running_loop()
        await lock.acquire()
        is_released = False

        def release() -> None:
            nonlocal is_released
            if not is_released:
                is_released = True
                lock.release()

        timer = loop.call_later(_PROBATION_S, release)
        attempt.started_at = self._monotonic()
        try:
            yield
        finally:
            timer.cancel()
            release()

    async def report(self, attempt: Attempt) -> None:
        """Report that the attempt's engine crashed. Raises 503 if the attempt might have caused the crash."""
        attempt.num_crashes += 1
        now = self._monotonic()
        crash = self._latest.get(attempt.model)
        if crash is None or attempt in crash.attempts or now >= crash.reported_at + CRASH_SETTLE_S:
            crash = self._latest[attempt.model] = _Crash(reported_at=now)
        crash.attempts.append(attempt)
        await asyncio.sleep(CRASH_SETTLE_S)
        if crash.suspects is None:
            crash.suspects = crash.find_suspects()
            self._attribute(crash.suspects[0])
        if attempt in crash.suspects:
            raise _crash_error(attempt, is_most_likely=attempt is crash.suspects[0])

    def require_allowed(self, account: str) -> None:
        """Refuse a key whose requests were the most likely cause of several crashes within minutes (429)."""
        if wait_s := self._limited_for_s(account):
            message = (
                f"engines crashed {_MAX_CRASHES} times within {_WINDOW_S / 60:g} minutes, probably "
                f"because of requests of this key; the key is limited for {math.ceil(wait_s)} s"
            )
            raise ApiError(429, message, code="engine_crashes", retry_after_s=wait_s)

    def notes(self) -> list[str]:
        """Return a sentence for the operator about each key with a recent crash."""
        notes = []
        for account in list(self._crash_times):
            num_crashes, wait_s = len(self._recent(account)), self._limited_for_s(account)
            if num_crashes:
                times = "once" if num_crashes == 1 else f"{num_crashes} times"
                limited = f"; the key is limited for {math.ceil(wait_s)} s" if wait_s else ""
                notes.append(f"engines crashed {times} in {_WINDOW_S / 60:g} minutes on requests of {account}{limited}")
        return notes

    def _attribute(self, suspect: Attempt) -> None:
        self._crash_times[suspect.account] = [*self._recent(suspect.account), self._monotonic()]
        log_format = "an engine of %s crashed; the most likely cause is request %s of key %s"
        _log.error(log_format, suspect.model, suspect.request_id, suspect.key)
        self._on_crash(suspect)

    def _recent(self, account: str) -> list[float]:
        since = self._monotonic() - _WINDOW_S
        return [at for at in self._crash_times.get(account, ()) if at > since]

    def _limited_for_s(self, account: str) -> float:
        times = self._recent(account)
        if len(times) < _MAX_CRASHES:
            return 0.0
        return times[-_MAX_CRASHES] + _WINDOW_S - self._monotonic()


def _crash_error(attempt: Attempt, *, is_most_likely: bool) -> ApiError:
    if attempt.num_crashes > 1:
        message = "two engines crashed while they ran this request; it was not retried again"
    elif is_most_likely:
        message = "the engine crashed while it ran this request, which may be the cause; it was not retried"
    else:
        return overloaded("the engine crashed while it ran this request; try again")
    return ApiError(503, message, code="engine_crashed", is_retryable=False)
