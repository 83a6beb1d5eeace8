"""How many HTTP requests may be in progress at once.

Owns the count. Requests that wait in the supervisor's queue have a place here, too, so this is the bound on
what the service holds at all. Probes are exempt: a full service is healthy. Runs in the event loop's thread.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from infervisor.supervisor.http_api.errors import HttpRefused
from infervisor.supervisor.http_api.guards.paths import is_health


class Places:
    """Refuse with 503 what comes beyond `max_requests`."""

    def __init__(self, app: ASGIApp, max_requests: int) -> None:
        self._app = app
        self._max_requests = max_requests
        self._taken = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on the request, or raise `HttpRefused`."""
        if scope["type"] != "http" or is_health(scope):
            await self._app(scope, receive, send)
            return
        if self._taken >= self._max_requests:
            raise HttpRefused(
                "too_many_requests",
                f"All {self._max_requests} requests that the service takes at once are in progress. Try again.",
            )
        self._taken += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._taken -= 1
