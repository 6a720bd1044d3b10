"""Send answers and refusals to clients, and count running requests per model.

Answers are not parsed: the application reports their usage with `record_usage`, before a non-streaming answer starts or
before a stream ends.
"""

import asyncio
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.types import Message, Scope, Send

from pipelines.online.errors import ApiError
from pipelines.online.gateway.admission import ServedModel
from pipelines.online.gateway.bodies import Upload
from pipelines.online.gateway.limits import ActualUsage
from pipelines.online.wire import PEAGLE_KEY, AnswerTally, encoded, error_event, error_response

_NO_USAGE = ActualUsage()  # usage of a refused request
_SUMMARY_HEADERS = ("usd", "engine_s", "acceptance_length")
_REFUSAL_BURST = 20
_MAX_DELAY_S = 2.0
_MAX_DELAYED = 64  # per key; additional refusals are sent immediately
_LOG_INTERVAL_S = 1.0
_MAX_ADDRESSES, _MAX_LOGGED_CHARS = 1024, 200  # of clients in memory; of a path in the log
_log = logging.getLogger("ray.serve")


class RefusalDelay:
    """After a burst of 20, limits a key's refusals to `per_s` a second by delaying each for up to two seconds.

    A refusal takes the endpoint as much time as a short request, and some clients retry immediately.
    """

    def __init__(
        self,
        per_s: float,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._interval_s = 1 / per_s
        self._monotonic, self._sleep = monotonic, sleep
        self._due_at: dict[str, float] = {}
        self._num_delayed: Counter[str] = Counter()

    async def wait(self, account: str) -> None:
        now = self._monotonic()
        due_at = max(self._due_at.get(account, 0.0), now - _REFUSAL_BURST * self._interval_s)
        self._due_at[account] = min(due_at + self._interval_s, now + _MAX_DELAY_S)
        if due_at <= now or self._num_delayed[account] >= _MAX_DELAYED:
            return
        self._num_delayed[account] += 1
        try:
            await self._sleep(due_at - now)
        finally:
            self._num_delayed[account] -= 1


class RefusalLog:
    """A log of refused requests, with at most one line per second and address."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        # address -> time of the last line, number of refusals since then
        self._logged: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def log(self, scope: Scope, error: ApiError) -> None:
        address = str((scope.get("client") or ("unknown",))[0])
        logged_at, num_unlogged = self._logged.get(address, (-math.inf, 0))
        if self._monotonic() < logged_at + _LOG_INTERVAL_S:
            self._logged[address] = logged_at, num_unlogged + 1
            return
        self._logged[address] = self._monotonic(), 0
        self._logged.move_to_end(address)
        if len(self._logged) > _MAX_ADDRESSES:
            self._logged.popitem(last=False)
        more = f"; {num_unlogged} more since the last line" if num_unlogged else ""
        path = ascii(scope["path"][:_MAX_LOGGED_CHARS])
        _log.warning("refused %s %s from %s: %d %s%s", scope["method"], path, address, error.status, error.code, more)


class Outgoing:
    """Sends the application's answer and records its usage; `used` is None if the usage is not known (yet)."""

    def __init__(self, send: Send, headers: Mapping[str, str], refusal_delay: RefusalDelay) -> None:
        self._send = send
        self._refusal_delay = refusal_delay
        self._account: str | None = ""  # shared by all clients without a valid key
        self._headers = dict(headers)
        self._upload: Upload | None = None
        self._response_start: Message | None = None
        self._is_stream = False
        self.is_started = False
        self.used: ActualUsage | None = _NO_USAGE

    def set_account(self, account: str | None) -> None:
        """Set the account whose refusals are delayed together; None disables the delay."""
        self._account = account

    def set_model(self, model: ServedModel) -> None:
        self._headers["x-peagle-model"] = model.name
        self._headers["x-peagle-drafter"] = model.drafter or "none"
        if model.num_speculative_tokens:
            self._headers["x-peagle-num-speculative-tokens"] = str(model.num_speculative_tokens)

    def abandon(self) -> None:
        """Stop waiting for the answer. If it has not started, its usage is only known to the engine."""
        if self._response_start is None:
            self.used = None

    def close_unless_read(self, upload: Upload) -> None:
        """Close the connection after the answer unless the upload was read completely."""
        self._upload = upload

    def record_usage(self, report: Mapping[str, Any]) -> None:
        tally, summary = AnswerTally(), report.get(PEAGLE_KEY) or {}
        tally.read(report)
        self.used = ActualUsage(
            prompt_tokens=tally.num_prompt_tokens,
            output_tokens=tally.num_output_tokens,
            usd=summary.get("usd") or 0.0,
        )
        for name in _SUMMARY_HEADERS:
            if summary.get(name) is not None:
                self._headers[f"x-peagle-{name.replace('_', '-')}"] = str(summary[name])

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            content_type = dict(message.get("headers", [])).get(b"content-type", b"")
            self._is_stream = content_type.startswith(b"text/event-stream")
            self._response_start = message
            if self.used is _NO_USAGE and message["status"] == 200:
                self.used = None  # until `record_usage`
            await self._begin()
        else:
            await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Send an error: as a response, or as the last event if a stream has started."""
        if self.is_started:
            event = error_event(error).encode() if self._is_stream else b""
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
            return
        headers, body = error_response(error)
        self._response_start = {"type": "http.response.start", "status": error.status, "headers": encoded(headers)}
        await self._begin()
        await self._send({"type": "http.response.body", "body": body})

    async def _begin(self) -> None:
        assert self._response_start is not None, "the application starts its response before its body"
        if self._upload is not None and not self._upload.is_whole:
            self._headers["connection"] = "close"
        if self._account is not None and 400 <= self._response_start["status"] < 500:
            await self._refusal_delay.wait(self._account)
        self.is_started = True
        headers = [*self._response_start.get("headers", []), *encoded(self._headers)]
        await self._send({**self._response_start, "headers": headers})


class Load:
    """The number of running requests per model, whether they wait for an engine or are in one."""

    def __init__(self) -> None:
        self._num_running: Counter[str] = Counter()

    @contextmanager
    def track_request(self, model: str) -> Iterator[None]:
        self._num_running[model] += 1
        try:
            yield
        finally:
            self._num_running[model] -= 1

    def num_running(self, model: str) -> int:
        return self._num_running[model]


def describe_load(card: Mapping[str, Any], replicas: Mapping[str, int], num_running: int) -> dict[str, int]:
    """Return a model's engines and requests as JSON.

    Args:
        card: the model's entry in `/v1/models`.
        replicas: numbers of replicas by state.
    """
    # Serve sends each engine a limited number of requests; the others wait in the ingress.
    in_engines = replicas["num_running_replicas"] * card["max_requests_per_replica"]
    return {
        **replicas,
        "max_replicas": card["max_replicas"],
        "num_requests_under_way": num_running,
        "num_requests_waiting": max(0, num_running - in_engines),
    }
