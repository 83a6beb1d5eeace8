"""GET /api/requests and /api/requests/{id}, POST /api/requests/{id}/cancel: what runs, what ran, a stop."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from infervisor.supervisor.http_api.context import Context
from infervisor.supervisor.http_api.errors import HttpRefused
from infervisor.supervisor.http_api.ledger import Entry


def routes(context: Context) -> list[BaseRoute]:
    """Return the routes."""
    ledger = context.ledger

    def entry_of(request: Request) -> Entry:
        request_id = request.path_params["id"]
        entry = ledger.get(request_id)
        if entry is None:
            raise HttpRefused(
                "request_not_found",
                f"There is no request {request_id[:80]!r}, or it is over for long: "
                f"{context.settings.keep_reports} finished ones are kept (keep_reports).",
                "id",
            )
        return entry

    async def every(request: Request) -> Response:
        most = _limit(request.query_params.get("limit"))
        return JSONResponse(
            {
                "now_ns": time.monotonic_ns(),
                "now_s": time.time(),
                "requests": [entry.to_dict() for entry in _newest(ledger.entries(), most)],
            }
        )

    async def one(request: Request) -> Response:
        return JSONResponse(entry_of(request).to_dict())

    async def cancel(request: Request) -> Response:
        entry = entry_of(request)
        return JSONResponse({"id": entry.id, "cancelled": ledger.cancel(entry.id)}, 202)

    return [
        Route("/api/requests", every),
        Route("/api/requests/{id}", one),
        Route("/api/requests/{id}/cancel", cancel, methods=["POST"]),
    ]


def _newest(entries: list[Entry], most: int | None) -> list[Entry]:
    """Return all that run, and the newest of the others, at most so many in all; newest first."""
    if most is None or len(entries) <= most:
        return entries
    room = most - sum(not entry.is_finished for entry in entries)
    kept: list[Entry] = []
    for entry in entries:
        if not entry.is_finished:
            kept.append(entry)
        elif room > 0:
            kept.append(entry)
            room -= 1
    return kept


def _limit(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 7 and int(text) > 0):
        raise HttpRefused("invalid_request", "limit must be a whole number of requests, at least 1.", "limit")
    return int(text)
