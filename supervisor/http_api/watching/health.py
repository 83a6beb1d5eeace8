"""GET /health/live and /health/ready: for process managers and load balancers. They never wait, and need no key."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from infervisor import Status
from infervisor.supervisor.http_api.context import Context

RETRY_AFTER_S = 1


def routes(context: Context) -> list[BaseRoute]:
    """Return the routes."""

    async def live(request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(request: Request) -> Response:
        told = readiness(context)
        if told["status"] == "ready":
            return JSONResponse(told)
        return JSONResponse(told, 503, {"Retry-After": str(RETRY_AFTER_S)})

    return [Route("/health/live", live), Route("/health/ready", ready)]


def readiness(context: Context) -> dict[str, Any]:
    """Return whether every model can be asked now, and what keeps those that can't."""
    models = {name: _model(supervisor.status()) for name, supervisor in context.models.items()}
    waiting = [f"{name}: {told['reason']}" for name, told in models.items() if told["reason"] is not None]
    if context.ledger.is_draining:
        waiting.insert(0, "the service is shutting down")
    return {
        "status": "unready" if waiting else "ready",
        "reason": "; ".join(waiting) or None,
        "models": models,
    }


def _model(status: Status) -> dict[str, Any]:
    is_ready = any(worker.role == "serving" and worker.phase == "ready" for worker in status.workers)
    return {"state": status.slot, "reason": None if is_ready else _reason(status)}


def _reason(status: Status) -> str:
    if status.loading is not None:
        phase, fraction = status.loading
        loading = f"{phase.replace('_', ' ')}, {fraction:.0%}"
        return f"{status.problem}; the next worker is at: {loading}" if status.problem else loading
    return status.problem or "no worker is ready yet"
