"""What answers of /health and /api look like: for the OpenAPI document, and for tests. Source: docs/serve.md.

Answers are made where they are asked for, not from these.
"""

from __future__ import annotations

from typing import Any, Literal

from infervisor.supervisor.http_api.endpoints.output_schemas import OutputModel


class Live(OutputModel):
    """The service answers."""

    status: Literal["live"]


class ModelReadiness(OutputModel):
    """reason: what keeps it from being asked."""

    state: str
    reason: str | None


class Ready(OutputModel):
    """Whether all models can be asked."""

    status: Literal["ready", "unready"]
    reason: str | None
    models: dict[str, ModelReadiness]


class ChoiceState(OutputModel):
    """report: see docs/api.md."""

    index: int
    phase: str
    report: dict[str, Any]


class RequestState(OutputModel):
    """A request that asks a model."""

    id: str
    endpoint: str
    model: str
    client_request_id: str | None
    stream: bool
    created_s: float
    finished: bool
    status: int | None
    phase: str
    choices: list[ChoiceState]


class RequestList(OutputModel):
    """Requests that run, and the last ones, newest first. now_ns: on the clock of the reports."""

    now_ns: int
    now_s: float
    requests: list[RequestState]


class Cancelled(OutputModel):
    """cancelled: false if it had ended."""

    id: str
    cancelled: bool


class ModelState(OutputModel):
    """A model and its workers."""

    model: str
    state: str
    problem: str | None
    places: int
    in_flight: int
    tokens_total: int
    workers: list[dict[str, Any]]


class WorkerState(OutputModel):
    """All models and their workers."""

    now_ns: int
    models: list[ModelState]


class Restarting(OutputModel):
    """Models whose workers are being replaced once their requests are done."""

    restarting: list[str]


class Recycling(OutputModel):
    """Models whose workers are being replaced without a gap."""

    recycling: list[str]
