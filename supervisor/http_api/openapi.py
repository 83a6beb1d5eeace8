"""GET /openapi.json: the document of all endpoints, made from the models of their bodies. Source: OpenAPI 3.1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

import infervisor
from infervisor.supervisor.http_api.context import Context
from infervisor.supervisor.http_api.endpoints import output_schemas as out
from infervisor.supervisor.http_api.endpoints.chat_input import ChatRequest
from infervisor.supervisor.http_api.endpoints.completion_input import CompletionRequest
from infervisor.supervisor.http_api.endpoints.embedding_input import EmbeddingsRequest
from infervisor.supervisor.http_api.endpoints.responses_input import ResponseRequest
from infervisor.supervisor.http_api.errors import KINDS
from infervisor.supervisor.http_api.request_headers import (
    CLIENT_ID,
    DEADLINE_HEADERS,
    MAX_CLIENT_ID,
    MAX_SECONDS,
    ON_CRASH,
    PRIORITY,
    REPORT,
)
from infervisor.supervisor.http_api.watching import watching_schemas as watched
from infervisor.supervisor.http_api.watching.worker_api import RecycleRequest, RestartRequest

JSON = "application/json"
REFERENCE = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. event: the data of an event, where it can stream. asks: whether it asks a model."""

    method: str
    path: str
    summary: str
    answer: type[BaseModel] | None
    body: type[BaseModel] | None = None
    status: int = 200
    also: tuple[int, ...] = ()
    event: type[BaseModel] | None = None
    asks: bool = False
    is_open: bool = False
    """Whether it needs no key."""


OPERATIONS: Sequence[Operation] = (
    Operation(
        "post", "/v1/chat/completions", "Answer a chat.", out.ChatCompletion, ChatRequest,
        event=out.ChatCompletionChunk, asks=True,
    ),
    Operation(
        "post", "/v1/completions", "Continue prompts.", out.Completion, CompletionRequest,
        event=out.CompletionChunk, asks=True,
    ),
    Operation(
        "post", "/v1/responses", "Answer.", out.ResponseObject, ResponseRequest, event=out.ResponseEvent, asks=True
    ),
    Operation(
        "post", "/v1/embeddings", "Turn texts into vectors.", out.EmbeddingList, EmbeddingsRequest, asks=True
    ),
    Operation("get", "/v1/models", "List the models.", out.ModelList),
    Operation("get", "/v1/models/{model}", "Tell of one model.", out.ModelOut, also=(404,)),
    Operation("get", "/health/live", "Whether the service answers.", watched.Live, is_open=True),
    Operation("get", "/health/ready", "Whether all models can be asked.", watched.Ready, also=(503,), is_open=True),
    Operation("get", "/metrics", "Metrics for Prometheus.", None),
    Operation("get", "/api/requests", "Requests that run, and the last ones.", watched.RequestList),
    Operation("get", "/api/requests/{id}", "One request.", watched.RequestState, also=(404,)),
    Operation(
        "post", "/api/requests/{id}/cancel", "Stop a request.", watched.Cancelled, status=202, also=(404,)
    ),
    Operation("get", "/api/worker", "The models and their workers.", watched.WorkerState),
    Operation(
        "post", "/api/worker/restart", "Replace workers once their requests are done.", watched.Restarting,
        RestartRequest, status=202, also=(404, 503),
    ),
    Operation(
        "post", "/api/worker/recycle", "Replace workers without a gap.", watched.Recycling, RecycleRequest,
        status=202, also=(404, 503),
    ),
    Operation("get", "/openapi.json", "This document.", out.Document),
)  # fmt: skip


def routes(context: Context) -> list[BaseRoute]:
    """Return the route."""
    made = document()

    async def openapi(request: Request) -> Response:
        root = request.scope.get("root_path", "")
        return JSONResponse({**made, "servers": [{"url": root or "/"}]})

    return [Route("/openapi.json", openapi)]


def document() -> dict[str, Any]:
    """Return the document, without the place where it is served."""
    inputs = [each.body for each in OPERATIONS if each.body is not None]
    outputs = [each.answer for each in OPERATIONS if each.answer is not None]
    events = [each.event for each in OPERATIONS if each.event is not None]
    _, taken = models_json_schema([(model, "validation") for model in inputs], ref_template=REFERENCE)
    answers: list[type[BaseModel]] = [*outputs, *events, out.ErrorBody]
    _, given = models_json_schema([(model, "serialization") for model in answers], ref_template=REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "infervisor", "version": infervisor.__version__},
        "paths": paths,
        "components": {
            "schemas": {**taken["$defs"], **given["$defs"]},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    made: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method}{operation.path}".replace("/", "_")
        .replace("{", "")
        .replace("}", ""),
        "responses": _responses(operation),
        # A key is wanted only where one is set.
        "security": [] if operation.is_open else [{}, {"key": []}],
    }
    parameters = [
        {"name": part[1:-1], "in": "path", "required": True, "schema": {"type": "string"}}
        for part in operation.path.split("/")
        if part.startswith("{")
    ]
    if operation.path == "/api/requests":
        limit = {"type": "integer", "minimum": 1, "maximum": 999_999}
        parameters.append({"name": "limit", "in": "query", "required": False, "schema": limit})
    if operation.asks:
        parameters += _headers()
    if parameters:
        made["parameters"] = parameters
    if operation.body is not None:
        content = {JSON: {"schema": {"$ref": REFERENCE.format(model=operation.body.__name__)}}}
        made["requestBody"] = {"required": True, "content": content}
    return made


def _responses(operation: Operation) -> dict[str, Any]:
    if operation.answer is None:
        success: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        success = {JSON: {"schema": {"$ref": REFERENCE.format(model=operation.answer.__name__)}}}
    if operation.event is not None:
        success["text/event-stream"] = {"schema": _events(operation.event)}
    told = ("X-Infervisor-Report", "X-Infervisor-Ignored") if operation.asks else ()
    made = {str(operation.status): _response("The answer.", success, *told)}
    error = {JSON: {"schema": {"$ref": REFERENCE.format(model=out.ErrorBody.__name__)}}}
    # What guards and the server say of any request.
    statuses = {400, 401, 403, 405, 408, 413, 415, 431, 500, *operation.also}
    if operation.asks:
        statuses |= {kind.status for kind in KINDS.values()}
    for status in sorted(statuses):
        if operation.path == "/health/ready" and status == 503:
            made[str(status)] = _response("The reason.", success, "Retry-After")
            continue
        kinds = {code: kind for code, kind in KINDS.items() if kind.status == status}
        waits = any(kind.retry_after_s is not None for kind in kinds.values())
        headers = ("X-Should-Retry", *(["Retry-After"] if waits else []))
        made[str(status)] = _response(", ".join(sorted(kinds)), error, *headers)
    return made


def _events(event: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of one event of a stream."""
    names = [event.__name__] if event is out.ResponseEvent else [event.__name__, out.ErrorBody.__name__]
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": JSON,
        "contentSchema": {"anyOf": [{"$ref": REFERENCE.format(model=name)} for name in names]},
    }
    if event is not out.ResponseEvent:
        data = {
            "anyOf": [data, {"const": "[DONE]"}],
            "description": "[DONE] after the last one. After an ErrorBody nothing comes.",
        }
    return {
        "type": "object",
        "description": "One of the server-sent events.",
        "properties": {"event": {"type": "string"}, "data": data},
        "required": ["data"],
    }


def _response(text: str, content: dict[str, Any], *headers: str) -> dict[str, Any]:
    """Return one answer. headers: those that it may have."""
    made: dict[str, Any] = {"X-Request-Id": {"required": True, "schema": {"type": "string"}}}
    made |= {name: {"schema": {"type": "string"}} for name in headers}
    return {"description": text, "content": content, "headers": made}


def _headers() -> list[dict[str, Any]]:
    number = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS}
    seconds = {"anyOf": [number, {"const": "none"}], "description": "Seconds."}
    schemas: dict[str, dict[str, Any]] = {
        **dict.fromkeys(DEADLINE_HEADERS, seconds),
        PRIORITY: {"type": "integer", "minimum": -100, "maximum": 100},
        ON_CRASH: {"type": "string", "enum": ["resume", "fail"]},
        REPORT: {"type": "string", "enum": ["body", "header", "off"]},
        CLIENT_ID: {"type": "string", "pattern": "^[!-~]*$", "maxLength": MAX_CLIENT_ID},
    }
    return [
        {"name": name, "in": "header", "required": False, "schema": schema}
        for name, schema in schemas.items()
    ]
