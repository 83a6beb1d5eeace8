"""The body of /v1/chat/completions. Source: OpenAI's API reference, "Chat Completions".

What the service can't do is refused with what to do instead; what changes nothing here is accepted. Pure.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from infervisor.supervisor.http_api.asked import Asked
from infervisor.supervisor.http_api.endpoints.chat_messages import Message, for_template
from infervisor.supervisor.http_api.endpoints.input_model import InputModel, only
from infervisor.supervisor.http_api.endpoints.sampling_input import (
    MaxTokens,
    ResponseFormat,
    SamplingRequest,
    no_limit_is_none,
)
from infervisor.supervisor.http_api.endpoints.tool_choice import BY_KIND, CHECKED, ByName, Word
from infervisor.supervisor.http_api.errors import HttpRefused

MAX_MESSAGES = 10_000
MAX_TOOLS = 128

NO_REASONING = "How much a model reasons isn't steered here: leave it out."
ONLY_TEXT = "Answers are text here: leave it out."
OLD_FUNCTIONS = "It is an old form. Send tools and tool_choice."


class Function(InputModel):
    """A function that the model may call. parameters: a JSON schema."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def _is_function(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") != "function":
        raise PydanticCustomError(
            "tool_kind",
            "Only tools of type function are taken. Offer a function, and carry out its calls yourself.",
        )
    return value


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


ToolChoice = Annotated[Word | Annotated[NamedTool, ByName], BY_KIND, CHECKED]


def _is_text_alone(value: Any) -> Any:
    if value != ["text"]:
        raise PydanticCustomError("modalities", ONLY_TEXT)
    return value


class ChatRequest(SamplingRequest):
    """A chat to be answered."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: (
        Annotated[list[Annotated[Tool, BeforeValidator(_is_function)]], Field(max_length=MAX_TOOLS)] | None
    ) = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    # What the client would wait for in vain.
    modalities: (
        Annotated[list[Literal["text"]], BeforeValidator(_is_text_alone), Field(min_length=1, max_length=1)]
        | None
    ) = None
    audio: Annotated[None, only(why=ONLY_TEXT)] = None
    functions: Annotated[None, only(why=OLD_FUNCTIONS)] = None
    function_call: Annotated[None, only(why=OLD_FUNCTIONS)] = None
    prediction: Annotated[None, only(why="Predicted output isn't used here: leave it out.")] = None
    web_search_options: Annotated[
        None, only(why="There is no search here. Offer a function as a tool, and search yourself.")
    ] = None
    reasoning_effort: Annotated[Literal["none"] | None, only("none", why=NO_REASONING)] = None
    verbosity: Annotated[
        Literal["medium"] | None,
        only("medium", why="How much a model says isn't steered here: leave it out."),
    ] = None
    moderation: Annotated[None, only(why="There is no moderation here: leave it out.")] = None

    def asked(self) -> Asked:
        """Return what it comes down to. Raises `HttpRefused`."""
        options = self.sampling()
        options["max_tokens"] = self._limit()
        for name in ("logprobs", "top_logprobs"):
            if getattr(self, name) is not None:
                options[name] = getattr(self, name)
        for name in ("response_format", "tools", "tool_choice"):
            if getattr(self, name) is not None:
                options[name] = self.raw[name]
        return Asked(
            model=self.model,
            messages=tuple(for_template(message) for message in self.raw["messages"]),
            n=self.n or 1,
            options=options,
            stream=bool(self.stream),
            include_usage=bool(self.stream_options and self.stream_options.include_usage),
            warnings=self.ignored,
        )

    def _limit(self) -> int | None:
        """Return the limit, which goes by two names."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise HttpRefused(
                "invalid_request",
                "max_tokens and max_completion_tokens differ: send only one of them.",
                "max_completion_tokens",
            )
        return no_limit_is_none(old if new is None else new)
