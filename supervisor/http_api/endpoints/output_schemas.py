"""What answers look like: for the OpenAPI document, and for tests that hold real answers against it.

Answers are made in the writers, not from these. Fields that a client need not know may come beside them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Finish = Literal["stop", "length", "tool_calls"]


class OutputModel(BaseModel):
    """A part of an answer."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class ErrorDetail(OutputModel):
    """code: stable. param: the field or header at fault."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(OutputModel):
    """Every answer that isn't a success."""

    error: ErrorDetail


class Usage(OutputModel):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenLogprobs(OutputModel):
    """How probable a token was. bytes: its own, perhaps a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprobs(TokenLogprobs):
    """The token that was chosen, and the most probable ones."""

    top_logprobs: list[TokenLogprobs]


class ChatLogprobs(OutputModel):
    """Of all tokens of a choice."""

    content: list[ChosenLogprobs]


class CalledFunction(OutputModel):
    """arguments: text that holds JSON."""

    name: str
    arguments: str


class ToolCallOut(OutputModel):
    """A function that the model wants to be called."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessageOut(OutputModel):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCallOut] = []


class ChatChoice(OutputModel):
    """One answer."""

    index: int
    message: ChatMessageOut
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(OutputModel):
    """A whole chat answer. x_infervisor: a report for each choice."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    x_infervisor: list[dict[str, Any]] = []


class CompletionChoice(OutputModel):
    """One continuation."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Finish


class Completion(OutputModel):
    """Whole continuations."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ResponseObject(OutputModel):
    """An answer of /v1/responses."""

    id: str
    object: Literal["response"]
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    output: list[dict[str, Any]]


class EmbeddingOut(OutputModel):
    """A vector. embedding: numbers, or 32-bit floats in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(OutputModel):
    """Counts of tokens."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(OutputModel):
    """A vector for each text, in order."""

    object: Literal["list"]
    data: list[EmbeddingOut]
    model: str
    usage: EmbeddingUsage


class ModelOut(OutputModel):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(OutputModel):
    """All names of models."""

    object: Literal["list"]
    data: list[ModelOut]


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
