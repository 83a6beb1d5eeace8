"""/v1/responses. Nothing is stored, so there is nothing to fetch, delete or cancel there."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from infervisor.supervisor.http_api.asking import Made, ask
from infervisor.supervisor.http_api.context import Context
from infervisor.supervisor.http_api.endpoints.input_model import parse
from infervisor.supervisor.http_api.endpoints.responses_input import ResponseRequest
from infervisor.supervisor.http_api.endpoints.responses_writer import ResponsesWriter
from infervisor.supervisor.http_api.errors import HttpRefused
from infervisor.supervisor.http_api.guards.body_reading import read_body


def routes(context: Context) -> list[BaseRoute]:
    """Return the routes."""

    async def respond(request: Request) -> Response:
        raw = await read_body(request, context.settings)
        asked = parse(ResponseRequest, raw, context.settings).asked()

        def writer(made: Made) -> ResponsesWriter:
            return ResponsesWriter(made.head, asked.repeated)

        return ask(request, context, asked, "resp", writer, asked.field_of)

    stored = "/v1/responses/{response_id}"
    return [
        Route("/v1/responses", respond, methods=["POST"]),
        Route(stored, _refuse, methods=["GET", "DELETE"]),
        Route(f"{stored}/cancel", _refuse, methods=["POST"]),
        Route(f"{stored}/input_items", _refuse, methods=["GET"]),
    ]


async def _refuse(request: Request) -> Response:
    """Answer for a response that was made before, or is being made."""
    raise HttpRefused(
        "not_found",
        "Responses aren't stored here: keep what POST /v1/responses answers. To cancel a running one, close its "
        "connection or use /api/requests.",
        "response_id",
    )
