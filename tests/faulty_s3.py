"""An S3 server in a thread (moto's), whose requests can fail in the ways that real ones do.

Requests run one at a time, because moto's check and use of a name are not atomic.
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
    how: str | int
    wanted: Callable[[str, str], bool]
    times: float


class FaultyS3:
    """The server, and its requests.

    Attributes:
        requests: method and path of each.
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

    def fail(self, how, *, method="", path="", times=1):
        """Let the next requests fail.

        Args:
            how: a status; cut: the connection ends before the operation; lost: after it; half: within the answer.
            method, path: parts of those of the requests that fail; all by default.
        """
        self._add(how, lambda m, p: method in m and path in p, times)

    def fail_often(self, share, seed):
        """Let random requests fail from now on, in all ways."""
        chance = random.Random(seed)
        for how in (500, 503, "cut", "lost"):
            self._add(how, lambda m, p: chance.random() < share / 4, float("inf"))

    def count(self, method, path=""):
        """Return how many requests of a kind there were."""
        return sum(method == m and path in p for m, p in self.requests)

    def _add(self, how, wanted, times):
        with self._lock:
            self._faults.append(_Fault(how, wanted, times))

    def _take_fault(self, method, path):
        for fault in self._faults:
            if fault.times > 0 and fault.wanted(method, path):
                fault.times -= 1
                return fault.how
        return None

    def _serve(self, environ, start_response):
        # Read before taking the lock: a client may be stopped in the middle of its request.
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
        with self._lock:
            method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
            self.requests.append((method, path))
            fault = self._take_fault(method, path)
            if self.ignores_conditions:
                environ.pop("HTTP_IF_NONE_MATCH", None)
            if fault == "cut":
                return _hang_up(environ)
            if isinstance(fault, int):
                return _refuse(fault, start_response)
            answer = []
            data = b"".join(self._app(environ, lambda status, headers, *_: answer.append((status, headers))))
            if "uploads" in environ.get("QUERY_STRING", ""):
                began_at = datetime.now(UTC) - timedelta(seconds=self.upload_age_s)
                data = data.replace(_MOTOS_DATE, f"{began_at:%Y-%m-%dT%H:%M:%S.000Z}".encode())
        if fault == "lost":
            return _hang_up(environ)
        start_response(*answer[0])
        return _half(data, environ) if fault == "half" else [data]


_MOTOS_DATE = b"2010-11-10T20:48:33.000Z"  # of every upload
_CODES = {403: "AccessDenied", 500: "InternalError", 501: "NotImplemented", 503: "SlowDown", 409: "OperationAborted"}


def _refuse(status, start_response):
    code = _CODES[status]
    start_response(f"{status} {code}", [("Content-Type", "application/xml")])
    return [f"<Error><Code>{code}</Code><Message>by request of a test</Message></Error>".encode()]


def _hang_up(environ):
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError


def _half(data, environ):
    yield data[: len(data) // 2]
    _hang_up(environ)
