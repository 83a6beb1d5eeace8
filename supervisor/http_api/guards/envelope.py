"""What every answer carries, whoever gives it: the request's id, and headers that bind browsers.

Owns the id of an HTTP request, from `scope["state"]["request_id"]` to `X-Request-Id`, and the headers against
sniffing, framing and caching. Never looks at bodies and never refuses anything. Runs in the task of the request.
"""

from __future__ import annotations

import secrets

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infervisor.supervisor.http_api.guards.paths import is_page

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
ANSWER_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
ANSWER_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def new_request_id() -> str:
    """Return an id that nobody can guess: whoever knows one may cancel the request."""
    return f"req-{secrets.token_urlsafe(16)}"


class Envelope:
    """Give each request an id and each answer its headers; what the answer says itself is kept."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on the request. A websocket is refused: the service has none."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "this service has no websockets"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id
        of_page = is_page(scope)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message.setdefault("headers", [])
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                for name, value in ANSWER_HEADERS.items():
                    headers[name] = value
                headers["Content-Security-Policy"] = PAGE_POLICY if of_page else ANSWER_POLICY
                if not of_page:
                    headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self._app(scope, receive, sending)
