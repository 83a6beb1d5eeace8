"""What a request's head may say about its body, checked before a byte of it is read.

Owns no state. Types, codings and lengths that the service can't take are refused here; the bytes are counted in
`body_reading.py`. Runs in the task of the request.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from infervisor.supervisor.http_api.errors import HttpRefused
from infervisor.supervisor.http_api.guards.body_reading import too_large
from infervisor.supervisor.http_api.guards.paths import header_values

JSON = b"application/json"


class BodyLimits:
    """Refuse bodies that are no JSON (415), too large (413) or framed in two ways (400)."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on the request, or raise `HttpRefused`."""
        if scope["type"] == "http":
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        for expectation in header_values(scope, b"expect"):
            if expectation.lower() != b"100-continue":
                raise HttpRefused("invalid_http", "The service knows no expectation but 100-continue.")
        length = content_length(scope)
        is_chunked = bool(header_values(scope, b"transfer-encoding"))
        if is_chunked and length is not None:
            # What one server takes for the body is the next request to another one in front of it.
            raise HttpRefused("invalid_http", "Send Content-Length or Transfer-Encoding, not both.")
        if length is not None and length > self._max_body_bytes:
            raise too_large(self._max_body_bytes)
        if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            _check_type(scope, has_body=is_chunked or bool(length))


def content_length(scope: Scope) -> int | None:
    """Return the length that the head declares; None if it declares none.

    Raises:
        HttpRefused: It is no number, or there are several.
    """
    lengths = set(header_values(scope, b"content-length"))
    if not lengths:
        return None
    text = lengths.pop()
    if lengths or not text.isdigit() or len(text) > 20:
        raise HttpRefused("invalid_http", "Content-Length is not one number of bytes.")
    return int(text)


def _check_type(scope: Scope, has_body: bool) -> None:
    codings = b",".join(header_values(scope, b"content-encoding")).strip().lower()
    if codings not in (b"", b"identity"):
        raise HttpRefused("unsupported_media_type", "Compressed bodies are not taken. Send it as it is.")
    types = header_values(scope, b"content-type")
    if not types and not has_body:
        return
    if len(types) != 1 or not _is_json(types[0]):
        raise HttpRefused(
            "unsupported_media_type",
            "The body must be JSON in UTF-8. Send it as 'Content-Type: application/json'.",
        )


def _is_json(content_type: bytes) -> bool:
    media_type, *parameters = (part.strip().lower() for part in content_type.split(b";"))
    if media_type != JSON:
        return False
    for parameter in parameters:
        name, _, value = parameter.partition(b"=")
        if name.strip() == b"charset" and value.strip().strip(b'"') not in (b"utf-8", b"utf8", b"us-ascii"):
            return False
    return True
