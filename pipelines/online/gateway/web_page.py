"""The web page at `/`: static files in `page/`, sent with a strict content security policy.

The files contain no secrets and need no key. The page calls the API with the user's key.
"""

from pathlib import Path

from starlette.responses import Response

from peagle.errors import shown
from pipelines.online.errors import ApiError

FOLDER = "/page/"
_INDEX = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Browsers that support trusted types refuse `innerHTML` and similar.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def get_page(name: str = _INDEX) -> Response:
    folder = Path(__file__).with_name("page")
    path = next((path for path in folder.iterdir() if path.name == name and path.suffix in _MEDIA_TYPES), None)
    if path is None:
        raise ApiError(404, f"{shown(FOLDER + name)} does not exist", code="not_found")
    return Response(path.read_bytes(), media_type=_MEDIA_TYPES[path.suffix], headers=HEADERS)
