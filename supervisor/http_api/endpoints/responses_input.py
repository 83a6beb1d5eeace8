"""The body of /v1/responses, and what it comes down to.

Pure. What the service can't do is refused with what to do instead; what changes nothing here is accepted. Source:
OpenAI's API reference, "Responses".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from infervisor.supervisor.http_api.asked import Asked
from infervisor.supervisor.http_api.endpoints.input_model import InputModel, only
from infervisor.supervisor.http_api.endpoints.responses_form import TextForm, Tool, ToolChoice, choice_of_chat
from infervisor.supervisor.http_api.endpoints.responses_items import Item, messages_of

LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs",
    # Of what is never in an answer of this service; so nothing is left out.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
Key = Annotated[str, StringConstraints(max_length=64)]
Value = Annotated[str, StringConstraints(max_length=512)]
Items = Annotated[list[Item], Field(min_length=1)]

NO_REASONING = "A model's reasoning isn't steered or told apart here: leave it out, or set it to null."

FIELDS = (
    # What only a worker can refuse, it names as it has it.
    (re.compile(r"(messages|prompt)\b.*"), "input"),
    (re.compile(r"json_schema\b"), "text.format"),
    (re.compile(r"max_tokens\b"), "max_output_tokens"),
    (re.compile(r"response_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"logprobs\b"), "include"),
)
"""How the library's name of a field begins → the body's."""


def _as_items(value: Any) -> Any:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("input_kind", "Send text, or a list of items.")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseAsked(Asked):
    """A request for a response.

    repeated: what of the body the answer says again. places: of each message, the field that it comes from.
    """

    repeated: dict[str, Any]
    places: tuple[str, ...]

    def field_of(self, name: str | None) -> str | None:
        """Return the field of the body that the library means."""
        if name is None:
            return None
        message = re.match(r"messages\[(\d+)\]", name)
        if message:
            return self.places[int(message[1])]
        for theirs, ours in FIELDS:
            if theirs.match(name):
                return theirs.sub(ours, name, count=1)
        return name


class ResponseReasoning(InputModel):
    """Only that there is to be none."""

    effort: Annotated[Literal["none"] | None, only("none", why=NO_REASONING)] = None
    summary: Annotated[None, only(why=NO_REASONING)] = None
    generate_summary: Annotated[None, only(why=NO_REASONING)] = None


class ResponseRequest(InputModel):
    """The body of a request."""

    model: str | None = None
    input: Annotated[Items, BeforeValidator(_as_items, json_schema_input_type=str | Items)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=1 << 63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[Included] | None = None
    text: TextForm | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    stream: bool | None = None
    metadata: Annotated[dict[Key, Value], Field(max_length=16)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Accepted, and without a meaning here.
    store: bool | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    service_tier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None

    # What the client would wait for in vain.
    truncation: Annotated[
        Literal["disabled"] | None,
        only("disabled", why="Nothing is cut off here: leave out items yourself, and truncation, too."),
    ] = None
    background: Annotated[
        Literal[False] | None,
        only(False, why="Answers aren't stored here: stream this one, or wait for it."),
    ] = None
    reasoning: ResponseReasoning | None = None
    previous_response_id: Annotated[
        None, only(why="Answers aren't stored here: send the items of the conversation so far as input.")
    ] = None
    conversation: Annotated[
        None, only(why="Conversations aren't stored here: send their items so far as input.")
    ] = None
    prompt: Annotated[
        None, only(why="Prompt templates aren't stored here: send their text as instructions or input.")
    ] = None
    context_management: Annotated[
        None, only(why="Nothing is compacted here: send as much as the model's context holds.")
    ] = None
    moderation: Annotated[None, only(why="There is no moderation here: leave it out.")] = None

    def asked(self) -> ResponseAsked:
        """Return what it comes down to."""
        messages: list[dict[str, Any]] = []
        places: list[str] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
            places.append("instructions")
        for message, index in messages_of(self.input):
            messages.append(message)
            places.append(f"input[{index}]")
        return ResponseAsked(
            model=self.model,
            messages=tuple(messages),
            options=self._options(),
            stream=bool(self.stream),
            warnings=self.ignored,
            repeated=self._repeated(),
            places=tuple(places),
        )

    def _options(self) -> dict[str, Any]:
        """Return the options of the library. What isn't said means what OpenAI's reference says."""
        top_logprobs = self.top_logprobs or 0
        options: dict[str, Any] = {
            "max_tokens": self.max_output_tokens,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            # OpenAI's sampling cuts nothing off but what top_p says.
            "top_k": 0,
            "min_p": 0.0,
            "logprobs": top_logprobs > 0 or LOGPROBS in (self.include or ()),
            "top_logprobs": top_logprobs,
        }
        if self.text is not None:
            options["response_format"] = self.text.response_format()
        if self.tools is not None:
            options["tools"] = [tool.of_chat() for tool in self.tools]
        if self.tool_choice is not None:
            options["tool_choice"] = choice_of_chat(self.tool_choice)
        return options

    def _repeated(self) -> dict[str, Any]:
        """Return what the answer's object says of the request, in the form in which it would be asked for."""
        form = None if self.text is None or self.text.format is None else self.text.format
        choice = self.tool_choice or "auto"
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            # Asked for or not, a model that calls several tools at once isn't kept from it.
            "parallel_tool_calls": True,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_logprobs": self.top_logprobs or 0,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True)},
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "reasoning": {"effort": None, "summary": None},
            "truncation": "disabled",
            "user": self.user,
            "safety_identifier": self.safety_identifier,
            "prompt_cache_key": self.prompt_cache_key,
        }
