"""ASGI middleware that authenticates, limits and meters each request.

    route           look up the path; a 404 or 405 is only sent to a client with a key
    authenticate    check the API key and count the request
    admit           read and validate the body, reserve tokens and cost
    forward         call the application, which answers like vLLM, with a `GatePass` in the scope
    settle          replace the reservation with the usage in the answer, or later with the ledger's usage

Answers are never stored; prompts only with `log_prompts`.
"""

import asyncio
import functools
import hmac
import json
import logging
import re
import secrets
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from peagle.economics.tags import parse_tags, tags_to_text
from peagle.files import append_line
from pipelines.online.errors import ApiError, from_exception
from pipelines.online.gateway.admission import ServedModel, check_request
from pipelines.online.gateway.bodies import (
    CREATE_BATCH_LIMITS,
    JsonBody,
    ParsePool,
    Upload,
    parse,
    read_body,
    require_length,
    require_uncompressed,
)
from pipelines.online.gateway.crashes import EngineCrashes
from pipelines.online.gateway.keys import LOCAL, KeyRecord, KeyRing
from pipelines.online.gateway.limits import KeyLimits
from pipelines.online.gateway.outgoing import Load, Outgoing, RefusalDelay, RefusalLog
from pipelines.online.gateway.routes import Route, Rule, find_route, head_as_get, post, require_local, with_pass
from pipelines.online.serve.http_names import route_path
from pipelines.online.totals import totals_of
from pipelines.online.wire import INVOCATIONS_URL, REQUEST_ID_HEADER, Context, header, path_refusal, with_headers

_TAGS_HEADER = "x-peagle-tags"
_ATTRIBUTES_HEADER = "x-amzn-sagemaker-custom-attributes"
_ATTRIBUTE = re.compile(r"([a-z]+)=([^\s,]+)")
# The application does not have this route: the gate forwards its requests to the chat or completions route.
_INVOCATIONS = post(INVOCATIONS_URL, Rule.GENERATION)
_log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """The settings of the gate. Picklable."""

    models: tuple[ServedModel, ...]
    ledger: Path  # the ledger folder, which has the earlier spend of keys
    key_file: Path | None = None
    fixed_keys: tuple[KeyRecord, ...] = ()  # keys from the environment of `peagle serve`
    # If False, only clients on this machine are served. In a SageMaker container, any client is served.
    requires_key: bool = True
    is_behind_sagemaker: bool = False
    max_body_bytes: int = 1024 * 1024
    max_upload_bytes: int = 200 * 1024 * 1024
    body_timeout_s: float = 10.0
    request_timeout_s: float = 600.0
    max_output_tokens: int | None = None
    prompts: Path | None = None  # folder of the prompt log; None disables it
    shares_prefix_cache: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)  # the endpoint's tags, added to every request
    refusals_per_s: float = 5.0  # refusals per key that are sent without delay, after an initial burst
    # Derives the cache salts. A new secret only invalidates cached prefixes.
    cache_secret: bytes = field(default_factory=functools.partial(secrets.token_bytes, 32), repr=False)

    def cache_salt(self, key: KeyRecord) -> str | None:
        """Return the salt that separates the key's cached prefixes, or None if keys share the cache."""
        if self.shares_prefix_cache or not self.requires_key:
            return None
        return hmac.digest(self.cache_secret, key.name.encode(), "sha256").hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """An authenticated request that has been counted but not admitted."""

    route: Route
    key: KeyRecord
    request_id: str
    scope: Scope
    receive: Receive
    answer: Outgoing


class Gate:
    """The gate in front of an application. Paths that are not in `routes` never reach the application."""

    def __init__(
        self,
        app: ASGIApp,
        settings: GateSettings,
        routes: Sequence[Route],
        load: Load | None = None,
        crashes: EngineCrashes | None = None,
    ) -> None:
        self._app = app
        self._settings = settings
        self._routes = (*routes, _INVOCATIONS) if settings.is_behind_sagemaker else tuple(routes)
        self._load = load or Load()
        self._crashes = crashes or EngineCrashes()
        self._key_ring = KeyRing(settings.key_file, settings.fixed_keys)
        self._models = {model.name: model for model in settings.models}
        self._limits = KeyLimits(totals_of(settings.ledger))
        self._parse_pool, self._refusal_delay = ParsePool(), RefusalDelay(settings.refusals_per_s)
        self._refusal_log = RefusalLog()
        self._prompts = PromptLog(settings.prompts) if settings.prompts else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # no route is a websocket, and the limits do not apply to websockets
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = to_api_request(scope) if self._settings.is_behind_sagemaker else scope
        scope, send = head_as_get(scope, send)
        request_id = uuid.uuid4().hex  # the client's id is ignored: the ledger needs unique ids
        answer = Outgoing(send, {REQUEST_ID_HEADER: request_id}, self._refusal_delay)
        try:
            await self._serve(scope, receive, answer, request_id)
            return
        except Exception as error:
            refusal = from_exception(error)
            if refusal.status >= 500 and refusal.is_retryable:
                _log.error("request %s failed", request_id, exc_info=error)
            else:
                self._refusal_log.log(scope, refusal)
        # The answer might be delayed. Until then, the error's traceback would keep the request's body in memory.
        refusal.__traceback__ = refusal.__context__ = refusal.__cause__ = None
        await answer.fail(refusal)

    async def _serve(self, scope: Scope, receive: Receive, answer: Outgoing, request_id: str) -> None:
        if refusal := path_refusal(scope):
            raise refusal
        route: Route | ApiError
        try:
            route = find_route(self._routes, scope)
        except ApiError as error:  # a 404 or 405, which only a client with a valid key may see
            route = error
        if isinstance(route, Route):
            # The web page is public only if its API calls need keys.
            is_open = route.rule is Rule.OPEN or (route.rule is Rule.PAGE and self._settings.requires_key)
            if is_open:
                await self._app(with_pass(scope, route), receive, answer.send)
                return
        key = self._authenticate(scope)
        answer.set_account(key.account if self._settings.requires_key else None)
        self._limits.count_request(key, is_poll=isinstance(route, Route) and route.rule is Rule.POLL)
        if isinstance(route, ApiError):
            raise route
        request = _Request(route=route, key=key, request_id=request_id, scope=scope, receive=receive, answer=answer)
        if route.rule is Rule.GENERATION:
            await self._generate(request)
            return
        body = None
        if route.rule in (Rule.CREATE_BATCH, Rule.UPLOAD):  # the cost arises when the batch runs
            await self._limits.require_budget(key, tags_to_text({**self._settings.tags, **key.tags}))
        if route.rule is Rule.CREATE_BATCH:
            content = await self._read(request)
            CREATE_BATCH_LIMITS.check(content)
            values = await self._parse_pool.run(key.name, len(content), parse, content)
            body = self._json_body(request, content, values)
        if route.rule is Rule.UPLOAD:
            settings = self._settings
            require_uncompressed(scope)
            require_length(scope, settings.max_upload_bytes)
            max_bytes, piece_timeout_s = settings.max_upload_bytes, settings.body_timeout_s
            receive = Upload(receive, answer.send, max_bytes, piece_timeout_s, settings.request_timeout_s)
            answer.close_unless_read(receive)
        await self._app(self._forwarded_scope(request, body=body), receive, answer.send)

    def _authenticate(self, scope: Scope) -> KeyRecord:
        if not self._settings.requires_key:
            if not self._settings.is_behind_sagemaker:
                require_local(scope)
            return LOCAL
        scheme, _, key = (header(scope, "authorization") or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(401, "send an API key: Authorization: Bearer KEY", code="missing_api_key")
        record = self._key_ring.find(key.strip())
        if record is None:
            raise ApiError(401, "invalid API key", code="invalid_api_key")
        if record.is_expired():
            raise ApiError(401, "this API key has expired", code="expired_api_key")
        return record

    async def _generate(self, request: _Request) -> None:
        """Validate a request for an engine, reserve its maximum cost, forward it, and settle its usage."""
        settings, key = self._settings, request.key
        if settings.requires_key:
            self._crashes.require_allowed(key.account)
        tags, body = tags_of(request.scope, key, settings.tags), await self._read(request)
        checked = await self._parse_pool.run(
            key.name,
            len(body),
            check_request,
            request.route.path,
            body,
            key,
            self._models,
            max_output_tokens=settings.max_output_tokens,
            cache_salt=settings.cache_salt(key),
        )
        if checked.path != request.route.path:
            scope = _with_path(request.scope, checked.path)
            request = replace(request, scope=scope, route=find_route(self._routes, scope))
        context = Context(
            request_id=request.request_id,
            key=key.name,
            account=key.account,
            tags=tags,
            num_choices=checked.num_choices,
            cap_tokens=checked.cap_tokens,
            shown_usage=checked.shown_usage,
        )
        scope = self._forwarded_scope(
            request,
            context.headers(),
            body=self._json_body(request, body, checked.values),
            record_usage=request.answer.record_usage,
        )
        permit = await self._limits.admit(
            key,
            checked.model.name,
            request_id=request.request_id,
            prompt_tokens=checked.prompt_tokens,
            output_tokens=checked.output_tokens,
            tags=tags,
        )
        request.answer.set_model(checked.model)
        try:
            await self._forward(request, scope, checked.model.name, body)
        finally:
            self._limits.settle(permit, request.answer.used)

    async def _forward(self, request: _Request, scope: Scope, model: str, body: bytes) -> None:
        answer, timeout_s = request.answer, self._settings.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                if self._prompts:
                    key, path = request.key.name, request.route.path
                    await self._prompts.write(request_id=request.request_id, key=key, path=path, model=model, body=body)
                with self._load.track_request(model):
                    await self._app(scope, request.receive, answer.send)
        except asyncio.CancelledError:
            answer.abandon()
            raise
        except TimeoutError:
            if not timeout.expired():
                raise
            answer.abandon()
            raise ApiError(504, f"the answer took longer than {timeout_s:g} s", code="timeout") from None

    async def _read(self, request: _Request) -> bytes:
        require_uncompressed(request.scope)
        require_length(request.scope, self._settings.max_body_bytes)
        return await read_body(
            request.receive,
            request.answer.send,
            max_bytes=self._settings.max_body_bytes,
            timeout_s=self._settings.body_timeout_s,
        )

    def _json_body(self, request: _Request, body: bytes, values: Any) -> JsonBody:
        return JsonBody(values=values, num_bytes=len(body), key=request.key.name, parse_pool=self._parse_pool)

    def _forwarded_scope(self, request: _Request, headers: Mapping[str, str] | None = None, **fields: Any) -> Scope:
        """Return the scope for the application, with the gate's pass and headers that the client cannot set."""
        gate_headers = {"x-request-id": request.request_id, **(headers or {})}
        if request.route.rule in (Rule.GENERATION, Rule.CREATE_BATCH):
            gate_headers["content-type"] = "application/json"  # `curl -d` sends the content type of a form
        scope = {**request.scope, "headers": with_headers(_client_headers(request.scope), gate_headers)}
        return with_pass(scope, request.route, key=request.key, **fields)


def _client_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the client's headers without the API key and without those that begin with x-.

    The application trusts the gate's own x- headers, and some crash vLLM or Ray (X-Vllm-Priority, x_session_id).
    """
    return [
        (name, value)
        for name, value in scope.get("headers", [])
        if not name.lower().startswith((b"x-", b"x_")) and name.lower() != b"authorization"
    ]


def tags_of(scope: Scope, key: KeyRecord, endpoint_tags: Mapping[str, str]) -> str:
    """Return the merged tags of the endpoint, the key and the request, in the ledger's format.

    Tags in the request's header, such as `X-Peagle-Tags: project=x, run=7`, override the key's tags, which override the
    endpoint's. Refuses an invalid header (400) and tags that the key's requests may not set (403).
    """
    text = header(scope, _TAGS_HEADER)
    try:
        request_tags = parse_tags(text.split(",")) if text else {}
    except ValueError as error:
        raise ApiError(400, f"{_TAGS_HEADER}: {error}", code="invalid_value", param=_TAGS_HEADER) from error
    if key != LOCAL and (refused := sorted(request_tags.keys() - set(key.request_tags))):
        message = f"requests with this key may not set the tag {refused[0]}"
        raise ApiError(403, message, code="tag_not_allowed", param=_TAGS_HEADER)
    return tags_to_text({**endpoint_tags, **key.tags, **request_tags})


def to_api_request(scope: Scope) -> Scope:
    """Map SageMaker's single route to the route of the API that the request names.

    SageMaker forwards the body and only headers that begin with X-Amzn-SageMaker-. So clients set
    X-Amzn-SageMaker-Custom-Attributes as with AWS's own vLLM container: `route=/v1/completions`, `key=KEY` if the
    endpoint has keys, and `method=GET` for reads. Without `route`, the path stays, and the gate later chooses a
    route by the body.
    """
    if route_path(scope) != INVOCATIONS_URL:
        return scope
    attributes = dict(_ATTRIBUTE.findall(header(scope, _ATTRIBUTES_HEADER) or ""))
    if "key" in attributes:
        scope = {**scope, "headers": with_headers(scope["headers"], {"authorization": f"Bearer {attributes['key']}"})}
    if "route" in attributes:
        scope = {**_with_path(scope, attributes["route"]), "method": attributes.get("method", scope["method"])}
    return scope


def _with_path(scope: Scope, path: str) -> Scope:
    full_path = scope.get("root_path", "") + path
    return {**scope, "path": full_path, "raw_path": full_path.encode()}


class PromptLog:
    """A log of admitted requests, one JSON line each, with the client's body and the name of its key.

    Each start of the ingress writes its own file, readable only by its owner.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"prompts-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}.jsonl"
        self._lock = threading.Lock()

    async def write(self, *, request_id: str, key: str, model: str, path: str, body: bytes) -> None:
        """Log a request. Never raises, so that the request is served even if logging fails."""
        metadata = {"request_id": request_id, "received_at": time.time(), "key": key, "model": model, "path": path}
        try:
            await asyncio.to_thread(self._append, metadata, body)
        except OSError as error:
            _log.error("cannot write request %s to the prompt log: %s", request_id, error)

    def _append(self, metadata: Mapping[str, object], body: bytes) -> None:
        line = json.dumps({**metadata, "body": json.loads(body)}).encode()
        with self._lock:  # the thread continues if the client disconnects
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.touch(mode=0o600)
            append_line(self._path, line)
