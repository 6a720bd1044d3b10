"""The page at `/`: its files, with headers that confine it to this endpoint.

The files lie in `page/`: plain HTML, CSS and JavaScript modules, without a build step. They hold no secrets, so they
are sent without a key; what they show is asked for with one. It knows starlette, no Ray.
"""

from pathlib import Path

from starlette.responses import Response

from peagle.errors import shown
from pipelines.online.errors import ApiError

FOLDER = "/page/"
_INDEX = "index.html"
_KINDS = {
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
        # No text becomes HTML or code, wherever it came from: browsers that know it refuse `innerHTML` and its like.
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


def page_response(name: str = _INDEX) -> Response:
    """One of the files.

    Raises:
        ApiError: 404, there is none of this name.
    """
    folder = Path(__file__).with_name("page")
    path = next((path for path in folder.iterdir() if path.name == name and path.suffix in _KINDS), None)
    if path is None:
        raise ApiError(404, f"there is no {shown(FOLDER + name)}", code="not_found")
    return Response(path.read_bytes(), media_type=_KINDS[path.suffix], headers=HEADERS)
