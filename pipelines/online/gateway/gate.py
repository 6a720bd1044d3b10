"""The gate before the OpenAI routes, an ASGI middleware.

It tells who asks, whether they may, and how much they used.

    route -> authenticate -> admit -> forward -> settle

    route           the path's, by the table; a path that is refused is told only to who has a key
    authenticate    the key, whose request counts from here on, whatever becomes of it
    admit           the body read and checked, tokens and cost held
    forward         to the application, with the gate's pass and its word on the request
    settle          by what the answer says of its own usage, or later by the ledger

It knows HTTP by ASGI alone and no Ray: any application that answers as vLLM does can be behind it. Prompts and answers
pass through; prompts are written down where the settings say so, answers never.
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
    ORDER,
    HeavyWork,
    JsonBody,
    Upload,
    parse,
    read_body,
    require_length,
    require_plain,
)
from pipelines.online.gateway.crashes import EngineCrashes
from pipelines.online.gateway.invocations import INVOCATIONS, as_api, at
from pipelines.online.gateway.keys import LOCAL, KeyRecord, KeyRing
from pipelines.online.gateway.limits import KeyLimits, Permit
from pipelines.online.gateway.outgoing import Load, Outgoing, RefusalDelay, RefusalLog
from pipelines.online.gateway.prompt_log import PromptLog
from pipelines.online.gateway.routes import Route, Rule, as_get, find_route, require_local, with_pass
from pipelines.online.gateway.tags import tags_of
from pipelines.online.serve.exceptions import from_exception
from pipelines.online.totals import totals_of
from pipelines.online.wire import REQUEST_ID_HEADER, Context, header, path_refusal, with_headers

_JSON_RULES = (Rule.GENERATION, Rule.ORDER)
_log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """The settings of the gate, wherever the ingress lands.

    Attributes:
        key_file: read again whenever it changes.
        fixed_keys: from the environment of whoever started the endpoint.
        requires_key: if False, only this machine can connect; in a SageMaker container, anyone who can connect to it.
        is_behind_sagemaker: whether SageMaker sends the requests, to its own route (`invocations.py`).
        ledger: says what keys have spent before this process started.
        prompts: folder in which requests are written down; None where they are not.
        tags: of every request, beside its key's.
        refusals_per_s: of one key, after the first ones; others are answered later.
        shares_prefix_cache: a key's requests may find in an engine's cache what another key's have left there.
        cache_secret: of this endpoint; a new one, as of an endpoint that is deployed anew, only empties caches.
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
        """The salt that keeps a key's cached prompts apart.

        None where there is nobody to keep them from.
        """
        if self.shares_prefix_cache or not self.requires_key:
            return None
        return hmac.digest(self.cache_secret, key.name.encode(), "sha256").hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A request of a key: it counts, and is not admitted yet."""

    route: Route
    key: KeyRecord
    request_id: str
    scope: Scope
    receive: Receive
    answer: Outgoing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Admitted:
    """A request as the application gets it.

    Attributes:
        model, permit: of a request that an engine answers, and what it holds; None elsewhere.
        body: for the log of prompts, as the client sent it.
    """

    scope: Scope
    receive: Receive
    model: str | None = None
    permit: Permit | None = None
    body: bytes = b""


class Gate:
    """The middleware.

    Args:
        routes: the application's own table; what is not in it never reaches the application.
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
        self._heavy, self._pace = HeavyWork(), RefusalDelay(settings.refusals_per_s)
        self._refusals = RefusalLog()
        self._prompts = PromptLog(settings.prompts) if settings.prompts else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request through, or answer it."""
        if scope["type"] == "websocket":  # no route is one, and nothing here would hold one to its key's limits
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = as_api(scope) if self._settings.is_behind_sagemaker else scope
        scope, send = as_get(scope, send)
        request_id = uuid.uuid4().hex  # never the client's: usage is told apart by it
        answer = Outgoing(send, {REQUEST_ID_HEADER: request_id}, self._pace)
        try:
            await self._serve(scope, receive, answer, request_id)
            return
        except Exception as error:
            refusal = from_exception(error)
            if refusal.status >= 500 and refusal.is_retryable:
                _log.error("request %s failed", request_id, exc_info=error)
            else:
                self._refusals.log(scope, refusal)
        # While it is held back its traceback would keep the request's body in memory.
        refusal.__traceback__ = refusal.__context__ = refusal.__cause__ = None
        await answer.fail(refusal)

    async def _serve(self, scope: Scope, receive: Receive, answer: Outgoing, request_id: str) -> None:
        found = self._route(scope)
        if isinstance(found, Route) and self._is_open(found):
            await self._app(with_pass(scope, found), receive, answer.send)
            return
        key = self._authenticate(scope)
        answer.know(key.account if self._settings.requires_key else None)
        self._limits.count(key, is_poll=isinstance(found, Route) and found.rule is Rule.POLL)
        if isinstance(found, ApiError):
            raise found
        asked = _Asked(route=found, key=key, request_id=request_id, scope=scope, receive=receive, answer=answer)
        admitted = await self._admit(asked)
        try:
            await self._forward(asked, admitted)
        finally:
            if admitted.permit is not None:
                self._limits.settle(admitted.permit, answer.used)

    def _route(self, scope: Scope) -> Route | ApiError:
        """The route, or what is wrong with the path, which only who has a key is told.

        Raises:
            ApiError: 400, the path cannot be printed. Everybody is told.
        """
        if refusal := path_refusal(scope):
            raise refusal
        try:
            return find_route(self._routes, scope)
        except ApiError as error:
            return error

    def _is_open(self, route: Route) -> bool:
        """Whether anybody gets it; the page only where keys guard what it shows."""
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

    async def _admit(self, asked: _Asked) -> _Admitted:
        """Read and check what the route's rule wants, and hold what it may cost."""
        rule, receive = asked.route.rule, asked.receive
        if rule is Rule.GENERATION:
            if self._settings.requires_key:
                self._crashes.require_allowed(asked.key.account)
            return await self._admit_generation(asked)
        if rule in (Rule.ORDER, Rule.UPLOAD):  # the ledger says later what it cost
            tags = tags_to_text({**self._settings.tags, **asked.key.tags})
            await self._limits.require_budget(asked.key, tags)
        if rule is Rule.ORDER:
            body = await self._read(asked)
            ORDER.check(body)
            values = await self._heavy.run(asked.key.name, len(body), parse, body)
            return _Admitted(scope=self._inward(asked, body=self._json(asked, body, values)), receive=receive)
        if rule is Rule.UPLOAD:
            receive = self._upload(asked)
        return _Admitted(scope=self._inward(asked), receive=receive)

    async def _admit_generation(self, asked: _Asked) -> _Admitted:
        settings, key = self._settings, asked.key
        tags, body = tags_of(asked.scope, key, settings.tags), await self._read(asked)
        intake = await self._heavy.run(
            key.name,
            len(body),
            check,
            asked.route.path,
            body,
            key,
            self._models,
            max_output_tokens=settings.max_output_tokens,
            cache_salt=settings.cache_salt(key),
        )
        if intake.path != asked.route.path:
            scope = at(asked.scope, intake.path)
            asked = replace(asked, scope=scope, route=find_route(self._routes, scope))
        context = Context(
            request_id=asked.request_id,
            key=key.name,
            account=key.account,
            tags=tags,
            num_choices=intake.num_choices,
            cap_tokens=intake.cap_tokens,
            shown_usage=intake.shown_usage,
        )
        scope = self._inward(
            asked, context.headers(), body=self._json(asked, body, intake.values), note=asked.answer.note
        )
        permit = await self._limits.admit(
            key,
            intake.model.name,
            request_id=asked.request_id,
            prompt_tokens=intake.prompt_tokens,
            output_tokens=intake.output_tokens,
            tags=tags,
        )
        asked.answer.expect(intake.model)
        return _Admitted(scope=scope, receive=asked.receive, model=intake.model.name, permit=permit, body=body)

    async def _read(self, asked: _Asked) -> bytes:
        require_plain(asked.scope)
        require_length(asked.scope, self._settings.max_body_bytes)
        return await read_body(
            asked.receive,
            asked.answer.send,
            max_bytes=self._settings.max_body_bytes,
            timeout_s=self._settings.body_timeout_s,
        )

    def _json(self, asked: _Asked, body: bytes, values: Any) -> JsonBody:
        return JsonBody(values=values, num_bytes=len(body), key=asked.key.name, heavy=self._heavy)

    def _upload(self, asked: _Asked) -> Upload:
        settings = self._settings
        require_plain(asked.scope)
        require_length(asked.scope, settings.max_upload_bytes)
        times = settings.body_timeout_s, settings.request_timeout_s
        upload = Upload(asked.receive, asked.answer.send, settings.max_upload_bytes, *times)
        asked.answer.close_unless_read(upload)
        return upload

    def _inward(self, asked: _Asked, said: Mapping[str, str] | None = None, **given: Any) -> Scope:
        """The request's scope for the application, with the gate's pass.

        Args:
            said: headers that are the gate's to say.
            given: as `with_pass` takes it.
        """
        said = {"x-request-id": asked.request_id, **(said or {})}
        # What is read as JSON here is JSON behind it too, though `curl -d` calls it a form.
        said |= {"content-type": "application/json"} if asked.route.rule in _JSON_RULES else {}
        headers = with_headers(_of_client(asked.scope), said)
        return with_pass({**asked.scope, "headers": headers}, asked.route, key=asked.key, **given)

    async def _forward(self, asked: _Asked, admitted: _Admitted) -> None:
        """Have the application answer; where an engine does, within its time."""
        model, answer = admitted.model, asked.answer
        if model is None:
            await self._app(admitted.scope, admitted.receive, answer.send)
            return
        limit_s = self._settings.request_timeout_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                if self._prompts:
                    told = {"request_id": asked.request_id, "key": asked.key.name, "path": asked.route.path}
                    await self._prompts.write(**told, model=model, body=admitted.body)
                with self._load.request(model):
                    await self._app(admitted.scope, admitted.receive, answer.send)
        except asyncio.CancelledError:
            answer.give_up()
            raise
        except TimeoutError:
            if not limit.expired():
                raise
            answer.give_up()
            raise ApiError(504, f"the answer took longer than {limit_s:g} s", code="timeout") from None


def _of_client(scope: Scope) -> list[tuple[bytes, bytes]]:
    """A request's headers that are the client's to say.

    None begins with x-: ours would be believed, and vLLM and Ray read others, of which they can fail (X-Vllm-Priority,
    x_session_id). The key is nobody's business.
    """
    return [
        (name, value)
        for name, value in scope.get("headers", [])
        if not name.lower().startswith((b"x-", b"x_")) and name.lower() != b"authorization"
    ]
