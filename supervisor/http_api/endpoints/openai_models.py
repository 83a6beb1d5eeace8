"""GET /v1/models and /v1/models/{model}. Source: OpenAI's API reference, "Models"."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from infervisor import Supervisor
from infervisor.supervisor.http_api.context import Context

FACTS = ("context_tokens", "slots", "has_chat_template")
"""What is told of a model beyond OpenAI's fields, once it is loaded."""


def routes(context: Context) -> list[BaseRoute]:
    """Return the routes."""
    created = int(time.time())

    def shape(name: str, supervisor: Supervisor) -> dict[str, Any]:
        facts = supervisor.status().facts
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "infervisor",
            "x_infervisor": {fact: facts[fact] for fact in FACTS if fact in facts},
        }

    async def models(request: Request) -> Response:
        served = {**dict(context.models.items())}
        for alias, name in context.models.aliases.items():
            served[alias] = served[name]
        data = [shape(name, supervisor) for name, supervisor in served.items()]
        return JSONResponse({"object": "list", "data": data})

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        _, supervisor = context.models.find(name)
        return JSONResponse(shape(name, supervisor))

    return [Route("/v1/models", models), Route("/v1/models/{model:path}", model)]
