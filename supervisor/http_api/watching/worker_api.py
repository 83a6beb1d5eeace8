"""GET /api/worker, POST /api/worker/restart and /api/worker/recycle: the processes behind the models.

Restarting and recycling go on by themselves: they are asked for, and answered at once.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import anyio
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from infervisor import Supervisor
from infervisor.supervisor.http_api.context import Context
from infervisor.supervisor.http_api.endpoints.input_model import InputModel, parse
from infervisor.supervisor.http_api.guards.body_reading import read_body

MAX_SECONDS = 365 * 86400


class RestartRequest(InputModel):
    """Which model's workers: all of them if none is named."""

    model: str | None = None


class RecycleRequest(InputModel):
    """Which model's workers, and how long what runs in them may take before it goes on in the next one."""

    model: str | None = None
    grace_s: float | None = Field(default=None, ge=0, le=MAX_SECONDS)


def routes(context: Context) -> list[BaseRoute]:
    """Return the routes."""

    def meant(model: str | None) -> dict[str, Supervisor]:
        return dict(context.models.items()) if model is None else dict([context.models.find(model)])

    async def state(request: Request) -> Response:
        models = [_model(name, each, context.ledger.tokens(name)) for name, each in context.models.items()]
        return JSONResponse({"now_ns": time.monotonic_ns(), "models": models})

    async def restart(request: Request) -> Response:
        wanted = parse(RestartRequest, await read_body(request, context.settings), context.settings)
        supervisors = meant(wanted.model)
        for supervisor in supervisors.values():
            supervisor.restart_worker()
        return JSONResponse({"restarting": list(supervisors)}, 202)

    async def recycle(request: Request) -> Response:
        wanted = parse(RecycleRequest, await read_body(request, context.settings), context.settings)
        supervisors = meant(wanted.model)
        for supervisor in supervisors.values():
            # It is safe to cancel: the replacement goes on without anybody who waits for it. What may keep the next
            # workers from starting is in the log, and in the state as the problem.
            with anyio.move_on_after(0):
                await supervisor.recycle(wanted.grace_s)
        return JSONResponse({"recycling": list(supervisors)}, 202)

    return [
        Route("/api/worker", state),
        Route("/api/worker/restart", restart, methods=["POST"]),
        Route("/api/worker/recycle", recycle, methods=["POST"]),
    ]


def _model(name: str, supervisor: Supervisor, tokens_total: int) -> dict[str, Any]:
    status = supervisor.status()
    loading = status.loading
    return {
        "model": name,
        "state": status.slot,
        "problem": status.problem,
        "loading": None if loading is None else {"phase": loading[0], "fraction": loading[1]},
        "places": status.places,
        "queue": {"depth": status.queue_depth, "peak": status.queue_peak},
        "in_flight": status.in_flight,
        "restarts": {str(cause): count for cause, count in status.restarts.items()},
        "tokens_total": tokens_total,
        "facts": dict(status.facts),
        "versions": dict(status.versions),
        "snapshot_bytes": status.snapshot_bytes,
        "peak_rss_bytes": status.peak_rss_bytes,
        "workers": [
            {
                "pid": worker.pid,
                "phase": worker.phase,
                "role": worker.role,
                "in_flight": worker.in_flight,
                "submits": worker.submits,
                **({} if worker.sample is None else _plain(asdict(worker.sample))),
            }
            for worker in status.workers
        ],
    }


def _plain(sample: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in sample.items() if key.endswith(("_bytes", "_s"))}
