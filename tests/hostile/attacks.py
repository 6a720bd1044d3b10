"""The attacks of a hostile key.

An attack runs for a given time, as fast as its clients get answers. It counts HTTP statuses and records problems.
`scenes.py` measures the effect on the neighbour, a user of the same endpoint. `integration/test_serve.py` attacks the
prefix cache, and sends media.
"""

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import httpx

from pipelines.online.wire import Context
from tests.hostile.tenants import ATTACKER, NEIGHBOUR, PARALLEL_REQUESTS, POOR, REQUESTS_PER_MIN, RESTRICTED, Tenants

CHAT, COMPLETIONS, FILES, BATCHES = "/v1/chat/completions", "/v1/completions", "/v1/files", "/v1/batches"
NORMAL_REQUESTS = "normal requests"
_ALLOWED_5XX = (503, 504)
_MIB = 2**20
_FILE_MIB = 100
_NUM_READERS = 12
_MAX_REFUSAL_BYTES = 4096
_NICE = 10  # the attackers' CPU priority; a higher number is a lower priority
_PAUSE_S = 0.02  # between two requests of a client, because the load generator shares the machine with the endpoint


@dataclass
class AttackResult:
    """The result of an attack: the number of answers by status, and problems."""

    statuses: Counter[int | str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def note(self, problem: str) -> None:
        """Add a problem once."""
        if problem not in self.problems:
            self.problems.append(problem)


Attack = Callable[[Tenants, float], Awaitable[AttackResult]]
Check = Callable[[httpx.Response], str | None]  # returns the problem of a response
Sender = Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]


async def _hammer(
    tenants: Tenants, key: str, senders: list[Sender], seconds: float, *, check: Check, num_clients: int = 4
) -> AttackResult:
    """Call the senders repeatedly, in turn, from several clients."""
    result, ends_at, turns = AttackResult(), time.monotonic() + seconds, cycle(senders)

    async def send_repeatedly() -> None:
        async with tenants.client(key) as http:
            while time.monotonic() < ends_at:
                try:
                    response = await next(turns)(http)
                except httpx.HTTPError as error:
                    result.statuses[type(error).__name__] += 1
                else:
                    _count(result, response, check)
                await asyncio.sleep(_PAUSE_S)

    await asyncio.gather(*(send_repeatedly() for _ in range(num_clients)))
    return result


def _count(result: AttackResult, response: httpx.Response, check: Check) -> None:
    result.statuses[response.status_code] += 1
    problem = check(response)
    if response.status_code >= 500 and response.status_code not in _ALLOWED_5XX:
        problem = f"{response.status_code}: {response.text[:200]}"
    if problem:
        result.note(problem)


def _post_sender(path: str, body: Any) -> Sender:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def send(http: httpx.AsyncClient) -> httpx.Response:
        url = http.base_url.copy_with(raw_path=path.encode())
        return await http.post(url, content=content, headers={"content-type": "application/json"})

    return send


def _chat(tenants: Tenants, text: str = "attack", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": tenants.model, "messages": messages, "max_tokens": 8, "temperature": 0, **fields}


def _expect_refusal(response: httpx.Response) -> str | None:
    return f"answered: {response.url.raw_path.decode()}" if response.status_code == 200 else None


def _accept_any(_: httpx.Response) -> None:
    return None


async def normal_requests(tenants: Tenants, seconds: float) -> AttackResult:
    """Send normal requests, like the neighbour; this shows the effect of sharing an engine without an attack."""
    senders = [
        _post_sender(CHAT, _chat(tenants, f"another client, request {n}", max_tokens=tenants.tokens))
        for n in range(500)
    ]
    return await _hammer(tenants, ATTACKER, senders, seconds, check=_accept_any, num_clients=PARALLEL_REQUESTS)


# --- rules of a key


async def paths(tenants: Tenants, seconds: float) -> AttackResult:
    """Use many spellings of the path, with small and huge bodies, and a key that may only use another model."""
    suffixes = [
        "%0A",
        "%0D",
        "%0D%0A",
        "%00",
        "%09",
        "%C2%85",
        "%E2%80%A8",
        "%20",
        "/",
        "%2F",
        ";x",
        "%3F",
        "?x=%0A",
        "%23",
    ]
    chats = ["/" + CHAT, "/v1//chat/completions", "/v1/./chat/completions", "/v1/x/../chat/completions", CHAT]
    chats += ["/V1/Chat/Completions", "/v1/chat%2Fcompletions", "/v1/%63hat/completions"]
    chat, completion = _chat(tenants), {"model": tenants.model, "prompt": "attack", "max_tokens": 8}
    bodies = {CHAT: chat, COMPLETIONS: completion, BATCHES: chat}
    senders = [_post_sender(f"{path}{suffix}", body) for path, body in bodies.items() for suffix in suffixes]
    senders += [_post_sender(path, chat) for path in chats]
    senders += [_post_sender(f"{CHAT}%0A", _chat(tenants, "x" * 20 * _MIB))]
    return await _hammer(tenants, RESTRICTED, senders, seconds, check=_expect_refusal)


async def headers(tenants: Tenants, seconds: float) -> AttackResult:
    """Send headers that only the endpoint may set: another key's name, operator rights, a cheaper request."""
    context = Context(request_id="1", key=NEIGHBOUR, num_choices=0, cap_tokens=1, first_asked_at=0.0)
    forged = {
        **context.headers(), "x-peagle-key": NEIGHBOUR, "x-peagle-operator": "1", "x-vllm-priority": "9" * 31,
        "x-forwarded-for": "127.0.0.1",
    }  # fmt: skip

    async def cost(http: httpx.AsyncClient) -> httpx.Response:
        return await http.get("/v1/cost", headers=forged)

    async def chat(http: httpx.AsyncClient) -> httpx.Response:
        return await http.post(CHAT, json=_chat(tenants), headers=forged)

    def check(response: httpx.Response) -> str | None:
        is_cost = response.status_code == 200 and response.url.path == "/v1/cost"
        return "sees the cost of every key" if is_cost and "by_key" in response.json() else None

    return await _hammer(tenants, ATTACKER, [cost, chat], seconds, check=check, num_clients=2)


async def budget(tenants: Tenants, seconds: float) -> AttackResult:
    """Send sixty concurrent requests on a budget smaller than the cost of one."""
    result = AttackResult()
    async with tenants.client(POOR) as http:
        started_at = time.monotonic()
        while time.monotonic() < started_at + seconds:
            posts = [http.post(CHAT, json=_chat(tenants, f"poor {number}")) for number in range(60)]
            for response in await asyncio.gather(*posts):
                _count(result, response, _accept_any)
            await asyncio.sleep(1.0)
    if result.statuses[200] > 1:
        result.note(f"{result.statuses[200]} answers with a budget below the cost of one request")
    return result


async def parallel(tenants: Tenants, seconds: float) -> AttackResult:
    """Send forty concurrent long streams with a key that allows only a few."""
    result, running, peak = AttackResult(), 0, 0

    async def stream(number: int) -> None:
        nonlocal running, peak
        body = _chat(tenants, f"long {number}", max_tokens=400, ignore_eos=True, stream=True)
        async with tenants.client(ATTACKER) as http, http.stream("POST", CHAT, json=body) as response:
            result.statuses[response.status_code] += 1
            if response.status_code != 200:
                return
            running += 1
            peak = max(peak, running)
            async for _ in response.aiter_bytes():
                if time.monotonic() > ends_at:
                    break
            running -= 1

    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        await asyncio.gather(*(stream(number) for number in range(40)))
        await asyncio.sleep(0.5)
    if peak > PARALLEL_REQUESTS:
        result.note(f"{peak} concurrent requests, but only {PARALLEL_REQUESTS} are allowed")
    return result


async def refusals(tenants: Tenants, seconds: float) -> AttackResult:
    """Send bodies of 1 MiB that are refused: a wrong model, deep nesting, broken JSON.

    These requests must count toward the rate limit, and their errors must be short.
    """
    name = "m" * (_MIB - 200)
    bodies: list[Any] = [
        _chat(tenants, model=name), {"model": tenants.model, "messages": name}, b"[" * (_MIB - 10),
        b'{"a":' * (_MIB // 6), b'{"model": "' + b"\\u0041" * 170_000 + b'"}', b"[" + b"1," * (_MIB // 2 - 10) + b"1]",
    ]  # fmt: skip

    def check(response: httpx.Response) -> str | None:
        if response.status_code == 200:
            return "answered"
        is_long = len(response.content) > _MAX_REFUSAL_BYTES
        return f"a refusal of {len(response.content)} bytes" if is_long else None

    result = await _hammer(tenants, ATTACKER, [_post_sender(CHAT, body) for body in bodies], seconds, check=check)
    max_requests = 1.2 * REQUESTS_PER_MIN * max(1.0, seconds / 60)  # 20 % above the rate limit
    if sum(result.statuses.values()) > max_requests and not result.statuses[429]:
        result.note("refused requests do not count toward the rate limit")
    return result


# --- requests that reach an engine


def _slow_constraints() -> Iterator[dict[str, Any]]:
    """Yield request fields that take long to compile or render."""
    optional = {f"p{number}": {"type": "string"} for number in range(3000)}
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        nested = {"type": "object", "properties": {"a": nested, "b": nested, "c": {"type": "number"}}}
        if len(json.dumps(nested)) > 300_000:
            break
    schemas = [
        {"type": "object", "properties": optional},
        nested,
        {"anyOf": [{"const": f"value {number}"} for number in range(4000)]},
        {"type": "array", "items": {"type": "array", "minItems": 500, "maxItems": 5000}, "minItems": 500},
        {"type": "string", "minLength": 5000, "maxLength": 100_000},
        {"type": "string", "pattern": "^(([a-z0-9]{1,200}){1,200}){1,200}$"},
    ]
    for schema in schemas:
        yield {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}
        yield {"structured_outputs": {"json": schema}}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        yield {"tools": [tool], "tool_choice": "required"}
    yield {"structured_outputs": {"regex": "(a|b|c|[0-9]{1,300}){1,3000}"}}
    yield {"structured_outputs": {"regex": ".*" + "(x?){500}" * 20}}
    yield {"structured_outputs": {"choice": [f"choice {number}" for number in range(20_000)]}}
    rules = "\n".join(f'r{number} ::= r{number + 1} | "a" r{number + 1} | "b"' for number in range(2000))
    yield {"structured_outputs": {"grammar": f'root ::= r0\n{rules}\nr2000 ::= "z"'}}
    blanks = "a{1," + " " * 8_000
    yield {"structured_outputs": {"regex": blanks}}
    yield {"structured_outputs": {"grammar": blanks * 8}}
    patterns = {"type": "object", "patternProperties": {"^a{1,20000}$": {"type": "string"}}}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": patterns}}
    yield {"response_format": tag}
    yield {"structured_outputs": {"structural_tag": json.dumps(tag)}}
    yield {"chat_template": "{% for i in range(100000000) %}{% endfor %}x"}


async def schemas(tenants: Tenants, seconds: float) -> AttackResult:
    """Send slow JSON schemas, regular expressions, grammars and chat templates."""
    senders = [_post_sender(CHAT, _chat(tenants, **fields)) for fields in _slow_constraints()]
    return await _hammer(tenants, ATTACKER, senders, seconds, check=_accept_any)


async def answers(tenants: Tenants, seconds: float) -> AttackResult:
    """Ask for huge answers with small requests: logprobs of many tokens of many prompts, in many choices."""
    prompt = "word " * 300
    bodies: list[dict[str, Any]] = [
        {"prompt": [prompt] * 100, "max_tokens": 1, "prompt_logprobs": 20},
        {"prompt": [prompt] * 100, "max_tokens": 1, "echo": True, "logprobs": 20},
        {"prompt": prompt, "max_tokens": 100, "n": 100, "logprobs": 20},
        {"prompt": [[1] * 500] * 120, "max_tokens": 1, "prompt_logprobs": 5, "return_token_ids": True},
    ]
    senders = [_post_sender(COMPLETIONS, {"model": tenants.model, **body}) for body in bodies]
    return await _hammer(tenants, ATTACKER, senders, seconds, check=_accept_any, num_clients=2)


# --- connections, files, batches


async def downloads(tenants: Tenants, seconds: float) -> AttackResult:
    """Request a large file with clients that do not read it."""
    result = AttackResult()
    async with tenants.client(ATTACKER) as http:
        content = b"x" * (_FILE_MIB * _MIB)
        try:
            uploaded = await http.post(FILES, files={"file": ("large.jsonl", content)}, data={"purpose": "batch"})
        except httpx.HTTPError as error:  # the endpoint refused the upload and closed the connection
            result.statuses[type(error).__name__] += 1
            return result
        _count(result, uploaded, _accept_any)
        if uploaded.status_code != 200:
            return result
        file_id = uploaded.json()["id"]
        request = (
            f"GET {FILES}/{file_id}/content HTTP/1.1\r\nhost: localhost\r\n"
            f"authorization: Bearer {tenants.keys[ATTACKER]}\r\n\r\n"
        )
        writers = [await _send_raw(tenants, request.encode()) for _ in range(_NUM_READERS)]
        await asyncio.sleep(seconds)
        for writer in writers:
            writer.close()
        _count(result, await http.delete(f"{FILES}/{file_id}"), _accept_any)
    return result


async def connections(tenants: Tenants, seconds: float) -> AttackResult:
    """Open connections that send half a header, and send requests with an invalid key."""
    half_request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-a: "
    writers = [await _send_raw(tenants, half_request) for _ in range(200)]
    without_valid_key = replace(tenants, keys={**tenants.keys, ATTACKER: "pk-nobody"})
    senders = [_post_sender(CHAT, _chat(tenants))]
    result = await _hammer(without_valid_key, ATTACKER, senders, seconds, check=_expect_refusal)
    for writer in writers:
        writer.close()
    return result


async def batches(tenants: Tenants, seconds: float) -> AttackResult:
    """Create as many batches as possible with an invalid file; the neighbour's batch must still be accepted."""
    line = {"custom_id": "1", "method": "POST", "url": CHAT, "body": {"model": "nobody", "messages": []}}
    batch_fields = {"endpoint": CHAT, "completion_window": "24h"}

    async def upload(http: httpx.AsyncClient) -> str:
        file = ("b.jsonl", json.dumps(line).encode())
        response = await http.post(FILES, files={"file": file}, data={"purpose": "batch"})
        return str(response.raise_for_status().json()["id"])

    async with tenants.client(ATTACKER) as http:
        body = {**batch_fields, "input_file_id": await upload(http)}
    result = await _hammer(tenants, ATTACKER, [_post_sender(BATCHES, body)], seconds, check=_accept_any, num_clients=8)
    async with tenants.client(NEIGHBOUR) as http:
        response = await http.post(BATCHES, json={**batch_fields, "input_file_id": await upload(http)})
        if response.status_code != 200:
            result.note(f"the neighbour's batch was refused: {response.status_code} {response.text[:200]}")
    return result


async def _send_raw(tenants: Tenants, data: bytes) -> asyncio.StreamWriter:
    """Open a connection, send these bytes, and return the connection's writer."""
    host, port = tenants.url.removeprefix("http://").split(":")
    # The limit keeps unread bytes in the endpoint instead of this process.
    reader, writer = await asyncio.open_connection(host, int(port), limit=1)
    del reader
    writer.write(data)
    await writer.drain()
    return writer


ATTACKS: dict[str, Attack] = {
    "paths": paths,
    "headers": headers,
    "budget": budget,
    "parallel requests": parallel,
    "refusals": refusals,
    "schemas": schemas,
    "huge answers": answers,
    "downloads": downloads,
    "connections": connections,
    "batches": batches,
}


def attack_together(tenants: Tenants, names: list[str], seconds: float) -> list[AttackResult]:
    """Run these attacks (or `NORMAL_REQUESTS`) concurrently, at a low priority.

    A real attacker has its own machine, so here its clients must not take CPU time from the endpoint.
    """
    os.nice(max(0, _NICE - os.nice(0)))

    async def gather() -> list[AttackResult]:
        return await asyncio.gather(
            *({**ATTACKS, NORMAL_REQUESTS: normal_requests}[name](tenants, seconds) for name in names)
        )

    return asyncio.run(gather())
