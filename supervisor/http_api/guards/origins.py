"""Which web pages may speak to the service: its own, and those of listed origins.

A browser sends requests for any page. It says for which: in `Origin`, and in `Sec-Fetch-Site` also for what it
fetches without one, as images. What comes from a page that is neither is refused before it does anything, read
or not. Programs send neither header. Runs in the task of the request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from infervisor import ConfigurationError
from infervisor.supervisor.http_api.errors import HttpRefused
from infervisor.supervisor.http_api.guards.hosts import parse_authority
from infervisor.supervisor.http_api.guards.paths import header_values

_ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<authority>[^/?#@]+)")
_DEFAULT_PORTS = {"http": 80, "https": 443}
EXPOSED_HEADERS = (
    "X-Request-Id", "X-Infervisor-Report", "X-Infervisor-Ignored", "Retry-After", "X-Should-Retry",
)  # fmt: skip


class OriginCheck:
    """Refuse with 403 what a foreign page sends."""

    def __init__(self, app: ASGIApp, listed: Iterable[str]) -> None:
        """Take origins as `https://app.example`, with a port where it isn't the scheme's own."""
        self._app = app
        self._listed = frozenset(_checked(origin) for origin in listed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on the request, or raise `HttpRefused`."""
        if scope["type"] == "http":
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        origins = [value.decode("latin-1").lower() for value in header_values(scope, b"origin")]
        if len(origins) > 1:
            raise HttpRefused("forbidden_origin", "The request has several Origin headers.")
        if origins:
            if origins[0] in self._listed or _is_own(origins[0], header_values(scope, b"host")):
                return
            raise HttpRefused(
                "forbidden_origin",
                f"Pages of {origins[0][:200]!r} may not use this service. If they should, list it in cors_origins.",
            )
        sites = {value.lower() for value in header_values(scope, b"sec-fetch-site")}
        if sites & {b"cross-site", b"same-site"} and not _is_navigation(scope):
            raise HttpRefused(
                "forbidden_origin",
                "A page of another origin may not load from this service. If it should, list its origin in "
                "cors_origins and let it use CORS.",
            )


def cross_origin(app: ASGIApp, listed: Iterable[str]) -> ASGIApp:
    """Return the application with preflights answered, and its answers readable, for the listed origins."""
    origins = [origin.lower() for origin in listed]
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        # Mirrored: the clients of the field send headers of their own, and the origin is trusted.
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=EXPOSED_HEADERS,
    )


def _checked(origin: str) -> str:
    match = _ORIGIN.fullmatch(origin.lower())
    if match is None or parse_authority(match["authority"]) is None:
        raise ConfigurationError(
            f"cors_origins: {origin!r} is no origin. Give scheme, host and port alone, as https://app.example."
        )
    return origin.lower()


def _is_own(origin: str, hosts: list[bytes]) -> bool:
    """Say whether a page of this origin came from the host that is addressed.

    The scheme isn't compared: in front of the service something else may speak TLS.
    """
    match = _ORIGIN.fullmatch(origin)
    if match is None or len(hosts) != 1:
        return False
    page, host = parse_authority(match["authority"]), parse_authority(hosts[0].decode("latin-1"))
    if page is None or host is None or page.name != host.name:
        return False
    default = _DEFAULT_PORTS.get(match["scheme"])
    return (page.port or default) == (host.port or default)


def _is_navigation(scope: Scope) -> bool:
    """Say whether somebody followed a link to here: the page that had it can't read the answer."""
    return (
        scope["method"] in ("GET", "HEAD")
        and header_values(scope, b"sec-fetch-mode") == [b"navigate"]
        and header_values(scope, b"sec-fetch-dest") == [b"document"]
    )
