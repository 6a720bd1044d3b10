"""Answers on their way to clients, and the requests under way by model.

Headers are added. The application says by `note` what a request used: of a whole answer before it starts the response,
of a stream before it ends. Refusals of one key are held back when they are many. Nothing here parses an answer. It
knows ASGI alone.

Requests under way are a counter that the gate moves and `/v1/live` reads; both are in the one process of the ingress.
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
from pipelines.online.gateway.limits import Used
from pipelines.online.wire import OURS, AnswerTally, encoded, error_event, error_response

_NOTHING = Used()  # as of a request that was refused
_SUMMARY_HEADERS = ("usd", "engine_s", "acceptance_length")
_REFUSALS_IN_A_ROW = 20
_LONGEST_HOLD_S = 2.0
_MOST_HELD = 64  # of one key, whose further refusals are answered at once
_LOG_INTERVAL_S = 1.0
_MOST_ADDRESSES, _LONGEST_LOGGED = 1024, 200
_log = logging.getLogger("ray.serve")


class RefusalDelay:
    """Delays of a key's refusals in a row, each two seconds at most.

    A refusal takes the endpoint as long as a short request does, and a client that is refused can ask again at once.
    A client that waits for its answer slows down; the key's own limits count its requests all the same.

    Args:
        per_s: refusals a second of one key, after the first twenty.
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
        self._held: Counter[str] = Counter()

    async def hold(self, account: str) -> None:
        """Wait until the next refusal of this account is due."""
        now = self._monotonic()
        due_at = max(self._due_at.get(account, 0.0), now - _REFUSALS_IN_A_ROW * self._interval_s)
        self._due_at[account] = min(due_at + self._interval_s, now + _LONGEST_HOLD_S)
        if due_at <= now or self._held[account] >= _MOST_HELD:
            return
        self._held[account] += 1
        try:
            await self._sleep(due_at - now)
        finally:
            self._held[account] -= 1


class RefusalLog:
    """Logs refused requests, at most once per second and address."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._logged: OrderedDict[str, tuple[float, int]] = OrderedDict()  # by address: when, and how many not since

    def log(self, scope: Scope, error: ApiError) -> None:
        """Log a refusal, with the number of the address's refusals that were not logged."""
        address = str((scope.get("client") or ("unknown",))[0])
        logged_at, num_more = self._logged.get(address, (-math.inf, 0))
        if self._monotonic() < logged_at + _LOG_INTERVAL_S:
            self._logged[address] = logged_at, num_more + 1
            return
        self._logged[address] = self._monotonic(), 0
        self._logged.move_to_end(address)
        if len(self._logged) > _MOST_ADDRESSES:
            self._logged.popitem(last=False)
        more = f"; {num_more} more since the last line" if num_more else ""
        path = ascii(scope["path"][:_LONGEST_LOGGED])
        _log.warning("refused %s %s from %s: %d %s%s", scope["method"], path, address, error.status, error.code, more)


class Outgoing:
    """Sends the application's answer on, and knows what its request used.

    Attributes:
        used: by the request; None where nobody waited for its end, or it has not said so yet.
    """

    def __init__(self, send: Send, headers: Mapping[str, str], pace: RefusalDelay) -> None:
        self._send = send
        self._pace = pace
        self._account: str | None = ""  # of strangers, until somebody is known
        self._headers = dict(headers)
        self._upload: Upload | None = None
        self._start: Message | None = None
        self._is_stream = False
        self.is_started = False
        self.used: Used | None = _NOTHING

    def know(self, account: str | None) -> None:
        """Whose refusals this one counts among; None where nobody is kept waiting."""
        self._account = account

    def expect(self, model: ServedModel) -> None:
        """An engine of this model will answer."""
        self._headers["x-peagle-model"] = model.name
        self._headers["x-peagle-drafter"] = model.drafter or "none"
        if model.num_speculative_tokens:
            self._headers["x-peagle-num-speculative-tokens"] = str(model.num_speculative_tokens)

    def give_up(self) -> None:
        """Give up an answer that nobody waits for.

        Before its first byte, only its engine knows its usage.
        """
        if self._start is None:
            self.used = None

    def close_unless_read(self, upload: Upload) -> None:
        """Close the connection of a body that is not read to its end.

        An answer before the end is for what is not a form.
        """
        self._upload = upload

    def note(self, said: Mapping[str, Any]) -> None:
        """Take what an answer says of its own usage."""
        tally, summary = AnswerTally(), said.get(OURS) or {}
        tally.read(said)
        self.used = Used(
            prompt_tokens=tally.num_prompt_tokens,
            output_tokens=tally.num_output_tokens,
            usd=summary.get("usd") or 0.0,
        )
        for name in _SUMMARY_HEADERS:
            if summary.get(name) is not None:
                self._headers[f"x-peagle-{name.replace('_', '-')}"] = str(summary[name])

    async def send(self, message: Message) -> None:
        """One ASGI message of the application."""
        if message["type"] == "http.response.start":
            kind = dict(message.get("headers", [])).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
            self._start = message
            if self.used is _NOTHING and message["status"] == 200:
                self.used = None  # until `note`
            await self._begin()
        else:
            await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Answer with an error: a response, or the last event of a begun stream."""
        if self.is_started:
            event = error_event(error).encode() if self._is_stream else b""
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
            return
        headers, body = error_response(error)
        self._start = {"type": "http.response.start", "status": error.status, "headers": encoded(headers)}
        await self._begin()
        await self._send({"type": "http.response.body", "body": body})

    async def _begin(self) -> None:
        assert self._start is not None, "the application starts its response before its body"
        if self._upload is not None and not self._upload.is_whole:
            self._headers["connection"] = "close"
        if self._account is not None and 400 <= self._start["status"] < 500:
            await self._pace.hold(self._account)
        self.is_started = True
        headers = [*self._start.get("headers", []), *encoded(self._headers)]
        await self._send({**self._start, "headers": headers})


class Load:
    """The counts now."""

    def __init__(self) -> None:
        self._under_way: Counter[str] = Counter()

    @contextmanager
    def request(self, model: str) -> Iterator[None]:
        """A request of this model, until it is answered, whatever the answer."""
        self._under_way[model] += 1
        try:
            yield
        finally:
            self._under_way[model] -= 1

    def under_way(self, model: str) -> int:
        """Requests that wait for an engine or are in one."""
        return self._under_way[model]


def describe_load(card: Mapping[str, Any], replicas: Mapping[str, int], num_under_way: int) -> dict[str, int]:
    """A model's engines and requests, ready for JSON.

    Serve gives an engine so many requests and no more; the others wait at the ingress.

    Args:
        card: what the model's card says of its engines.
        replicas: as `replica_counts` has them.
    """
    in_engines = replicas["num_running_replicas"] * card["max_requests_per_replica"]
    return {
        **replicas,
        "max_replicas": card["max_replicas"],
        "num_requests_under_way": num_under_way,
        "num_requests_waiting": max(0, num_under_way - in_engines),
    }
