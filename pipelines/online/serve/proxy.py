"""Middleware for Ray Serve's HTTP proxy, and the check of its TLS files.

If the ingress dies, or the endpoint starts or stops, Ray 2.60's proxy answers in plain text or cuts a stream. With this
middleware, the client gets a 503 in OpenAI's format, or an error event. Headers that the proxy obeys or fails on are
removed, and large bodies use back-pressure (`flow.py`). Requests and answers of other applications pass unchanged.

Ray's proxies load the middleware by its name in `ENVIRONMENT`, which must be set when Ray starts.
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
from pipelines.online.serve.flow import DownloadAckSender, UploadThrottle
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
    # A proxy is replaced after three failed checks: after 6 s instead of 30.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
    # By default the controller's loop runs ten times a second and takes 5 % of a core.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    # Ray's limit for a first token is 600 s; request_timeout_s may be longer. A year means unlimited.
    "RAY_SERVE_LLM_ROUTER_HTTP_TIMEOUT": "31536000",
    # Switching threads slows down every piece of a stream, and nothing here blocks the event loop.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # Ray's default is 512 MiB per file and five old files.
    "RAY_ROTATION_MAX_BYTES": str(64 << 20),
    "RAY_ROTATION_BACKUP_COUNT": "2",
}
_GATE_HEADER = REQUEST_ID_HEADER.encode()  # set by the gate on each answer
# Headers that the proxy obeys, and headers that it only logs.
_OBEYED_HEADERS = frozenset(
    {b"x-request-timeout-seconds", b"x-request-disconnect-disabled", b"serve-multiplexed-model-id"}
)
_LOGGED_HEADERS = frozenset({b"x-request-id", b"x-session-id"})
_MAX_METHOD_CHARS, _MAX_PATH_CHARS, _MAX_LOGGED_CHARS = 16, 2048, 128  # characters that reach Serve's logs
_NOT_FOUND = 404
# End of the proxy's answer if no application has the path; another application may also answer 404.
_NO_ROUTE_TEXT = b" not found. Ping http://.../-/routes for available routes."
_POST_PATHS = (FILES_URL, *URLS, BATCHES_URL, "/cancel", INVOCATIONS_URL)
_RESTARTING = "the endpoint is restarting; try again"
_log = logging.getLogger("ray.serve")


def middlewares() -> list[Any]:
    """Return the middlewares for Ray's proxies, which call this before they start their server."""
    slow_clients.install_limits()
    return [Middleware(ProxyMiddleware)]


class ProxyMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = _without_unsafe_headers(scope)
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        connection = None if _is_download(scope) else slow_clients.connection_of(scope)
        patient_send = None
        if connection is not None:
            patient_send = slow_clients.PatientSend(send, connection, _credentials_digest(scope))
        answer = _Answer(patient_send or send, is_for_api=_is_for_api(scope))
        if refusal := _refusal(scope):
            await answer.refuse(refusal)
            return
        try:
            async with _with_back_pressure(scope, receive, answer.send) as (app_receive, app_send):
                await self._app(scope, app_receive, app_send)
        except Exception:  # the HTTP server would answer in plain text
            _log.exception("Serve's proxy failed on a request")
        await answer.close()
        if patient_send is not None:
            await patient_send.drain()


class _Answer:
    """Passes the proxy's answer to the client, and replaces the proxy's own errors.

    `is_for_api` says whether the path is one of the API's, under any prefix. For other paths, an answer is from the
    endpoint only if it has the gate's header.
    """

    def __init__(self, send: Send, *, is_for_api: bool) -> None:
        self._send = send
        self._is_for_api = is_for_api
        self._held_start: Message | None = None
        self._is_started = self._is_stream = self._is_ended = False

    async def send(self, message: Message) -> None:
        if self._is_ended:
            return
        if message["type"] == "http.response.start":
            await self._read_start(message)
            return
        if message["type"] == "http.response.body":
            if self._held_start is not None and message.get("body", b"").endswith(_NO_ROUTE_TEXT):
                await self.refuse(overloaded("the endpoint is starting or stopping; try again"))
                return
            await self._send_held_start()
            self._is_ended = not message.get("more_body", False)
        await self._send(message)

    async def close(self) -> None:
        if self._is_ended:
            return
        if not self._is_started:
            await self.refuse(overloaded(_RESTARTING))
        elif self._is_stream:
            event = error_event(overloaded(_RESTARTING)).encode()
            await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def refuse(self, error: ApiError) -> None:
        self._is_ended = True
        headers, body = error_response(error)
        await self._send({"type": "http.response.start", "status": error.status, "headers": encoded(headers)})
        await self._send({"type": "http.response.body", "body": body})

    async def _read_start(self, start: Message) -> None:
        headers = dict(start.get("headers", []))
        is_from_gate = _GATE_HEADER in headers
        if start["status"] >= 500 and self._is_for_api and not is_from_gate:
            await self.refuse(overloaded(_RESTARTING))
            return
        self._held_start = start
        is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        self._is_stream = is_stream and (is_from_gate or self._is_for_api)
        if is_from_gate or start["status"] != _NOT_FOUND or not self._is_for_api:
            await self._send_held_start()

    async def _send_held_start(self) -> None:
        """Send the held status and headers, if any."""
        if self._held_start is not None:
            start, self._held_start = self._held_start, None
            self._is_started = True
            await self._send(start)


def _refusal(scope: Scope) -> ApiError | None:
    if len(scope["method"]) > _MAX_METHOD_CHARS:
        return ApiError(405, "unknown method", code="method_not_allowed")
    if len(scope["path"]) > _MAX_PATH_CHARS:
        return ApiError(414, f"the path is longer than {_MAX_PATH_CHARS} characters", code="path_too_long")
    return path_refusal(scope) if _is_for_api(scope) else None


def _credentials_digest(scope: Scope) -> str:
    """Return a digest of the request's credentials, or an empty string."""
    value = header(scope, "authorization")
    return hashlib.blake2b(value.encode(), digest_size=16).hexdigest() if value else ""


def _is_download(scope: Scope) -> bool:
    path = scope.get("path", "")
    return scope.get("method") == "GET" and f"{FILES_URL}/" in path and path.endswith("/content")


def _is_for_api(scope: Scope) -> bool:
    path = scope.get("path", "")
    return "/v1/" in path or path.endswith(INVOCATIONS_URL)


@contextlib.asynccontextmanager
async def _with_back_pressure(scope: Scope, receive: Receive, send: Send) -> AsyncIterator[tuple[Receive, Send]]:
    """Yield `receive` and `send` for Serve, with back-pressure on large bodies."""
    method, path = scope.get("method"), scope.get("path", "")
    if _is_download(scope):
        with contextlib.closing(DownloadAckSender(receive, send)) as sender:
            yield sender.receive, sender.send
    elif method in ("GET", "HEAD", "DELETE", "OPTIONS") or (method == "POST" and path.endswith(_POST_PATHS)):
        throttle = UploadThrottle(receive, send)
        yield throttle.receive, throttle.send
    else:
        yield receive, send


def _without_unsafe_headers(scope: Scope) -> Scope:
    """Return the request without those proxy headers that the proxy cannot read or that are too long for its logs.

    Requests to the API also lose the headers that the proxy obeys or logs; the gate assigns them a request id.
    """
    proxy_headers = _OBEYED_HEADERS | _LOGGED_HEADERS
    removed = proxy_headers if _is_for_api(scope) else frozenset()
    headers = []
    for name, value in scope.get("headers", []):
        normalized = name.replace(b"_", b"-")  # as the proxy does
        is_text = value.decode(errors="ignore").encode() == value
        is_loggable = is_text and len(value) <= _MAX_LOGGED_CHARS
        if normalized not in removed and (normalized not in proxy_headers or is_loggable):
            headers.append((name, value))
    return {**scope, "headers": headers}


def require_certificate(certificate: Path, key: Path) -> None:
    """Check the TLS files. The key must match the certificate, and be neither encrypted nor readable by everyone."""
    for name, path in (("tls_cert", certificate), ("tls_key", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{name} {path}: {error.strerror}") from error
    mode = key.stat().st_mode
    if mode & stat.S_IRWXO:
        raise ConfigError(
            f"tls_key {key}: readable by everyone on this machine (mode {stat.S_IMODE(mode):04o})",
            hint=f"chmod 600 {key}",
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(certificate)
    except ssl.SSLError:
        raise ConfigError(
            f"tls_cert {certificate}: contains no certificate",
            hint="use PEM: the endpoint's certificate (-----BEGIN CERTIFICATE-----), then intermediate certificates",
        ) from None
    try:
        context.load_cert_chain(certificate, key, password=functools.partial(_refuse_encrypted_key, key))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"tls_key {key}: does not match the certificate {certificate}") from None
        raise ConfigError(
            f"tls_key {key}: contains no private key",
            hint="use PEM: the certificate's key (-----BEGIN PRIVATE KEY-----)",
        ) from None


def _refuse_encrypted_key(key: Path) -> NoReturn:
    raise ConfigError(f"tls_key {key}: the key is encrypted", hint=f"openssl pkey -in {key} -out plain.pem")
