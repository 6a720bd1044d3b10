"""Clients that send one request after another, half of them streamed, and record each outcome.

A request counts as answered only if the whole answer arrived, with its usage.
"""

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.faults.endpoint import MODEL

OUTCOMES = (
    "answered",  # completely, with its usage
    "refused",  # with a proper error and one of the statuses in _REFUSALS
    "error event",  # a stream that ended with an error event
    "broken off",  # the connection or stream ended early
    "no connection",
    "other",
)
"""In the order of the report's table. Only the first three are allowed in every scene."""
_REFUSALS = (429, 503, 504)  # rate limit, overload, timeout
_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
_RETRY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    """One request. Times are in seconds of `time.monotonic`.

    Attributes:
        outcome: one of `OUTCOMES`.
        status: HTTP status, or None without a response.
        details: what happened, if the outcome is unexpected.
    """

    is_stream: bool
    began: float
    ended: float
    outcome: str
    status: int | None = None
    request_id: str | None = None
    details: str = ""

    @property
    def latency_s(self) -> float:
        return self.ended - self.began


@dataclass
class Tally:
    """All requests of the clients, with their outcomes."""

    requests: list[SentRequest] = field(default_factory=list)

    def outcomes(self) -> dict[str, int]:
        """Return the number of each outcome."""
        counts = Counter(request.outcome for request in self.requests)
        return {outcome: counts[outcome] for outcome in OUTCOMES}

    def longest_gap_s(self, since: float, until: float) -> float:
        """Return the longest time without an answer between two times."""
        ends = sorted(
            request.ended
            for request in self.requests
            if request.outcome == "answered" and since <= request.ended <= until
        )
        return max(later - earlier for earlier, later in zip([since, *ends], [*ends, until], strict=True))


def body(text: str, num_tokens: int, *, is_stream: bool, model: str = MODEL) -> dict[str, Any]:
    """Return the body of a request for an answer of `num_tokens`."""
    messages = [{"role": "user", "content": text}]
    return {"model": model, "messages": messages, "max_tokens": num_tokens, "ignore_eos": True, "stream": is_stream}


async def send_request(
    http: httpx.AsyncClient, text: str, num_tokens: int, *, is_stream: bool, model: str = MODEL
) -> SentRequest:
    """Send a request, and return it with its outcome."""
    began, status, request_id = time.monotonic(), None, None
    try:
        request = body(text, num_tokens, is_stream=is_stream, model=model)
        async with http.stream("POST", "/v1/chat/completions", json=request) as response:
            status, request_id = response.status_code, response.headers.get("x-peagle-request-id")
            content = await response.aread()
        outcome, details = judge(status, content, is_stream=is_stream)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        outcome, details = "no connection", repr(error)
    except httpx.HTTPError as error:
        outcome, details = "broken off", repr(error)
    return SentRequest(
        is_stream=is_stream, began=began, ended=time.monotonic(), outcome=outcome, status=status,
        request_id=request_id, details=details[:300],
    )  # fmt: skip


def judge(status: int, content: bytes, *, is_stream: bool) -> tuple[str, str]:
    """Return the outcome of a complete response, and details if it is unexpected."""
    text = content.decode(errors="replace")
    if status != 200:
        is_refusal = status in _REFUSALS and _error_of(text) is not None
        return ("refused", "") if is_refusal else ("other", f"{status} {text}")
    if not is_stream:
        return ("answered", "") if '"usage"' in text else ("other", text)
    events = [event for event in text.split("\n\n") if event]
    if not events:
        return "other", "a stream without events"
    last = events[-1].removeprefix("data: ")
    if any(_error_of(event.removeprefix("data: ")) for event in events[-2:]):
        return "error event", ""
    return ("answered", "") if last == "[DONE]" else ("broken off", f"ends with {last}")


def _error_of(text: str) -> dict[str, Any] | None:
    """Return the OpenAI error in a response, or None if it is incomplete."""
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return None
    return error if isinstance(error, dict) and {"message", "type", "param", "code"} <= set(error) else None


class Clients:
    """Concurrent clients, which send requests until `stop` is called.

    Args:
        num_tokens: tokens of each answer.
    """

    def __init__(self, url: str, num_clients: int, num_tokens: int) -> None:
        self.tally = Tally()
        self._url, self._num_tokens = url, num_tokens
        self._is_stopped = False
        self._tasks = [asyncio.create_task(self._send_requests(number)) for number in range(num_clients)]

    async def stop(self) -> None:
        """Stop sending requests, and wait for the running ones."""
        self._is_stopped = True
        await asyncio.gather(*self._tasks)

    async def _send_requests(self, client: int) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=_TIMEOUT) as http:
            number = 0
            while not self._is_stopped:
                text, is_stream = f"client {client}, request {number}", (client + number) % 2 == 0
                result = await send_request(http, text, self._num_tokens, is_stream=is_stream)
                self.tally.requests.append(result)
                number += 1
                if result.outcome != "answered":
                    await asyncio.sleep(_RETRY_S)


async def start_and_disconnect(url: str, num_clients: int, num_tokens: int) -> list[str]:
    """Start streams and disconnect after their first bytes; return the request ids."""

    async def disconnect_early(client: int) -> str:
        async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT) as http:
            request = body(f"vanishing {client}", num_tokens, is_stream=True)
            async with http.stream("POST", "/v1/chat/completions", json=request) as response:
                response.raise_for_status()
                async for _ in response.aiter_bytes():
                    break
                return response.headers["x-peagle-request-id"]

    return await asyncio.gather(*map(disconnect_early, range(num_clients)))
