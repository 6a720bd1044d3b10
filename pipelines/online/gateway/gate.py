"""ASGI middleware that authenticates, limits and meters each request.

    route -> authenticate -> admit -> forward -> settle

    route           look up the path; a 404 or 405 is only sent to a client with a key
    authenticate    check the API key and count the request
    admit           read and validate the body, reserve tokens and cost
    forward         call the application with a `GatePass` in the scope
    settle          replace the reservation by the usage in the answer, or later by the ledger's

Any ASGI application that answers like vLLM can be behind it. Answers are never stored; prompts only with `log_prompts`.
"""

import asyncio
import functools
import hmac
import logging
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from peagle.economics.tags import tags_to_text
from pipelines.online.errors import ApiError
from pipelines.online.gateway.admission import ServedModel, check
from pipelines.online.gateway.bodies import (
    CREATE_BATCH_LIMITS,
    JsonBody,
    ParsePool,
    Upload,
    parse,
    read_body,
    require_length,
    require_plain,
)
from pipelines.online.gateway.crashes import EngineCrashes
from pipelines.online.gateway.invocations import INVOCATIONS, at, to_api_request
from pipelines.online.gateway.keys import LOCAL, KeyRecord, KeyRing
from pipelines.online.gateway.limits import KeyLimits, Permit
from pipelines.online.gateway.outgoing import Load, Outgoing, RefusalDelay, RefusalLog
from pipelines.online.gateway.prompt_log import PromptLog
from pipelines.online.gateway.routes import Route, Rule, find_route, head_as_get, require_local, with_pass
from pipelines.online.gateway.tags import tags_of
from pipelines.online.serve.exceptions import from_exception
from pipelines.online.totals import totals_of
from pipelines.online.wire import REQUEST_ID_HEADER, Context, header, path_refusal, with_headers

_JSON_RULES = (Rule.GENERATION, Rule.CREATE_BATCH)
_log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """The settings of the gate. Picklable.

    Attributes:
        key_file: reloaded when it changes.
        fixed_keys: keys from the environment of `peagle serve`.
        requires_key: if False, only clients on this machine are served (in a SageMaker container: any client).
        is_behind_sagemaker: whether SageMaker's `/invocations` route exists, see `invocations.py`.
        ledger: source of what keys spent before this process started.
        prompts: folder for the prompt log; None disables it.
        tags: added to every request.
        refusals_per_s: refusals per key that are sent without delay, after an initial burst.
        shares_prefix_cache: whether keys share an engine's prefix cache.
        cache_secret: derives the cache salts; a new secret only invalidates cached prefixes.
    """

    models: tuple[ServedModel, ...]
    ledger: Path
    key_file: Path | None = None
    fixed_keys: tuple[KeyRecord, ...] = ()
    requires_key: bool = True
    is_behind_sagemaker: bool = False
    max_body_bytes: int = 1024 * 1024
    max_upload_bytes: int = 200 * 1024 * 1024
    body_timeout_s: float = 10.0
    request_timeout_s: float = 600.0
    max_output_tokens: int | None = None
    prompts: Path | None = None
    shares_prefix_cache: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)
    refusals_per_s: float = 5.0
    cache_secret: bytes = field(default_factory=functools.partial(secrets.token_bytes, 32), repr=False)

    def cache_salt(self, key: KeyRecord) -> str | None:
        """Return the salt that separates the key's cached prefixes, or None if the cache is shared."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Admitted:
    """A request as the application receives it.

    Attributes:
        model, permit: only set for requests that an engine answers.
        body: the client's bytes, for the prompt log.
    """

    scope: Scope
    receive: Receive
    model: str | None = None
    permit: Permit | None = None
    body: bytes = b""


class Gate:
    """The gate in front of an application.

    Args:
        routes: all routes of the application. Other paths never reach it.
    """

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
        self._routes = (*routes, INVOCATIONS) if settings.is_behind_sagemaker else tuple(routes)
        self._load = load or Load()
        self._crashes = crashes or EngineCrashes()
        self._ring = KeyRing(settings.key_file, settings.fixed_keys)
        self._models = {model.name: model for model in settings.models}
        self._limits = KeyLimits(totals_of(settings.ledger))
        self._parse_pool, self._refusal_delay = ParsePool(), RefusalDelay(settings.refusals_per_s)
        self._refusals = RefusalLog()
        self._prompts = PromptLog(settings.prompts) if settings.prompts else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or answer it with an error."""
        if scope["type"] == "websocket":  # no route is a websocket, and the limits do not cover them
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = to_api_request(scope) if self._settings.is_behind_sagemaker else scope
        scope, send = head_as_get(scope, send)
        request_id = uuid.uuid4().hex  # not the client's: the ledger needs unique ids
        answer = Outgoing(send, {REQUEST_ID_HEADER: request_id}, self._refusal_delay)
        try:
            await self._serve(scope, receive, answer, request_id)
            return
        except Exception as error:
            refusal = from_exception(error)
            if refusal.status >= 500 and refusal.is_retryable:
                _log.error("request %s failed", request_id, exc_info=error)
            else:
                self._refusals.log(scope, refusal)
        # The error may be delayed; its traceback would keep the request's body in memory.
        refusal.__traceback__ = refusal.__context__ = refusal.__cause__ = None
        await answer.fail(refusal)

    async def _serve(self, scope: Scope, receive: Receive, answer: Outgoing, request_id: str) -> None:
        route = self._route(scope)
        if isinstance(route, Route) and self._is_open(route):
            await self._app(with_pass(scope, route), receive, answer.send)
            return
        key = self._authenticate(scope)
        answer.set_account(key.account if self._settings.requires_key else None)
        self._limits.count_request(key, is_poll=isinstance(route, Route) and route.rule is Rule.POLL)
        if isinstance(route, ApiError):
            raise route
        request = _Request(route=route, key=key, request_id=request_id, scope=scope, receive=receive, answer=answer)
        admitted = await self._admit(request)
        try:
            await self._forward(request, admitted)
        finally:
            if admitted.permit is not None:
                self._limits.settle(admitted.permit, answer.used)

    def _route(self, scope: Scope) -> Route | ApiError:
        """Return the route, or the error that only a client with a valid key may see.

        Raises:
            ApiError: 400, the path contains unprintable characters. Sent to anyone.
        """
        if refusal := path_refusal(scope):
            raise refusal
        try:
            return find_route(self._routes, scope)
        except ApiError as error:
            return error

    def _is_open(self, route: Route) -> bool:
        """Return whether the route needs no key. The web page is public only if its API calls need keys."""
        return route.rule is Rule.OPEN or (route.rule is Rule.PAGE and self._settings.requires_key)

    def _authenticate(self, scope: Scope) -> KeyRecord:
        if not self._settings.requires_key:
            if not self._settings.is_behind_sagemaker:
                require_local(scope)
            return LOCAL
        scheme, _, key = (header(scope, "authorization") or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(401, "send an API key: Authorization: Bearer KEY", code="missing_api_key")
        record = self._ring.find(key.strip())
        if record is None:
            raise ApiError(401, "invalid API key", code="invalid_api_key")
        if record.is_expired():
            raise ApiError(401, "this API key has expired", code="expired_api_key")
        return record

    async def _admit(self, request: _Request) -> _Admitted:
        """Read and validate what the route's rule requires, and reserve the maximum cost."""
        rule, receive = request.route.rule, request.receive
        if rule is Rule.GENERATION:
            if self._settings.requires_key:
                self._crashes.require_allowed(request.key.account)
            return await self._admit_generation(request)
        if rule in (Rule.CREATE_BATCH, Rule.UPLOAD):  # the cost arises later
            tags = tags_to_text({**self._settings.tags, **request.key.tags})
            await self._limits.require_budget(request.key, tags)
        if rule is Rule.CREATE_BATCH:
            body = await self._read(request)
            CREATE_BATCH_LIMITS.check(body)
            values = await self._parse_pool.run(request.key.name, len(body), parse, body)
            return _Admitted(
                scope=self._forwarded_scope(request, body=self._json(request, body, values)), receive=receive
            )
        if rule is Rule.UPLOAD:
            receive = self._upload(request)
        return _Admitted(scope=self._forwarded_scope(request), receive=receive)

    async def _admit_generation(self, request: _Request) -> _Admitted:
        settings, key = self._settings, request.key
        tags, body = tags_of(request.scope, key, settings.tags), await self._read(request)
        intake = await self._parse_pool.run(
            key.name,
            len(body),
            check,
            request.route.path,
            body,
            key,
            self._models,
            max_output_tokens=settings.max_output_tokens,
            cache_salt=settings.cache_salt(key),
        )
        if intake.path != request.route.path:
            scope = at(request.scope, intake.path)
            request = replace(request, scope=scope, route=find_route(self._routes, scope))
        context = Context(
            request_id=request.request_id,
            key=key.name,
            account=key.account,
            tags=tags,
            num_choices=intake.num_choices,
            cap_tokens=intake.cap_tokens,
            shown_usage=intake.shown_usage,
        )
        scope = self._forwarded_scope(
            request,
            context.headers(),
            body=self._json(request, body, intake.values),
            record_usage=request.answer.record_usage,
        )
        permit = await self._limits.admit(
            key,
            intake.model.name,
            request_id=request.request_id,
            prompt_tokens=intake.prompt_tokens,
            output_tokens=intake.output_tokens,
            tags=tags,
        )
        request.answer.set_model(intake.model)
        return _Admitted(scope=scope, receive=request.receive, model=intake.model.name, permit=permit, body=body)

    async def _read(self, request: _Request) -> bytes:
        require_plain(request.scope)
        require_length(request.scope, self._settings.max_body_bytes)
        return await read_body(
            request.receive,
            request.answer.send,
            max_bytes=self._settings.max_body_bytes,
            timeout_s=self._settings.body_timeout_s,
        )

    def _json(self, request: _Request, body: bytes, values: Any) -> JsonBody:
        return JsonBody(values=values, num_bytes=len(body), key=request.key.name, parse_pool=self._parse_pool)

    def _upload(self, request: _Request) -> Upload:
        settings = self._settings
        require_plain(request.scope)
        require_length(request.scope, settings.max_upload_bytes)
        times = settings.body_timeout_s, settings.request_timeout_s
        upload = Upload(request.receive, request.answer.send, settings.max_upload_bytes, *times)
        request.answer.close_unless_read(upload)
        return upload

    def _forwarded_scope(self, request: _Request, headers: Mapping[str, str] | None = None, **fields: Any) -> Scope:
        """Return the scope for the application, with the gate's pass.

        Args:
            headers: additional headers; the client cannot set them.
            fields: for `with_pass`.
        """
        own = {"x-request-id": request.request_id, **(headers or {})}
        if request.route.rule in _JSON_RULES:
            own["content-type"] = "application/json"  # `curl -d` says that it is a form
        scope = {**request.scope, "headers": with_headers(_client_headers(request.scope), own)}
        return with_pass(scope, request.route, key=request.key, **fields)

    async def _forward(self, request: _Request, admitted: _Admitted) -> None:
        """Call the application, with a timeout if an engine answers."""
        model, answer = admitted.model, request.answer
        if model is None:
            await self._app(admitted.scope, admitted.receive, answer.send)
            return
        limit_s = self._settings.request_timeout_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                if self._prompts:
                    await self._prompts.write(
                        request_id=request.request_id,
                        key=request.key.name,
                        path=request.route.path,
                        model=model,
                        body=admitted.body,
                    )
                with self._load.request(model):
                    await self._app(admitted.scope, admitted.receive, answer.send)
        except asyncio.CancelledError:
            answer.abandon()
            raise
        except TimeoutError:
            if not limit.expired():
                raise
            answer.abandon()
            raise ApiError(504, f"the answer took longer than {limit_s:g} s", code="timeout") from None


def _client_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the client's headers that are forwarded.

    Headers that begin with x- are dropped: the application trusts the gate's own, and some crash vLLM or Ray
    (X-Vllm-Priority, x_session_id). The API key is dropped, too.
    """
    return [
        (name, value)
        for name, value in scope.get("headers", [])
        if not name.lower().startswith((b"x-", b"x_")) and name.lower() != b"authorization"
    ]
