"""POST /v1/chat/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from infervisor.supervisor.http_api.asking import Made, ask
from infervisor.supervisor.http_api.context import Context
from infervisor.supervisor.http_api.endpoints.chat_input import ChatRequest
from infervisor.supervisor.http_api.endpoints.chat_writer import ChatWriter
from infervisor.supervisor.http_api.endpoints.input_model import field_of, parse
from infervisor.supervisor.http_api.guards.body_reading import read_body


def routes(context: Context) -> list[BaseRoute]:
    """Return the route."""

    async def chat(request: Request) -> Response:
        raw = await read_body(request, context.settings)
        asked = parse(ChatRequest, raw, context.settings).asked()
        return ask(request, context, asked, "chatcmpl", _writer, field_of)

    return [Route("/v1/chat/completions", chat, methods=["POST"])]


def _writer(made: Made) -> ChatWriter:
    asked = made.asked
    return ChatWriter(
        made.head,
        asked.n,
        logprobs=bool(asked.options.get("logprobs")),
        include_usage=asked.include_usage,
    )
