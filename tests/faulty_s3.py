"""An S3 server in a thread (moto's), whose requests can be made to fail in the ways that real ones do.

Requests are done one at a time: moto looks for a name and takes it in two steps.
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
    """The server, and the requests that it had.

    Attributes:
        requests: of each its method and its path.
        is_simple: whether it knows no conditional writes.
        upload_age_s: how long ago uploads began that are not whole, as a listing has it.
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
        """No object, no fault."""
        with self._lock:
            for account in get_backend("s3").values():
                for backend in account.values():
                    backend.reset()
            self.requests = []
            self.is_simple = False
            self.upload_age_s = 0.0
            self._faults = []

    def reset_faults(self):
        """No fault from now on."""
        with self._lock:
            self._faults = []

    def fail(self, how, *, method="", path="", times=1):
        """Let the next requests fail.

        Args:
            how: a status; cut: the connection ends before anything is done; lost: after it; half: within the answer.
            method, path: of the requests that fail, or parts of these; all by default.
        """
        self._add(how, lambda m, p: method in m and path in p, times)

    def fail_often(self, share, seed):
        """Let requests fail by chance from now on, in all ways."""
        chance = random.Random(seed)
        for how in (500, 503, "cut", "lost"):
            self._add(how, lambda m, p: chance.random() < share / 4, float("inf"))

    def count(self, method, path=""):
        """The number of requests that it had of a kind."""
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
        # Read before the lock is taken: a client may be stopped in the middle of its request.
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
        with self._lock:
            method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
            self.requests.append((method, path))
            fault = self._take_fault(method, path)
            if self.is_simple:
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
