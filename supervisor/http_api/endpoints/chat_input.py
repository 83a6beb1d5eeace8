"""The body of /v1/chat/completions. Source: OpenAI's API reference, "Chat Completions"."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from infervisor.supervisor.http_api.asked import Asked
from infervisor.supervisor.http_api.endpoints.input_model import InputModel
from infervisor.supervisor.http_api.errors import HttpRefused

Seed = Annotated[int, Field(ge=0, lt=1 << 32)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
MaxTokens = Annotated[int, Field(ge=-1, lt=1 << 63, description="At least 1; -1 and null are no limit.")]


class StreamOptions(InputModel):
    """include_usage: counts in an event of their own, before the end."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingRequest(InputModel):
    """What all requests for text have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: str | list[str] | None = None
    seed: Seed | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    # What llama.cpp has beyond OpenAI.
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    ignore_eos: bool | None = None
    # Accepted, and without a meaning here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    cache_prompt: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the options of the library. What is left out means what OpenAI's reference says."""
        options: dict[str, Any] = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
        }
        same = (
            "stop", "seed", "frequency_penalty", "presence_penalty", "top_k", "min_p", "typical_p",
            "repeat_penalty", "repeat_last_n", "grammar", "json_schema", "ignore_eos",
        )  # fmt: skip
        for name in same:
            value = getattr(self, name)
            if value is not None:
                options[name] = value
        if self.temperature is not None or self.top_p is not None or self.top_k is None:
            # OpenAI's sampling cuts nothing off but what top_p says.
            options.setdefault("top_k", 0)
            options.setdefault("min_p", 0.0)
        if self.logit_bias is not None:
            options["logit_bias"] = {_token(name): value for name, value in self.logit_bias.items()}
        return options


def _token(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 10):
        raise HttpRefused(
            "invalid_request",
            f'logit_bias has the name {name[:40]!r}: names are the ids of tokens, such as "42".',
            "logit_bias",
        )
    return int(name)


def limit(*given: int | None, name: str) -> int | None:
    """Return the one limit that is given. Raises `HttpRefused` if two differ."""
    limits = {value for value in given if value is not None}
    if len(limits) > 1:
        raise HttpRefused(
            "invalid_request", "max_tokens and max_completion_tokens differ: send only one of them.", name
        )
    value = limits.pop() if limits else None
    if value == 0:
        raise HttpRefused("invalid_request", f"{name} must be at least 1, or -1 for no limit, not 0.", name)
    return None if value == -1 else value


class Message(InputModel):
    """A message. Its content is checked further by what takes it."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None


class Function(InputModel):
    """A function that the model may call. parameters: a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(InputModel):
    """A tool. Only functions are known."""

    type: Literal["function"]
    function: Function


class NamedFunction(InputModel):
    """A function by its name."""

    name: str


class NamedTool(InputModel):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ResponseFormat(InputModel):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class ChatRequest(SamplingRequest):
    """A chat to be answered."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None

    def asked(self) -> Asked:
        """Return what it comes down to. Raises `HttpRefused`."""
        options = self.sampling()
        options["max_tokens"] = limit(self.max_tokens, self.max_completion_tokens, name="max_tokens")
        if self.logprobs is not None:
            options["logprobs"] = self.logprobs
        if self.top_logprobs is not None:
            options["top_logprobs"] = self.top_logprobs
        for name in ("response_format", "tools", "tool_choice"):
            if getattr(self, name) is not None:
                options[name] = self.raw[name]
        return Asked(
            model=self.model,
            messages=tuple(_message(message) for message in self.raw["messages"]),
            n=self.n or 1,
            options=options,
            stream=bool(self.stream),
            include_usage=bool(self.stream_options and self.stream_options.include_usage),
            warnings=self.ignored,
        )


def _message(message: dict[str, Any]) -> dict[str, Any]:
    # Templates know no developer: it is OpenAI's later word for system.
    return {**message, "role": "system"} if message["role"] == "developer" else message
