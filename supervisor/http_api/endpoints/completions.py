"""POST /v1/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from infervisor.supervisor.http_api.asking import Made, ask
from infervisor.supervisor.http_api.context import Context
from infervisor.supervisor.http_api.endpoints.completion_input import CompletionRequest
from infervisor.supervisor.http_api.endpoints.completion_writer import CompletionWriter
from infervisor.supervisor.http_api.endpoints.input_model import field_of, parse
from infervisor.supervisor.http_api.guards.body_reading import read_body


def routes(context: Context) -> list[BaseRoute]:
    """Return the route."""

    async def complete(request: Request) -> Response:
        raw = await read_body(request, context.settings)
        asked = parse(CompletionRequest, raw, context.settings).asked()
        return ask(request, context, asked, "cmpl", _writer, field_of)

    return [Route("/v1/completions", complete, methods=["POST"])]


def _writer(made: Made) -> CompletionWriter:
    asked = made.asked
    return CompletionWriter(
        made.head,
        asked.n,
        echoes=asked.prompts if asked.echo else (),
        logprobs=bool(asked.options.get("logprobs")),
        include_usage=asked.include_usage,
    )
