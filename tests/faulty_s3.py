"""An S3 server (moto's, in a thread) whose requests can fail like requests to a real S3.

The server handles one request at a time, because moto's conditional writes are not atomic.
"""

import io
import logging
import random
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from moto.backends import get_backend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


@dataclass
class _Fault:
    kind: str | int
    matches: Callable[[str, str], bool]
    times: float


class FaultyS3:
    """An S3 server with an empty state and configurable faults.

    Attributes:
        requests: (method, path) of each request.
        ignores_conditions: whether it accepts every conditional write.
        upload_age_s: age of unfinished uploads in listings.
    """

    def __init__(self):
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self.reset()
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def reset(self):
        """Remove all objects and faults."""
        with self._lock:
            for account in get_backend("s3").values():
                for backend in account.values():
                    backend.reset()
            self.requests = []
            self.ignores_conditions = False
            self.upload_age_s = 0.0
            self._faults = []

    def reset_faults(self):
        with self._lock:
            self._faults = []

    def fail(self, kind, *, method="", path="", times=1):
        """Make the next matching requests fail.

        Args:
            kind: an HTTP status, or when the server disconnects: "connection_cut" (before the operation),
                "response_lost" (after it) or "body_truncated" (in the middle of the response).
            method, path: text that a request's method and path must contain (default: all requests match).
        """
        self._add(kind, lambda m, p: method in m and path in p, times)

    def fail_often(self, share, seed):
        """Make this share of all requests fail from now on, in various ways."""
        rng = random.Random(seed)
        for kind in (500, 503, "connection_cut", "response_lost"):
            self._add(kind, lambda m, p: rng.random() < share / 4, float("inf"))

    def count(self, method, path=""):
        """Return the number of requests with this method whose path contains `path`."""
        return sum(method == m and path in p for m, p in self.requests)

    def _add(self, kind, matches, times):
        with self._lock:
            self._faults.append(_Fault(kind, matches, times))

    def _take_fault(self, method, path):
        for fault in self._faults:
            if fault.times > 0 and fault.matches(method, path):
                fault.times -= 1
                return fault.kind
        return None

    def _serve(self, environ, start_response):
        # Read the body before taking the lock, because a client can be stopped in the middle of a request.
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
        with self._lock:
            method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
            self.requests.append((method, path))
            fault = self._take_fault(method, path)
            if self.ignores_conditions:
                environ.pop("HTTP_IF_NONE_MATCH", None)
            if fault == "connection_cut":
                return _disconnect(environ)
            if isinstance(fault, int):
                return _refuse(fault, start_response)
            response = []
            data = b"".join(self._app(environ, lambda status, headers, *_: response.append((status, headers))))
            if "uploads" in environ.get("QUERY_STRING", ""):
                started_at = datetime.now(UTC) - timedelta(seconds=self.upload_age_s)
                data = data.replace(_UPLOAD_DATE_OF_MOTO, f"{started_at:%Y-%m-%dT%H:%M:%S.000Z}".encode())
        if fault == "response_lost":
            return _disconnect(environ)
        start_response(*response[0])
        return _truncated(data, environ) if fault == "body_truncated" else [data]


_UPLOAD_DATE_OF_MOTO = b"2010-11-10T20:48:33.000Z"  # moto's start date of every upload
_CODES = {403: "AccessDenied", 500: "InternalError", 501: "NotImplemented", 503: "SlowDown", 409: "OperationAborted"}


def _refuse(status, start_response):
    code = _CODES[status]
    start_response(f"{status} {code}", [("Content-Type", "application/xml")])
    return [f"<Error><Code>{code}</Code><Message>a fault set by a test</Message></Error>".encode()]


def _disconnect(environ):
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError


def _truncated(data, environ):
    yield data[: len(data) // 2]
    _disconnect(environ)
