"""How large a request's head may be, and which versions of HTTP are spoken.

The server bounds the bytes that it buffers; this counts what came out of them, under any server. Pure but for
the answer. Runs in the task of the request.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from infervisor.supervisor.http_api.errors import HttpRefused

MAX_HEAD_BYTES = 32 << 10
"""Target and headers of one request. Sixteen times what the clients of the field send."""
MAX_HEADERS = 100
VERSIONS = ("1.0", "1.1", "2", "3")


class HeaderLimits:
    """Refuse a head that is too large, with 431, or in no version of HTTP."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on the request, or raise `HttpRefused`."""
        if scope["type"] == "http":
            _check(scope)
        await self._app(scope, receive, send)


def _check(scope: Scope) -> None:
    if scope["http_version"] not in VERSIONS:
        raise HttpRefused(
            "invalid_http", "The service speaks HTTP/1.0 and HTTP/1.1. Send the request in one."
        )
    headers = scope["headers"]
    if len(headers) > MAX_HEADERS:
        raise HttpRefused(
            "headers_too_large", f"The request has {len(headers)} headers; send at most {MAX_HEADERS}."
        )
    target = len(scope.get("raw_path") or scope["path"]) + len(scope["query_string"])
    size = target + sum(len(name) + len(value) for name, value in headers)
    if size > MAX_HEAD_BYTES:
        raise HttpRefused(
            "headers_too_large",
            f"The request's target and headers take {size} bytes; send at most {MAX_HEAD_BYTES}.",
        )
