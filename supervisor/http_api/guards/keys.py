"""API keys: who may use the service.

Owns digests of the keys, never the keys, so that none can be printed by mistake. They are compared in constant
time, against all. Health, the console's page and its files are open: the page asks for a key itself. Runs in
the task of the request.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from infervisor import ConfigurationError
from infervisor.supervisor.http_api.errors import HttpRefused
from infervisor.supervisor.http_api.guards.paths import header_values, is_health, is_page


class KeyCheck:
    """Refuse with 401 what comes without a key, as `Authorization: Bearer` or `x-api-key`.

    Without any key configured everybody is served.
    """

    def __init__(self, app: ASGIApp, api_keys: Iterable[str]) -> None:
        self._app = app
        keys = tuple(api_keys)
        if any(not key.strip() for key in keys):
            raise ConfigurationError("api_keys: one of the keys is empty. Remove it, or give it a value.")
        self._digests = tuple(_digest(key.encode()) for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on the request, or raise `HttpRefused`."""
        if scope["type"] == "http" and self._digests and not (is_health(scope) or is_page(scope)):
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        shown = _shown(scope)
        if any([self._is_known(key) for key in shown]):  # a list: all are looked at, whichever fits
            return
        if shown:
            raise HttpRefused(
                "invalid_api_key",
                "The API key is not one of this service's keys. Check the client's setting.",
                headers={"WWW-Authenticate": 'Bearer realm="infervisor", error="invalid_token"'},
            )
        raise HttpRefused(
            "invalid_api_key",
            "This service needs an API key. Send it as 'Authorization: Bearer KEY'.",
            headers={"WWW-Authenticate": 'Bearer realm="infervisor"'},
        )

    def _is_known(self, key: bytes) -> bool:
        digest = _digest(key)
        fits = False
        for known in self._digests:
            fits |= hmac.compare_digest(digest, known)
        return fits


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _shown(scope: Scope) -> list[bytes]:
    keys = header_values(scope, b"x-api-key")
    for value in header_values(scope, b"authorization"):
        scheme, _, key = value.partition(b" ")
        if scheme.lower() == b"bearer":
            keys.append(key.strip())
    return [key for key in keys if key]
