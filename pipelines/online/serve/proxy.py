"""Serve's proxy: the middleware before it, and the check of its certificate.

Clients see an error of the API where the ingress died.

Where the ingress dies under a request, Ray 2.60's proxy says nothing, so that the HTTP server answers 500 in plain text
or breaks off the connection of a stream. Here the one becomes a 503 in OpenAI's format, and the other ends with an
error event. While the endpoint starts or stops, the proxy has no route to it and answers 404 in plain text, after
which no client asks again: that is a 503 too. The proxy also takes orders from anybody's headers, before the gate has
seen a key, and fails where it cannot read them; so they are left out. What other applications of the cluster say, and
are told, passes. The proxy would fetch a whole file for a client that does not read it, and press a whole body on an
ingress that is not as fast, or does not want it; so both go with back-pressure (`flow.py`).

Ray loads it into its proxies by its name in `ENVIRONMENT`, in which Ray must be started. It knows
ASGI, and of Ray that one text and those headers.
"""

import contextlib
import functools
import hashlib
import logging
import ssl
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peagle.errors import ConfigError
from peagle.requests.fields import URLS
from pipelines.online.errors import ApiError, overloaded
from pipelines.online.serve import slow_clients
from pipelines.online.serve.flow import Notes, Reading
from pipelines.online.wire import (
    BATCHES_URL,
    FILES_URL,
    INVOCATIONS_URL,
    REQUEST_ID_HEADER,
    encoded,
    error_event,
    error_response,
    header,
    path_refusal,
)

IMPORT_PATH = f"{__name__}:middlewares"
ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": IMPORT_PATH,
    # A proxy that fails three looks is replaced: after 6 s rather than 30.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
    # The controller's loop takes 5 % of a core when it turns ten times a second, as it does else.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    # Ray's limit for a first token is 600 s; request_timeout_s is ours, and may be longer. A year is none.
    "RAY_SERVE_LLM_ROUTER_HTTP_TIMEOUT": "31536000",
    # Each hand-over between threads costs every piece of a stream; nothing here holds up an event loop.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # Ray's default is 512 MiB a file and five old ones of each.
    "RAY_ROTATION_MAX_BYTES": str(64 << 20),
    "RAY_ROTATION_BACKUP_COUNT": "2",
}
_OURS = REQUEST_ID_HEADER.encode()  # the gate sets it on each answer
# What the proxy does as a client's header says, and what it only notes.
_ORDERS = frozenset({b"x-request-timeout-seconds", b"x-request-disconnect-disabled", b"serve-multiplexed-model-id"})
_NOTES = frozenset({b"x-request-id", b"x-session-id"})
_LONGEST_METHOD, _LONGEST_PATH, _LONGEST_NOTE = 16, 2048, 128  # characters that reach Serve's logs
_LEAST_OF_A_FAULT = 500
_NOT_FOUND = 404
# The proxy's own words where no application has the path; the status alone may be another application's.
_NO_ROUTE = b" not found. Ping http://.../-/routes for available routes."
_API = "/v1/"
_FILES, _CONTENT = FILES_URL + "/", "/content"
_POSTED = (FILES_URL, *URLS, BATCHES_URL, "/cancel", INVOCATIONS_URL)
_WITHOUT_BODY = ("GET", "HEAD", "DELETE", "OPTIONS")
_DIED = "the endpoint is restarting; try again"
_NOT_THERE = "the endpoint is starting or stopping; try again"
_log = logging.getLogger("ray.serve")


def middlewares() -> list[Any]:
    """The middlewares before the application of Ray's proxies.

    Proxies ask in their process before they start its server, which is the moment to have it wait no longer than it
    should for headers.
    """
    slow_clients.limit()
    return [Middleware(ProxyMiddleware)]


class ProxyMiddleware:
    """The middleware of ASGI around one request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        scope = _for_proxy(scope)
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        connection = None if _is_download(scope) else slow_clients.connection_of(scope)
        patient = None if connection is None else slow_clients.PatientSend(send, connection, _key_of(scope))
        answer = _Answer(patient or send, is_for_api=_is_for_api(scope))
        if refusal := _refusal(scope):
            await answer.refuse(refusal)
            return
        try:
            async with _flow(scope, receive, answer.send) as (receive, send_):
                await self._app(scope, receive, send_)
        except Exception:  # the HTTP server would answer in plain text
            _log.exception("Serve's proxy failed on a request")
        await answer.close()
        if patient is not None:
            await patient.drain()


class _Answer:
    """The proxy's answer, looked at on its way.

    Args:
        is_for_api: whether the path is the endpoint's, under whatever prefix. Where other applications share the
            cluster, any other path may not be there, and its answer is theirs unless the gate has signed it.
    """

    def __init__(self, send: Send, *, is_for_api: bool) -> None:
        self._send = send
        self._is_for_api = is_for_api
        self._held: Message | None = None
        self._is_started = self._is_stream = self._is_ended = False

    async def send(self, message: Message) -> None:
        """One message of the proxy."""
        if self._is_ended:
            return
        if message["type"] == "http.response.start":
            await self._read_head(message)
            return
        if message["type"] == "http.response.body":
            if self._held is not None and message.get("body", b"").endswith(_NO_ROUTE):
                await self.refuse(overloaded(_NOT_THERE))
                return
            await self._begin()
            self._is_ended = not message.get("more_body", False)
        await self._send(message)

    async def close(self) -> None:
        """The proxy has done, and may have left something out."""
        if self._is_ended:
            return
        if not self._is_started:
            await self.refuse(overloaded(_DIED))
        elif self._is_stream:
            event = error_event(overloaded(_DIED)).encode()
            await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error in place of the proxy."""
        self._is_ended = True
        headers, body = error_response(error)
        await self._send({"type": "http.response.start", "status": error.status, "headers": encoded(headers)})
        await self._send({"type": "http.response.body", "body": body})

    async def _read_head(self, head: Message) -> None:
        headers = dict(head.get("headers", []))
        is_ours = _OURS in headers
        if head["status"] >= _LEAST_OF_A_FAULT and self._is_for_api and not is_ours:
            await self.refuse(overloaded(_DIED))
            return
        self._held = head
        is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        self._is_stream = is_stream and (is_ours or self._is_for_api)
        if is_ours or head["status"] != _NOT_FOUND or not self._is_for_api:
            await self._begin()

    async def _begin(self) -> None:
        """Send the head on, where its body had to be seen first."""
        if self._held is not None:
            head, self._held = self._held, None
            self._is_started = True
            await self._send(head)


def _refusal(scope: Scope) -> ApiError | None:
    """Return why a request does not reach Serve, which writes its method and path into logs, or None."""
    if len(scope["method"]) > _LONGEST_METHOD:
        return ApiError(405, "unknown method", code="method_not_allowed")
    if len(scope["path"]) > _LONGEST_PATH:
        return ApiError(414, f"the path is longer than {_LONGEST_PATH} characters", code="path_too_long")
    return path_refusal(scope) if _is_for_api(scope) else None


def _key_of(scope: Scope) -> str:
    """Return a digest of the request's credentials, empty without any."""
    value = header(scope, "authorization")
    return hashlib.blake2b(value.encode(), digest_size=16).hexdigest() if value else ""


def _is_download(scope: Scope) -> bool:
    path = scope.get("path", "")
    return scope.get("method") == "GET" and _FILES in path and path.endswith(_CONTENT)


def _is_for_api(scope: Scope) -> bool:
    path = scope.get("path", "")
    return _API in path or path.endswith(INVOCATIONS_URL)


@contextlib.asynccontextmanager
async def _flow(scope: Scope, receive: Receive, send: Send) -> AsyncIterator[tuple[Receive, Send]]:
    """The `receive` and `send` for Serve, with back-pressure on large bodies."""
    method, path = scope.get("method"), scope.get("path", "")
    if _is_download(scope):
        with contextlib.closing(Notes(receive, send)) as notes:
            yield notes.receive, notes.send
    elif method in _WITHOUT_BODY or (method == "POST" and path.endswith(_POSTED)):
        reading = Reading(receive, send)
        yield reading.receive, reading.send
    else:
        yield receive, send


def _for_proxy(scope: Scope) -> Scope:
    """Return the request without headers that the proxy cannot read or that are too long for its logs.

    Requests to the API also lose the headers that the proxy obeys or logs; the gate gives them an id of its own.
    """
    read = _ORDERS | _NOTES
    refused = read if _is_for_api(scope) else frozenset()
    kept = []
    for name, value in scope.get("headers", []):
        as_read = name.replace(b"_", b"-")
        is_loggable = _is_text(value) and len(value) <= _LONGEST_NOTE
        if as_read not in refused and (as_read not in read or is_loggable):
            kept.append((name, value))
    return {**scope, "headers": kept}


def _is_text(value: bytes) -> bool:
    return value.decode(errors="ignore").encode() == value


_MISMATCH = "KEY_VALUES_MISMATCH"


def require_certificate(certificate: Path, key: Path) -> None:
    """Refuse files with which nobody, or somebody else too, could be answered.

    Raises:
        ConfigError: one cannot be read or is not what it should be, the key is not the certificate's, is encrypted, or
            is readable by everybody.
    """
    for name, path in (("tls_cert", certificate), ("tls_key", key)):
        _require_readable(name, path)
    mode = key.stat().st_mode
    if mode & stat.S_IRWXO:
        raise ConfigError(
            f"tls_key {key}: everybody on this machine may use it (mode {stat.S_IMODE(mode):04o})",
            hint=f"chmod 600 {key}",
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(certificate)
    except ssl.SSLError:
        raise ConfigError(
            f"tls_cert {certificate}: it has no certificate",
            hint="it must hold the endpoint's certificate in PEM (-----BEGIN CERTIFICATE-----), those between after it",
        ) from None
    try:
        context.load_cert_chain(certificate, key, password=functools.partial(_refuse, key))
    except ssl.SSLError as error:
        if error.reason == _MISMATCH:
            raise ConfigError(f"tls_key {key}: it is not the key of the certificate in {certificate}") from None
        raise ConfigError(
            f"tls_key {key}: it has no private key",
            hint="it must hold the certificate's key in PEM (-----BEGIN PRIVATE KEY-----)",
        ) from None


def _require_readable(name: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} {path}: {error.strerror}") from error


def _refuse(key: Path) -> NoReturn:
    raise ConfigError(f"tls_key {key}: it is encrypted", hint=f"openssl pkey -in {key} -out plain.pem")
