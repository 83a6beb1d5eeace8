"""Answers that come before the request's body was read to its end.

What is left of the body is in the way of the next request on that connection. A little is read away by the
server; before anything else the connection is closed, but not at once: a client that still sends would see its
connection reset and never read why. So the end waits a moment, while the rest is thrown away. Runs in the task
of the request.
"""

from __future__ import annotations

import anyio
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infervisor.supervisor.http_api.errors import HttpRefused
from infervisor.supervisor.http_api.guards.body_limits import content_length
from infervisor.supervisor.http_api.guards.paths import header_values

LEFT_TO_SERVER_BYTES = 64 << 10
LINGER_S = 1.0
LINGER_BYTES = 32 << 20


class UnreadBodies:
    """Close, in a way that lets the client read the answer, where a body is left."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on the request and watch how much of its body is taken."""
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        has_read = is_whole = closes = False

        async def receiving() -> Message:
            nonlocal has_read, is_whole
            has_read = True
            message = await receive()
            is_whole = is_whole or not message.get("more_body", False)  # a disconnect ends it, too
            return message

        async def sending(message: Message) -> None:
            nonlocal closes
            if (
                message["type"] == "http.response.start"
                and not is_whole
                and (
                    # Who began to read and gave up did so because it was too much, or too slow.
                    has_read or not _is_harmless(scope)
                )
            ):
                closes = True
                if scope["http_version"] in ("1.0", "1.1"):
                    message.setdefault("headers", [])
                    MutableHeaders(scope=message)["Connection"] = "close"
            elif message["type"] == "http.response.body" and closes and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await _throw_away(receiving)
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        await self._app(scope, receiving, sending)


async def _throw_away(receive: Receive) -> None:
    taken = 0
    with anyio.move_on_after(LINGER_S):
        while taken < LINGER_BYTES:
            message = await receive()
            if not message.get("more_body", False):
                return
            taken += len(message.get("body", b""))


def _has_body(scope: Scope) -> bool:
    return bool(header_values(scope, b"transfer-encoding")) or header_values(
        scope, b"content-length"
    ) not in (
        [],
        [b"0"],
    )


def _is_harmless(scope: Scope) -> bool:
    """Say whether the server may read the rest away: it is small, and will surely come."""
    if header_values(scope, b"expect") or header_values(scope, b"transfer-encoding"):
        return False
    try:
        return (content_length(scope) or 0) <= LEFT_TO_SERVER_BYTES
    except HttpRefused:
        return False
