"""The gate before the OpenAI routes, an ASGI middleware.

It tells who asks, whether they may, and how much they used.

    path -> key -> request counted -> route -> body -> checks -> tokens held -> the application -> usage from its answer

It knows HTTP by ASGI alone and no Ray: any application that answers as vLLM does can be behind it. Prompts and answers
pass through; prompts are written down where the settings say so, answers never.
"""

import asyncio
import functools
import hmac
import logging
import secrets
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipelines.online.errors import ApiError, from_exception
from pipelines.online.gateway.admission import ServedModel, check
from pipelines.online.gateway.bodies import ORDER, HeavyWork, Upload, too_large
from pipelines.online.gateway.keys import LOCAL, KeyRecord, KeyRing
from pipelines.online.gateway.limits import Settlements
from pipelines.online.gateway.outgoing import NOTE_IN_SCOPE, Load, Outgoing, encoded
from pipelines.online.gateway.prompt_log import PromptLog
from pipelines.online.gateway.routes import HEAVY, Route, Rule, find_route, require_local, with_pass
from pipelines.online.serve.flow import Told
from pipelines.online.wire import REQUEST_ID_HEADER, path_refusal

KEY_HEADER = "x-peagle-key"
ACCOUNT_HEADER = "x-peagle-account"
OPERATOR_HEADER = "x-peagle-operator"
EACH_USAGE_HEADER = "x-peagle-each-usage"
CAP_HEADER = "x-peagle-cap-tokens"
CHOICES_HEADER = "x-peagle-choices"
AGAIN_HEADER = "x-peagle-again"  # of a request that an engine had which died: the Unix time at which that one was asked
KEY_IN_SCOPE = "peagle.key"  # the whole record, for what is answered in this process
_JSON_RULES = (Rule.GENERATION, Rule.ORDER)
_log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """The settings of the gate, wherever the ingress lands.

    Attributes:
        key_file: read again whenever it changes.
        fixed_keys: from the environment of whoever started the endpoint.
        requires_key: without, only this machine is let in.
        ledger: says what keys have spent before this process started.
        prompts: folder in which requests are written down; None where they are not.
        shares_prefix_cache: a key's requests may find in an engine's cache what another key's have left there.
        cache_secret: of this endpoint; a new one, as of an endpoint that is deployed anew, only empties caches.
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
    shares_prefix_cache: bool = False
    cache_secret: bytes = field(default_factory=functools.partial(secrets.token_bytes, 32), repr=False)

    def cache_salt(self, key: KeyRecord) -> str | None:
        """The salt that keeps a key's cached prompts apart.

        None where there is nobody to keep them from.
        """
        if self.shares_prefix_cache or not self.requires_key:
            return None
        return hmac.digest(self.cache_secret, key.name.encode(), "sha256").hex()


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
        self._heavy = HeavyWork()
        self._prompts = PromptLog(settings.prompts) if settings.prompts else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request through, or answer it."""
        if scope["type"] == "websocket":  # no route is one, and nothing here would hold one to its key's limits
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex  # never the client's: usage is told apart by it
        answer = Outgoing(send, {REQUEST_ID_HEADER: request_id})
        try:
            await self._serve(scope, receive, answer, request_id)
        except Exception as error:
            refusal = from_exception(error)
            if refusal.status >= 500:
                _log.error("request %s failed", request_id, exc_info=error)
            await answer.fail(refusal)

    async def _serve(self, scope: Scope, receive: Receive, answer: Outgoing, request_id: str) -> None:
        if refusal := path_refusal(scope):
            raise refusal
        route = self._find(scope)
        if isinstance(route, Route) and self._is_open(route):
            await self._app(with_pass(scope, route), receive, answer.send)
            return
        key = self._authenticate(scope)
        self._settlements.limiter.count(key, is_poll=isinstance(route, Route) and route.rule is Rule.POLL)
        if isinstance(route, ApiError):
            raise route
        inward = {KEY_HEADER: key.name, ACCOUNT_HEADER: key.account, "x-request-id": request_id}
        inward |= {OPERATOR_HEADER: "1"} if key.is_operator else {}
        # What is read as JSON here is JSON behind it too, though `curl -d` calls it a form.
        inward |= {"content-type": "application/json"} if route.rule in _JSON_RULES else {}
        scope = {**_with_headers(scope, inward), KEY_IN_SCOPE: key, HEAVY: (self._heavy, key.name)}
        if route.rule is Rule.GENERATION:
            await self._generate(scope, receive, answer, route, request_id)
        elif route.rule in (Rule.ORDER, Rule.UPLOAD):
            await self._take_in(scope, receive, answer, route)
        else:
            await self._app(with_pass(scope, route), receive, answer.send)

    async def _generate(self, scope: Scope, receive: Receive, answer: Outgoing, route: Route, request_id: str) -> None:
        """An engine's answer: its tokens and cost are held until it is known what it used."""
        settings, key = self._settings, scope[KEY_IN_SCOPE]
        body = await self._read(scope, Told(receive, answer.send))
        intake = await self._heavy.run(
            key.name,
            len(body),
            check,
            route.path,
            body,
            key,
            self._models,
            max_output_tokens=settings.max_output_tokens,
            cache_salt=settings.cache_salt(key),
        )
        permit = await self._settlements.admit(
            key,
            intake.output_tokens,
            intake.model.name,
            prompt_tokens=intake.prompt_tokens,
            request_id=request_id,
        )
        answer.expect(intake)
        inward = {"content-length": str(len(intake.body)), CHOICES_HEADER: str(intake.num_choices)}
        inward |= {EACH_USAGE_HEADER: "1"} if intake.wants_each_usage else {}
        inward |= {CAP_HEADER: str(intake.cap_tokens)} if intake.cap_tokens else {}
        scope = with_pass(
            {**scope, NOTE_IN_SCOPE: answer.note, "headers": [*_without(scope, inward), *encoded(inward)]}, route
        )
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
                self._settlements.settle(permit, output_tokens=answer.tally.num_output_tokens, usd=answer.usd)
            else:
                self._settlements.defer(permit)

    async def _take_in(self, scope: Scope, receive: Receive, answer: Outgoing, route: Route) -> None:
        """A file or a batch: the ledger says later what it cost."""
        settings = self._settings
        await self._settlements.require_budget(scope[KEY_IN_SCOPE])
        if route.rule is Rule.ORDER:
            body = await self._read(scope, Told(receive, answer.send))
            ORDER.check(body)
            receive = _replay(body, receive)
        else:
            _require_length(scope, settings.max_upload_bytes)
            times = settings.body_timeout_s, settings.request_timeout_s
            upload = Upload(receive, answer.send, settings.max_upload_bytes, *times)
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
        if record.is_expired():
            raise ApiError(401, "this API key has expired", code="expired_api_key")
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


def _require_length(scope: Scope, limit: int) -> None:
    """Refuse a body that says of itself that it is too large."""
    length = _header(scope, "content-length") or "0"
    if length.isdecimal() and int(length) > limit:
        raise too_large(limit)


def _header(scope: Scope, name: str) -> str | None:
    wanted = name.encode()
    return next((value.decode("latin-1") for key, value in scope.get("headers", []) if key.lower() == wanted), None)


def _with_headers(scope: Scope, headers: Mapping[str, str]) -> Scope:
    """The scope with these headers in place of the client's.

    What begins with x- is not the client's to say: ours would be believed, and vLLM and Ray read others, of which they
    can fail (X-Vllm-Priority, x_session_id). The key is nobody's business.
    """
    kept = [(name, value) for name, value in _without(scope, headers) if not name.lower().startswith((b"x-", b"x_"))]
    kept = [(name, value) for name, value in kept if name.lower() != b"authorization"]
    return {**scope, "headers": [*kept, *encoded(headers)]}


def _without(scope: Scope, names: Iterable[str]) -> list[tuple[bytes, bytes]]:
    """The headers of a request but these."""
    left_out = {name.encode() for name in names}
    return [(name, value) for name, value in scope.get("headers", []) if name.lower() not in left_out]


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body whole, then what the client does."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed
