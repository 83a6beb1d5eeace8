"""What answers of /v1 look like: for the OpenAPI document, and for tests that hold real answers against it.

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
    """A whole chat answer. x_infervisor: a report for each choice, if they are wanted there."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    x_infervisor: list[dict[str, Any]] = []


class CalledPiece(ToolCallOut):
    """A call in a stream: whole, as the index-th of its choice."""

    index: int


class ChatDelta(OutputModel):
    """What comes next of an answer."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    tool_calls: list[CalledPiece] = []


class ChatPiece(OutputModel):
    """What comes next of one choice. finish_reason: only in its last one."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatCompletionChunk(OutputModel):
    """The data of one event. choices: none in the one that has the counts, which comes last."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatPiece]
    usage: Usage | None = None
    x_infervisor: list[dict[str, Any]] = []


class CompletionLogprobs(OutputModel):
    """Lists side by side, an entry for each token. text_offset: characters before it."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(OutputModel):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish


class Completion(OutputModel):
    """Whole continuations."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    x_infervisor: list[dict[str, Any]] = []


class CompletionPiece(OutputModel):
    """What comes next of one continuation. finish_reason: only in its last one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None


class CompletionChunk(OutputModel):
    """The data of one event. choices: none in the one that has the counts, which comes last."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionPiece]
    usage: Usage | None = None
    x_infervisor: list[dict[str, Any]] = []


class ResponseObject(OutputModel):
    """An answer of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None


class ResponseEvent(OutputModel):
    """The data of one event. What else is in it depends on its type."""

    type: str
    sequence_number: int


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


class Document(OutputModel):
    """A document of OpenAPI."""

    openapi: Literal["3.1.0"]
    info: dict[str, str]
    servers: list[dict[str, str]]
    paths: dict[str, dict[str, Any]]
    components: dict[str, dict[str, Any]]
