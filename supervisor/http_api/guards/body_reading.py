"""Reading a request's body: as much as is allowed, in the time that is allowed.

Owns nothing. Never parses. Runs in the task of the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
from starlette.requests import Request
from starlette.types import Receive

from infervisor.supervisor.http_api.errors import HttpRefused

if TYPE_CHECKING:
    from infervisor.supervisor.http_api.settings import HttpSettings


class ClientLeft(Exception):
    """The client closed its connection before its request was whole. There is nobody to answer."""


async def read_body(request: Request, settings: HttpSettings) -> bytes:
    """Return the request's whole body.

    Raises:
        HttpRefused: It is larger than `max_body_bytes`, or takes longer than `body_timeout_s`.
        ClientLeft: The connection ended before the body did.
    """
    with anyio.move_on_after(settings.body_timeout_s):
        return await _read(request.receive, settings.max_body_bytes)
    raise HttpRefused(
        "request_timeout",
        f"The request's body was not complete after {settings.body_timeout_s:g} s. Send it faster, or less of it.",
    )


async def _read(receive: Receive, max_body_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > max_body_bytes:
            raise too_large(max_body_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def too_large(max_body_bytes: int) -> HttpRefused:
    """Return the refusal of a body beyond the limit."""
    return HttpRefused(
        "body_too_large",
        f"The request's body is larger than {max_body_bytes} bytes (max_body_bytes). Send less.",
    )
