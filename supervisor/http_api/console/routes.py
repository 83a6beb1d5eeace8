"""The console: one page at `/` and its files, for people. It asks the same API as everybody else.

The files are a fixed table that is read once; no path of a request is ever looked for on a disk.
"""

from __future__ import annotations

import hashlib
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from infervisor.supervisor.http_api.context import Context

_TYPES = {"html": "text/html; charset=utf-8", "css": "text/css", "js": "text/javascript"}
PAGE = "index.html"
FILES = (
    "api.js", "chat.js", "console.css", "console.js", "event_stream.js", "icon.svg", "requests.js", "waterfall.js",
    "worker.js",
)  # fmt: skip


def routes(context: Context) -> list[BaseRoute]:
    """Return the routes of the page and of each of its files."""
    return [_route("/", PAGE), *(_route(f"/console/{name}", name) for name in FILES)]


def _route(path: str, name: str) -> Route:
    body = resources.files("infervisor.supervisor.http_api.console").joinpath(name).read_bytes()
    kind = "image/svg+xml" if name.endswith(".svg") else _TYPES[name.rpartition(".")[2]]
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    # Asked for again each time: a service of another version has other files under the same names.
    headers = {"ETag": tag, "Cache-Control": "no-cache"}

    async def file(request: Request) -> Response:
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=kind, headers=headers)

    return Route(path, file)
