"""Routes, and the rules for admitting their requests.

The gate looks up each request in this table, and the application's router is built from it. A route only answers
requests with the gate's pass for that route. If gate and router ever parse a path differently, the result is an error
instead of an unmetered answer.
"""

import enum
import functools
import ipaddress
import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, QueryParams
from starlette.routing import compile_path
from starlette.types import Message, Receive, Scope, Send

from peagle.errors import did_you_mean, shown
from pipelines.online.errors import ApiError
from pipelines.online.gateway.bodies import JsonBody
from pipelines.online.gateway.keys import KeyRecord
from pipelines.online.serve.http_names import route_path, validate_body

PASS = "peagle.pass"  # a key of the ASGI scope; clients cannot set it
_log = logging.getLogger("ray.serve")


class Rule(enum.Enum):
    """How the gate treats a request. All except OPEN and PAGE require a key and count toward its limits."""

    OPEN = enum.auto()
    """No key needed."""
    PAGE = enum.auto()
    """The web page: public if the API requires keys, otherwise only for this machine."""
    KEY = enum.auto()
    """Any key."""
    POLL = enum.auto()
    """Any key, with a separate rate limit: metrics that the web page polls every two seconds."""
    GENERATION = enum.auto()
    """Answered by an engine: the body is validated, and tokens and cost are reserved."""
    CREATE_BATCH = enum.auto()
    """A small JSON body; the cost arises later."""
    UPLOAD = enum.auto()
    """A body too large to hold in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One route. Calling it with an application returns a decorator, as Ray's `make_fastapi_ingress` expects."""

    method: str
    path: str
    rule: Rule
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, app: FastAPI) -> Callable[[Any], Any]:
        return app.api_route(self.path, methods=[self.method], **self.options)

    def matches(self, path: str) -> bool:
        return _pattern(self.path).fullmatch(path) is not None


def get(path: str, rule: Rule = Rule.KEY, **options: Any) -> Route:
    return Route(method="GET", path=path, rule=rule, options=options)


def post(path: str, rule: Rule = Rule.KEY, **options: Any) -> Route:
    return Route(method="POST", path=path, rule=rule, options=options)


def delete(path: str) -> Route:
    return Route(method="DELETE", path=path, rule=Rule.KEY)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatePass:
    """The gate's permission for one request, stored in its scope."""

    route: tuple[str, str]  # method and path of the admitted route
    key: KeyRecord | None = field(default=None, repr=False)  # None on routes that do not require a key
    body: JsonBody | None = field(default=None, repr=False)  # the parsed body, if the rule reads JSON
    # receives the usage in the engine's answer; None if no engine answers
    record_usage: Callable[[Mapping[str, Any]], None] | None = field(default=None, repr=False)


def with_pass(scope: Scope, route: Route, **fields: Any) -> Scope:
    """Return the scope of an admitted request. `fields` as in `GatePass`."""
    return {**scope, PASS: GatePass(route=(route.method, route.path), **fields)}


def gate_pass_of(request: Request) -> GatePass:
    gate_pass: GatePass = request.scope[PASS]
    return gate_pass


def key_of(request: Request) -> KeyRecord:
    key = gate_pass_of(request).key
    assert key is not None, "the route does not require a key"
    return key


class GuardedRoute(APIRoute):
    """A FastAPI route that requires the gate's pass, and validates bodies in a thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, with the body validated in a thread.

        FastAPI itself would validate in the event loop and block all streams.
        """
        fastapi_handler, field = super().get_route_handler(), self.body_field
        if field is None:
            return fastapi_handler

        def validate(values: Any) -> Any:
            value, errors = validate_body(field, values)
            if errors:
                raise RequestValidationError(errors)
            return value

        async def validate_and_handle(request: Request) -> Response:
            body = gate_pass_of(request).body
            assert body is not None, "checked by `GuardedRoute.handle`"
            value = await body.validate_in_thread(validate)
            return await fastapi_handler(_ValidatedRequest(request.scope, value))

        return validate_and_handle

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises 500 without the gate's pass for this route, 422 for an unknown query parameter."""
        gate_pass = scope.get(PASS)
        has_valid_pass = (
            isinstance(gate_pass, GatePass)
            and gate_pass.route == (scope["method"], self.path)
            and (self.body_field is None or gate_pass.body is not None)
        )
        if not has_valid_pass:
            _log.error("%s %s was reached without the gate's pass: %r", scope["method"], self.path, gate_pass)
            raise ApiError(500, "internal server error; the request can be retried", code="internal_error")
        parameters = {field.alias for field in self.dependant.query_params}
        for name in QueryParams(scope.get("query_string", b"")):
            if name not in parameters:  # a typo must not be ignored
                hint = did_you_mean(name, parameters) if parameters else "this path has no parameters"
                raise ApiError(422, f"unknown parameter {shown(name)}; {hint}", code="unknown_parameter", param=name)
        await super().handle(scope, receive, send)


class _ValidatedRequest(Request):
    def __init__(self, scope: Scope, value: Any) -> None:
        super().__init__(scope)
        self._value = value

    async def body(self) -> bytes:
        """Return a placeholder, since FastAPI checks whether there is a body."""
        return b"{}"

    async def json(self) -> Any:
        """Return the validated value, which FastAPI accepts without validating it again."""
        return self._value


def guarded_app(**options: Any) -> FastAPI:
    """Return an application with guarded routes only: no docs routes, no redirects."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, **options)
    app.router.route_class = GuardedRoute
    return app


def find_route(routes: Iterable[Route], scope: Scope) -> Route:
    """Return the route of a request. Raises 404 or 405."""
    path, method = route_path(scope), scope["method"]
    matching = [route for route in routes if route.matches(path)]
    for route in matching:
        if route.method == method:
            return route
    if matching:
        methods = {route.method for route in matching}
        allowed = ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
        raise ApiError(405, f"this path only allows {allowed}", code="method_not_allowed", allow=allowed)
    raise ApiError(404, f"Unknown request URL: {method} {shown(path)[1:-1]}. /docs lists all URLs.", code="unknown_url")


def head_as_get(scope: Scope, send: Send) -> tuple[Scope, Send]:
    """Convert a HEAD request to GET and drop the body of its answer."""
    if scope["method"] != "HEAD":
        return scope, send

    async def send_without_body(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return {**scope, "method": "GET"}, send_without_body


@functools.cache
def _pattern(path: str) -> re.Pattern[str]:
    return compile_path(path)[0]


_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?", re.IGNORECASE)
_ORIGIN = re.compile(f"https?://{_HOST.pattern}", re.IGNORECASE)
_LOCAL_HINT = "use localhost, 127.0.0.1 or [::1], or start the endpoint with --keys"


def require_local(scope: Scope) -> None:
    """Refuse clients on other machines, and requests from web pages of other sites (403).

    Any web page can send requests to 127.0.0.1, and with DNS rebinding it can read the answers. But a web page cannot
    forge the headers Host and Origin.
    """
    try:
        is_loopback = ipaddress.ip_address((scope.get("client") or ("",))[0]).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise _refusal("only answers clients on its own machine")
    headers = Headers(scope=scope)
    host, origin = headers.get("host", ""), headers.get("origin")
    if not _HOST.fullmatch(host):
        raise _refusal(f"does not serve the host name {shown(host)}: {_LOCAL_HINT}")
    if origin is not None and not _ORIGIN.fullmatch(origin):
        raise _refusal(f"does not accept requests from web pages of {shown(origin)}: {_LOCAL_HINT}")


def _refusal(reason: str) -> ApiError:
    return ApiError(403, f"this endpoint has no keys and {reason}", code="not_local")
