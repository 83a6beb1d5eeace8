"""POST /v1/embeddings. Source: OpenAI's API reference, "Embeddings"."""

from __future__ import annotations

import base64
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from infervisor import EmbeddingRequest, Embeddings, EndReason, InfervisorError, InvalidRequest
from infervisor.supervisor.http_api import sse
from infervisor.supervisor.http_api.asking import model_of, options_of, request_id_of
from infervisor.supervisor.http_api.context import Context
from infervisor.supervisor.http_api.endpoints.embedding_input import EmbeddingsRequest
from infervisor.supervisor.http_api.endpoints.input_model import field_of, parse
from infervisor.supervisor.http_api.errors import HttpRefused, error_answer, name_as_body
from infervisor.supervisor.http_api.guards.body_reading import read_body
from infervisor.supervisor.http_api.ledger import Entry
from infervisor.supervisor.http_api.request_headers import ReportPlace, wishes_of

UNREAD_S = 30.0
"""How long an answer may wait for a client that doesn't read the one before it."""


def routes(context: Context) -> list[BaseRoute]:
    """Return the route."""

    async def embed(request: Request) -> Response:
        raw = await read_body(request, context.settings)
        wanted = parse(EmbeddingsRequest, raw, context.settings)
        model, supervisor, _ = model_of(context, wanted.model, generates=False)
        wishes = wishes_of(request.headers, supervisor.deadlines)
        try:
            stream = supervisor.embedding_request(wanted.texts(), **options_of({}, wishes))
        except InvalidRequest as error:
            name_as_body(error, field_of)
            raise
        entry = Entry(
            request_id_of(request),
            request.scope["path"],
            model,
            [stream],
            client_request_id=wishes.client_id,
        )
        place = wishes.report or context.settings.report
        return _Embedding(entry, stream, wanted, context, place)

    return [Route("/v1/embeddings", embed, methods=["POST"])]


class _Embedding(Response):
    """An answer of vectors. A client that leaves cancels them at once."""

    def __init__(
        self,
        entry: Entry,
        stream: EmbeddingRequest,
        wanted: EmbeddingsRequest,
        context: Context,
        place: ReportPlace,
    ) -> None:
        self._entry = entry
        self._stream = stream
        self._wanted = wanted
        self._context = context
        self._place = place
        self._has_left = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client leaves."""
        ledger = self._context.ledger
        answer: Response | None = None
        try:
            ledger.add(self._entry)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch_client, receive)
                try:
                    answer = self._answer(await self._stream.embeddings())
                except InfervisorError as error:
                    if isinstance(error, InvalidRequest):
                        name_as_body(error, field_of)
                    answer = error_answer(error, request_id=self._entry.id, report=self._report("body"))
                tasks.cancel_scope.cancel()
            if answer is not None and not self._has_left:
                self._entry.status = answer.status_code
                with anyio.move_on_after(UNREAD_S) as bound:
                    await answer(scope, receive, send)
                abort = scope.get("state", {}).get("abort_connection")
                if bound.cancelled_caught and abort is not None:
                    abort()
        finally:
            ledger.finished(self._entry)

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._has_left = True
        self._stream.cancel(EndReason.CLIENT_DISCONNECTED)

    def _answer(self, made: Embeddings) -> Response:
        wanted = self._wanted
        if wanted.dimensions is not None and wanted.dimensions != made.dimensions:
            raise HttpRefused(
                "invalid_request",
                f"The model's vectors have {made.dimensions} dimensions, and can't be cut to "
                f"{wanted.dimensions}: leave dimensions out.",
                "dimensions",
            )
        tokens = made.report.usage.prompt_tokens
        body: dict[str, Any] = {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": base64.b64encode(vector.tobytes()).decode()
                    if wanted.encoding_format == "base64"
                    else list(vector),
                }
                for index, vector in enumerate(made.vectors)
            ],
            "model": self._entry.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        report = self._report("body")
        if report is not None:
            body["x_infervisor"] = report
        headers = {}
        if self._place == "header":
            headers["X-Infervisor-Report"] = sse.dumps(self._report("header")).decode("ascii")
        return Response(sse.dumps(body), 200, headers, "application/json")

    def _report(self, place: str) -> list[dict[str, Any]] | None:
        return [self._stream.report.to_dict()] if self._place == place else None
