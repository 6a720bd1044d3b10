"""The table of routes, each with the rule under which the gate lets it in.

Also the rule for an endpoint without keys: requests of this machine.

The gate looks a request up in this table, and the application's router is built from it. A route answers only what the
gate has treated as that very route: without the gate's pass it refuses, so that two readings of one path give an error
and never an answer that nobody counted. It knows ASGI and FastAPI, no keys and no limits.

A page of any site can send requests to 127.0.0.1, and where its site's name is made to resolve to 127.0.0.1 (DNS
rebinding) it may read the answers as if they were its own. What it cannot choose are the headers Host and Origin.
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
from pipelines.online.serve.http_names import route_path, validated

PASS = "peagle.pass"  # in the scope, where no client can write
_log = logging.getLogger("ray.serve")


class Rule(enum.Enum):
    """The gate's action before a route answers.

    All but the first two want a key and count as a request of it.
    """

    OPEN = enum.auto()
    """Anybody is answered."""
    PAGE = enum.auto()
    """Anybody where keys guard what the page shows, else this machine."""
    KEY = enum.auto()
    """Whoever has a key."""
    POLL = enum.auto()
    """The same, in a window of its own: figures, for which the page asks every two seconds."""
    GENERATION = enum.auto()
    """An engine answers: the body is checked, and its tokens and cost are held."""
    ORDER = enum.auto()
    """A body of JSON that costs later."""
    UPLOAD = enum.auto()
    """A body that is too large to be held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One route; called with an application, it decorates a handler."""

    method: str
    path: str
    rule: Rule
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, app: FastAPI) -> Callable[[Any], Any]:
        """As Ray's `make_fastapi_ingress` asks for it."""
        return app.api_route(self.path, methods=[self.method], **self.options)

    def matches(self, path: str) -> bool:
        """Whether the path is one of its own, to the last character."""
        return _pattern(self.path).fullmatch(path) is not None


def get(path: str, rule: Rule = Rule.KEY, **options: Any) -> Route:
    """A route that is read."""
    return Route(method="GET", path=path, rule=rule, options=options)


def post(path: str, rule: Rule = Rule.KEY, **options: Any) -> Route:
    """A route that is written to."""
    return Route(method="POST", path=path, rule=rule, options=options)


def delete(path: str) -> Route:
    """A route by which something is deleted."""
    return Route(method="DELETE", path=path, rule=Rule.KEY)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatePass:
    """The gate's leave for one request, in its scope.

    Attributes:
        route: method and path of the route by whose rule the gate has treated it.
        key: whose it is; None on a route that is open to anybody.
        body: where its rule reads JSON; None elsewhere.
        note: takes what an answer says of its own usage; None where no engine answers.
    """

    route: tuple[str, str]
    key: KeyRecord | None = field(default=None, repr=False)
    body: JsonBody | None = field(default=None, repr=False)
    note: Callable[[Mapping[str, Any]], None] | None = field(default=None, repr=False)


def with_pass(scope: Scope, route: Route, **given: Any) -> Scope:
    """The scope of a request that the gate has treated by the route's rule.

    Args:
        given: as `GatePass` has it.
    """
    return {**scope, PASS: GatePass(route=(route.method, route.path), **given)}


def pass_of(request: Request) -> GatePass:
    """The gate's leave for a request that a route answers."""
    let_in: GatePass = request.scope[PASS]
    return let_in


def key_of(request: Request) -> KeyRecord:
    """Whose request it is."""
    key = pass_of(request).key
    assert key is not None, "the route needs no key"
    return key


class GuardedRoute(APIRoute):
    """A route for requests that the gate let in; it checks bodies beside the loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, given the body that it wants.

        FastAPI itself would parse and check it while all streams wait.
        """
        handle, field = super().get_route_handler(), self.body_field
        if field is None:
            return handle

        async def check_and_handle(request: Request) -> Response:
            body = pass_of(request).body
            assert body is not None, "`handle` has looked"
            value = await body.put_through(functools.partial(_checked, field))
            return await handle(_CheckedRequest(request.scope, value))

        return check_and_handle

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, before anything of its body is read.

        Raises:
            ApiError: 500, the gate has let it in as another route, has not seen it, or has not read its body.
        """
        let_in = scope.get(PASS)
        is_let_in = (
            isinstance(let_in, GatePass)
            and let_in.route == (scope["method"], self.path)
            and (self.body_field is None or let_in.body is not None)
        )
        if not is_let_in:
            _log.error("%s %s was reached without the gate's pass: %r", scope["method"], self.path, let_in)
            raise ApiError(500, "the server failed; the request may be tried again", code="internal_error")
        require_known_parameters(scope, self)
        await super().handle(scope, receive, send)


def require_known_parameters(scope: Scope, route: APIRoute) -> None:
    """Refuse a query parameter that a route does not have.

    It would change nothing, and nobody would notice.

    Raises:
        ApiError: 422, with the nearest one that there is.
    """
    known = {field.alias for field in route.dependant.query_params}
    for name in QueryParams(scope.get("query_string", b"")):
        if name not in known:
            hint = did_you_mean(name, known) if known else "this path takes none"
            raise ApiError(422, f"there is no parameter {shown(name)}; {hint}", code="unknown_parameter", param=name)


class _CheckedRequest(Request):
    """A request whose body is what the handler wants."""

    def __init__(self, scope: Scope, value: Any) -> None:
        super().__init__(scope)
        self._value = value

    async def body(self) -> bytes:
        """For FastAPI, which asks whether there is one."""
        return b"{}"

    async def json(self) -> Any:
        """For FastAPI, to which a value of the right type is valid as it is."""
        return self._value


def _checked(field: Any, values: Any) -> Any:
    """The value of a body that a handler gets.

    Raises:
        RequestValidationError: it is none of this type; its first fault of each list.
    """
    value, errors = validated(field, values)
    if errors:
        raise RequestValidationError(errors)
    return value


def guarded_app(**options: Any) -> FastAPI:
    """An application of guarded routes only: none of FastAPI's own, no redirects."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, **options)
    app.router.route_class = GuardedRoute
    return app


def find_route(routes: Iterable[Route], scope: Scope) -> Route:
    """The route of a request.

    Raises:
        ApiError: 404 or 405, there is none.
    """
    path, method = route_path(scope), scope["method"]
    found = [route for route in routes if route.matches(path)]
    for route in found:
        if route.method == method:
            return route
    if found:
        methods = {route.method for route in found}
        allowed = ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
        raise ApiError(405, f"this path takes {allowed}", code="method_not_allowed", allow=allowed)
    raise ApiError(404, "there is no such path; /openapi.json lists those there are", code="not_found")


def as_get(scope: Scope, send: Send) -> tuple[Scope, Send]:
    """Return a HEAD request as a GET whose answer is sent without its body. Any other stays as it is."""
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
_WHAT_TO_DO = "ask for localhost, 127.0.0.1 or [::1], or start the endpoint with --keys"


def require_local(scope: Scope) -> None:
    """Let a client of this machine pass that asks for this machine by its own names.

    Raises:
        ApiError: 403, it is none.
    """
    if not _is_loopback(scope):
        raise _refusal("answers only its own machine")
    headers = Headers(scope=scope)
    host, origin = headers.get("host", ""), headers.get("origin")
    if not _HOST.fullmatch(host):
        raise _refusal(f"is not called {shown(host)}: {_WHAT_TO_DO}")
    if origin is not None and not _ORIGIN.fullmatch(origin):
        raise _refusal(f"answers no page of {shown(origin)}: {_WHAT_TO_DO}")


def _is_loopback(scope: Scope) -> bool:
    """Whether the client is on this machine."""
    try:
        return ipaddress.ip_address((scope.get("client") or ("",))[0]).is_loopback
    except ValueError:
        return False


def _refusal(reason: str) -> ApiError:
    return ApiError(403, f"this endpoint has no keys and {reason}", code="not_local")
