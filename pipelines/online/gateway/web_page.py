"""The web page at `/` (static files in `page/`) and the API's documentation at `/docs` (Swagger UI).

The files contain no secrets, so they need no key. No file is loaded from another host.
"""

import importlib.resources
from pathlib import Path

from starlette.responses import Response

from peagle.errors import shown
from pipelines.online.errors import ApiError

FOLDER = "/page/"
DOCS = "/docs"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Browsers that support trusted types refuse `innerHTML` and similar.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
# Swagger UI writes styles into the document.
_DOCS_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def get_page(name: str = "index.html") -> Response:
    folder = Path(__file__).with_name("page")
    path = next((path for path in folder.iterdir() if path.name == name and path.suffix in _MEDIA_TYPES), None)
    if path is None:
        raise ApiError(404, f"{shown(FOLDER + name)} does not exist", code="not_found")
    return Response(path.read_bytes(), media_type=_MEDIA_TYPES[path.suffix], headers=HEADERS)


def get_docs(name: str | None = None) -> Response:
    """Return the documentation page, or the file of Swagger UI with this name."""
    headers = {**HEADERS, "content-security-policy": _DOCS_POLICY}
    if name is None:
        page = Path(__file__).with_name("page") / "docs.html"
        return Response(page.read_bytes(), media_type=_MEDIA_TYPES[".html"], headers=headers)
    static = importlib.resources.files("fastapi_offline") / "static"
    file = next((file for file in static.iterdir() if file.name == name and name.startswith("swagger-ui")), None)
    if file is None:
        raise ApiError(404, f"{shown(f'{DOCS}/{name}')} does not exist", code="not_found")
    return Response(file.read_bytes(), media_type=_MEDIA_TYPES[Path(name).suffix], headers=headers)
