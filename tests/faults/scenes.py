"""One fault: kill a process under load, let the clients continue, then check the ledger and the slots."""

import asyncio
import time
from collections import Counter
from collections.abc import Collection
from typing import Any

from peagle.economics.ledger import RequestReader
from tests.chaos.processes import kill
from tests.faults.clients import OUTCOMES, Clients, send_request, start_and_disconnect
from tests.faults.endpoint import Endpoint, Size

CLIENTS_DISCONNECT = "clients that vanish"
_ALLOWED = OUTCOMES[:3]
# The proxy holds the clients' connections, so killing it also breaks them.
_ALLOWED_WITHOUT_PROXY = OUTCOMES[:5]
_MAX_FINISH_S = 30.0


async def kill_part(
    endpoint: Endpoint,
    size: Size,
    part: str,
    *,
    num_clients: int,
    before_s: float,
    after_s: float,
    max_recovery_s: float,
) -> dict[str, Any]:
    """Kill a part under load; continue the load until `after_s` after all parts run again.

    Args:
        max_recovery_s: maximum seconds until all parts run again.
    """
    clients = Clients(endpoint.url, num_clients, size.tokens)
    await asyncio.sleep(before_s)
    (victim, *_), killed_at = endpoint.pids(part), time.monotonic()
    assert kill(victim), f"{part} had already ended"
    await asyncio.sleep(1.0)  # a dead process may still count as running
    recovered_s = await asyncio.to_thread(endpoint.wait_until_complete, size.max_replicas, max_recovery_s)
    await asyncio.sleep(after_s)
    ended_at = time.monotonic()
    await clients.stop()
    tally = clients.tally
    allowed = _ALLOWED_WITHOUT_PROXY if part == "the proxy" else _ALLOWED
    answered = [request.request_id for request in tally.requests if request.outcome == "answered"]
    result = {
        "fault": part,
        "num_requests": len(tally.requests),
        "outcomes": tally.outcomes(),
        "seconds": ended_at - killed_at + before_s,
        "longest_gap_s": tally.longest_gap_s(killed_at, ended_at),
        "whole_after_s": recovered_s,
        "seen": sorted({request.details for request in tally.requests if request.details})[:5],
        **await _check_ledger_and_slots(endpoint, size, {str(request_id) for request_id in answered}),
    }
    forbidden = {name: n for name, n in result["outcomes"].items() if n and name not in allowed}
    result["problems"] = [f"{n} requests: {name}" for name, n in forbidden.items()] + _problems(result)
    if recovered_s is None:
        result["problems"].append(f"not all parts ran again within {max_recovery_s:g} s")
    return result


async def disconnect_clients(endpoint: Endpoint, size: Size, *, num_clients: int) -> dict[str, Any]:
    """Disconnect clients from long streams; check that the engines stopped, and what the ledger bills."""
    num_tokens = 20 * size.tokens
    ids = set(await start_and_disconnect(endpoint.url, num_clients, num_tokens))
    checks = await _check_ledger_and_slots(endpoint, size, set())
    records = [record for record in RequestReader(endpoint.state / "ledger").new() if record.request_id in ids]
    max_generated = max((record.usage.num_output_tokens for record in records), default=0)
    result: dict[str, Any] = {
        "fault": CLIENTS_DISCONNECT,
        "num_requests": num_clients,
        "outcomes": dict.fromkeys(OUTCOMES, 0),
        "cut": sum(record.outcome == "cut" for record in records),
        "most_tokens_made": max_generated,
        "tokens_asked_for": num_tokens,
        "seen": [],
        **checks,
    }
    result["problems"] = _problems(result)
    if result["cut"] != num_clients:
        result["problems"].append(f"{result['cut']} of {num_clients} requests are recorded as cut off in the ledger")
    if max_generated >= num_tokens:
        result["problems"].append("an engine finished the answer of a disconnected client")
    return result


async def _check_ledger_and_slots(endpoint: Endpoint, size: Size, answered: Collection[str]) -> dict[str, Any]:
    """Check the ledger for double and missing bills of these requests, and whether every slot is free again."""
    num_still_running = await asyncio.to_thread(_wait_until_idle, endpoint)
    probe_s, num_probed = await _fill_slots(endpoint, size)
    bills = Counter(record.request_id for record in RequestReader(endpoint.state / "ledger").new())
    return {
        "num_billed_twice": sum(n > 1 for n in bills.values()),
        "num_answered_unbilled": sum(request_id not in bills for request_id in answered),
        "num_left_under_way": num_still_running,
        "slots": size.admitted,
        "slots_answered": num_probed,
        "slots_s": probe_s,
    }


def _wait_until_idle(endpoint: Endpoint) -> int:
    """Wait until no request is running; return the number that still run after `_MAX_FINISH_S`, -1 if unknown."""
    deadline = time.monotonic() + _MAX_FINISH_S
    while True:
        load = endpoint.load()
        if load and not load["num_requests_under_way"]:
            return 0
        if time.monotonic() > deadline:
            return load["num_requests_under_way"] if load else -1
        time.sleep(0.5)


async def _fill_slots(endpoint: Endpoint, size: Size) -> tuple[float, int]:
    """Send as many concurrent requests as there are slots; return the seconds and the number of answers."""
    import httpx

    started = time.monotonic()
    async with httpx.AsyncClient(base_url=endpoint.url, timeout=60) as http:
        pending = [send_request(http, f"slot {slot}", size.tokens, is_stream=False) for slot in range(size.admitted)]
        ended = await asyncio.gather(*pending)
    return time.monotonic() - started, sum(result.outcome == "answered" for result in ended)


def _problems(result: dict[str, Any]) -> list[str]:
    problems = []
    if result["num_billed_twice"]:
        problems.append(f"{result['num_billed_twice']} requests were billed twice")
    if result["num_left_under_way"]:
        problems.append(f"{result['num_left_under_way']} requests are still running {_MAX_FINISH_S:g} s later")
    if result["slots_answered"] < result["slots"]:
        problems.append(f"only {result['slots_answered']} of {result['slots']} slots answered")
    return problems
