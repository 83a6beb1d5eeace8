"""Not written yet."""

from __future__ import annotations

from starlette.routing import BaseRoute

from infervisor.supervisor.http_api.context import Context


def routes(context: Context) -> list[BaseRoute]:
    """Return the routes."""
    return []
