"""What stands before the OpenAI routes: who asks, may they, how much did it use. An ASGI middleware.

    path -> key -> request counted -> route -> body -> checks -> tokens held -> the application -> usage from its answer

It knows HTTP by ASGI alone and no Ray: any application that answers as vLLM does can be behind it. Prompts and answers
pass through; prompts are written down where the settings say so, answers never.
"""

import asyncio
import json
import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipelines.online.answers import OURS, Tally, events, is_usage_alone, to_text
from pipelines.online.errors import ApiError, from_exception
from pipelines.online.keys import LOCAL, KeyRecord, KeyRing
from pipelines.online.load import Load
from pipelines.online.local import require_local
from pipelines.online.paths import path_refusal
from pipelines.online.prompt_log import PromptLog
from pipelines.online.requests import Intake, ServedModel, check
from pipelines.online.routes import Route, Rule, find_route, with_pass
from pipelines.online.settlements import Settlements
from pipelines.online.uploads import Upload, too_large

KEY_HEADER = "x-peagle-key"
OPERATOR_HEADER = "x-peagle-operator"
EACH_USAGE_HEADER = "x-peagle-each-usage"
CAP_HEADER = "x-peagle-cap-tokens"
CHOICES_HEADER = "x-peagle-choices"
AGAIN_HEADER = "x-peagle-again"  # of a request that an engine had which died: the Unix time at which that one was asked
KEY_IN_SCOPE = "peagle.key"  # the whole record, for what is answered in this process
_JSON_RULES = (Rule.GENERATION, Rule.ORDER)
_SUMMARY_HEADERS = ("usd", "engine_s", "acceptance_length")
_log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """What the gate is built from, wherever the ingress lands.

    Attributes:
        key_file: read again whenever it changes.
        fixed_keys: from the environment of whoever started the endpoint.
        requires_key: without, only this machine is let in.
        ledger: says what keys have spent before this process started.
        prompts: folder in which requests are written down; None where they are not.
    """

    models: tuple[ServedModel, ...]
    ledger: Path
    key_file: Path | None = None
    fixed_keys: tuple[KeyRecord, ...] = ()
    requires_key: bool = True
    max_body_bytes: int = 1024 * 1024
    max_upload_bytes: int = 200 * 1024 * 1024
    body_timeout_s: float = 10.0
    request_timeout_s: float = 600.0
    max_output_tokens: int | None = None
    prompts: Path | None = None


class Gate:
    """The middleware.

    Args:
        routes: the application's own table; what is not in it never reaches the application.
    """

    def __init__(self, app: ASGIApp, settings: GateSettings, routes: Sequence[Route], load: Load | None = None) -> None:
        self._app = app
        self._settings = settings
        self._routes = tuple(routes)
        self._load = load or Load()
        self._ring = KeyRing(settings.key_file, settings.fixed_keys)
        self._models = {model.name: model for model in settings.models}
        self._settlements = Settlements(settings.ledger)
        self._limiter = self._settlements.limiter
        self._prompts = PromptLog(settings.prompts) if settings.prompts else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex  # never the client's: usage is told apart by it
        answer = _Answer(send, {"x-peagle-request-id": request_id})
        try:
            await self._serve(scope, receive, answer, request_id)
        except Exception as error:
            refusal = from_exception(error)
            if refusal.status >= 500:
                _log.error("request %s failed", request_id, exc_info=error)
            await answer.fail(refusal)

    async def _serve(self, scope: Scope, receive: Receive, answer: "_Answer", request_id: str) -> None:
        if refusal := path_refusal(scope):
            raise refusal
        route = self._find(scope)
        if isinstance(route, Route) and self._is_open(route):
            await self._app(with_pass(scope, route), receive, answer.send)
            return
        key = self._authenticate(scope)
        self._limiter.count(key, is_poll=isinstance(route, Route) and route.rule is Rule.POLL)
        if isinstance(route, ApiError):
            raise route
        inward = {KEY_HEADER: key.name, "x-request-id": request_id}
        inward |= {OPERATOR_HEADER: "1"} if key.is_operator else {}
        # What is read as JSON here is JSON behind it too, though `curl -d` calls it a form.
        inward |= {"content-type": "application/json"} if route.rule in _JSON_RULES else {}
        scope = {**_with_headers(scope, inward), KEY_IN_SCOPE: key}
        if route.rule is Rule.GENERATION:
            await self._generate(scope, receive, answer, route, request_id)
        elif route.rule in (Rule.ORDER, Rule.UPLOAD):
            await self._take_in(scope, receive, answer, route)
        else:
            await self._app(with_pass(scope, route), receive, answer.send)

    async def _generate(self, scope: Scope, receive: Receive, answer: "_Answer", route: Route, request_id: str) -> None:
        """An engine's answer: its tokens and cost are held until it is known what it used."""
        settings, key = self._settings, scope[KEY_IN_SCOPE]
        body = await self._read(scope, receive)
        intake = check(route.path, body, key, self._models, max_output_tokens=settings.max_output_tokens)
        await self._settlements.catch_up()
        permit = self._limiter.admit(key, intake.output_tokens, intake.model.name)
        answer.expect(intake)
        inward = {"content-length": str(len(intake.body)), CHOICES_HEADER: str(intake.num_choices)}
        inward |= {EACH_USAGE_HEADER: "1"} if intake.wants_each_usage else {}
        inward |= {CAP_HEADER: str(intake.cap_tokens)} if intake.cap_tokens else {}
        scope = with_pass({**scope, "headers": [*_without(scope, inward), *_encoded(inward)]}, route)
        try:
            async with asyncio.timeout(settings.request_timeout_s) as limit:
                if self._prompts:
                    await self._prompts.write(
                        request_id=request_id, key=key.name, model=intake.model.name, path=route.path, body=body
                    )
                with self._load.request(intake.model.name):
                    await self._app(scope, _replay(intake.body, receive), answer.send)
        except asyncio.CancelledError:
            answer.give_up()
            raise
        except TimeoutError:
            if not limit.expired():
                raise
            answer.give_up()
            message = f"the answer took longer than {settings.request_timeout_s:g} s"
            raise ApiError(504, message, code="timeout") from None
        finally:
            if answer.is_complete:
                self._limiter.settle(permit, output_tokens=answer.tally.num_output_tokens, usd=answer.usd)
            else:
                self._settlements.defer(request_id, permit)

    async def _take_in(self, scope: Scope, receive: Receive, answer: "_Answer", route: Route) -> None:
        """A file or a batch: the ledger says later what it cost."""
        settings = self._settings
        await self._settlements.catch_up()
        self._limiter.settle(self._limiter.admit(scope[KEY_IN_SCOPE], 0), output_tokens=0, usd=0.0)
        if route.rule is Rule.ORDER:
            receive = _replay(await self._read(scope, receive), receive)
        else:
            _require_length(scope, settings.max_upload_bytes)
            upload = Upload(receive, settings.max_upload_bytes, settings.body_timeout_s, settings.request_timeout_s)
            answer.close_unless_read(upload)
            receive = upload
        await self._app(with_pass(scope, route), receive, answer.send)

    def _find(self, scope: Scope) -> Route | ApiError:
        """The route, or what is wrong with the path: who has no key is not told."""
        try:
            return find_route(self._routes, scope)
        except ApiError as error:
            return error

    def _is_open(self, route: Route) -> bool:
        """Whether anybody gets it; the page only where keys guard what it shows."""
        return route.rule is Rule.OPEN or (route.rule is Rule.PAGE and self._settings.requires_key)

    def _authenticate(self, scope: Scope) -> KeyRecord:
        if not self._settings.requires_key:
            require_local(scope)
            return LOCAL
        scheme, _, key = (_header(scope, "authorization") or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(401, "send an API key: Authorization: Bearer KEY", code="missing_api_key")
        record = self._ring.find(key.strip())
        if record is None:
            raise ApiError(401, "this API key does not hold", code="invalid_api_key")
        return record

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        limit = self._settings.max_body_bytes
        _require_length(scope, limit)
        body = bytearray()
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "the client left before its request was whole", code="incomplete_body")
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise too_large(limit)
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(408, "the request did not arrive in time", code="request_timeout") from None


class _Answer:
    """Sends the application's answer on, and reads from it what the request used."""

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self._send = send
        self._headers = dict(headers)
        self._intake: Intake | None = None
        self._upload: Upload | None = None
        self._start: Message | None = None
        self._body = bytearray()
        self._is_stream = False
        self.is_started = False
        self.is_complete = True
        """Whether `tally` and `usd` are all that the request used; not when nobody waited for the end of its answer."""
        self.tally = Tally()
        self.usd = 0.0

    def expect(self, intake: Intake) -> None:
        """An engine will answer this request."""
        self._intake = intake
        model = intake.model
        self._headers["x-peagle-model"] = model.name
        self._headers["x-peagle-drafter"] = model.drafter or "none"
        if model.num_speculative_tokens:
            self._headers["x-peagle-num-speculative-tokens"] = str(model.num_speculative_tokens)

    def give_up(self) -> None:
        """Nobody waits for the answer any more: before its first byte, only its engine knows what it used."""
        if self._start is None:
            self.is_complete = False

    def close_unless_read(self, upload: Upload) -> None:
        """Answered before its end, as what is no form, a body is not read on: the connection closes."""
        self._upload = upload

    async def send(self, message: Message) -> None:
        """One ASGI message of the application."""
        if message["type"] == "http.response.start":
            kind = dict(message.get("headers", [])).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
            self._start = message
            self.is_complete = message["status"] != 200
            if self._intake is None or self._is_stream or message["status"] != 200:
                await self._begin()
        elif message["type"] != "http.response.body" or self._intake is None:
            await self._send(message)
        elif self._is_stream:
            await self._send({**message, "body": self._read_events(message.get("body", b""))})
        elif self.is_started:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                self._read_whole()
                await self._begin()
                await self._send({"type": "http.response.body", "body": bytes(self._body)})

    async def fail(self, error: ApiError) -> None:
        """Answer with an error: as a response, or as the last event of a stream that has begun."""
        body = json.dumps(error.body()).encode()
        if self.is_started:
            event = f"data: {body.decode()}\n\n".encode() if self._is_stream else b""
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
            return
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
        self._start = {"type": "http.response.start", "status": error.status, "headers": _encoded(headers)}
        await self._begin()
        await self._send({"type": "http.response.body", "body": body})

    async def _begin(self) -> None:
        assert self._start is not None, "the application starts its response before its body"
        if self._upload is not None and not self._upload.is_whole:
            self._headers["connection"] = "close"
        self.is_started = True
        headers = [*self._start.get("headers", []), *_encoded(self._headers)]
        await self._send({**self._start, "headers": headers})

    def _read_whole(self) -> None:
        answer = json.loads(self._body)
        self._note(answer)

    def _read_events(self, body: bytes) -> bytes:
        """Read the events that say what the request used; leave out the last one if the client did not ask for it."""
        assert self._intake is not None
        if f'"{OURS}"'.encode() not in body:
            return body
        kept = []
        for event in events(body.decode()):
            if isinstance(event, dict) and OURS in event:
                self._note(event)
                if is_usage_alone(event) and not self._intake.wants_usage:
                    continue
            kept.append(to_text(event))
        return "".join(kept).encode()

    def _note(self, answer: Mapping[str, Any]) -> None:
        self.tally.read(answer)
        summary = answer.get(OURS) or {}
        self.is_complete = True
        self.usd = summary.get("usd") or 0.0
        for name in _SUMMARY_HEADERS:
            if summary.get(name) is not None:
                self._headers[f"x-peagle-{name.replace('_', '-')}"] = str(summary[name])


def _require_length(scope: Scope, limit: int) -> None:
    """Refuse a body that says of itself that it is too large."""
    length = _header(scope, "content-length") or "0"
    if length.isdecimal() and int(length) > limit:
        raise too_large(limit)


def _header(scope: Scope, name: str) -> str | None:
    wanted = name.encode()
    return next((value.decode("latin-1") for key, value in scope.get("headers", []) if key.lower() == wanted), None)


def _with_headers(scope: Scope, headers: Mapping[str, str]) -> Scope:
    """The scope with these headers in place of the client's. What begins with x- is not the client's to say: ours would
    be believed, and vLLM reads others, of which it can fail (X-Vllm-Priority). The key is nobody's business."""
    kept = [(name, value) for name, value in _without(scope, headers) if not name.lower().startswith(b"x-")]
    kept = [(name, value) for name, value in kept if name.lower() != b"authorization"]
    return {**scope, "headers": [*kept, *_encoded(headers)]}


def _without(scope: Scope, names: Iterable[str]) -> list[tuple[bytes, bytes]]:
    """The headers of a request but these."""
    left_out = {name.encode() for name in names}
    return [(name, value) for name, value in scope.get("headers", []) if name.lower() not in left_out]


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body whole, then what the client does."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed
