"""Whether a request comes from this machine, and was not sent by some web page in its browser: who may use an endpoint
without keys.

A page of any site can send requests to 127.0.0.1, and where its site's name is made to resolve to 127.0.0.1 (DNS
rebinding) it may read the answers as if they were its own. What it cannot choose are the headers Host and Origin. It
knows ASGI alone.
"""

import ipaddress
import re

from starlette.datastructures import Headers
from starlette.types import Scope

from peagle.errors import shown
from pipelines.online.errors import ApiError

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
