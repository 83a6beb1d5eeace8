"""The messages of a chat as clients send them, and as chat templates take them.

Roles, and names beside the known ones, are the template's matter: some models have their own. Pure. Source:
OpenAI's API reference, "Chat Completions".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from infervisor.supervisor.http_api.endpoints.input_model import InputModel, only

PARTS = ("text", "refusal")


class TextPart(InputModel):
    """A piece of text."""

    type: Literal["text"]
    text: str
    # Accepted, and without a meaning here.
    prompt_cache_breakpoint: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None


class RefusedPart(InputModel):
    """What a model wrote instead of an answer."""

    type: Literal["refusal"]
    refusal: str


def _known_part(value: Any) -> Any:
    if not isinstance(value, dict) or value.get("type") not in PARTS:
        raise PydanticCustomError(
            "part_kind",
            "A part must be an object of type text or refusal: images, sound and files aren't taken here. "
            "Send text.",
        )
    return value


Part = Annotated[TextPart | RefusedPart, Field(discriminator="type"), BeforeValidator(_known_part)]


class MessageFunction(InputModel):
    """arguments: text that holds an object of JSON, or that object."""

    model_config = ConfigDict(extra="allow")

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageCall(InputModel):
    """A call that the model wanted, as an earlier answer has it."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] | None = None
    id: str | None = None
    function: MessageFunction


def _known_role(value: Any) -> Any:
    if value == "function":
        raise PydanticCustomError(
            "old_role", "The role function is an old form. Send role tool with a tool_call_id."
        )
    return value


class Message(InputModel):
    """What somebody said. Its content may only be missing where there are tool_calls."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64), BeforeValidator(_known_role)]
    content: str | list[Part] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    audio: Annotated[None, only(why="Sound isn't stored here. Send what was said as content.")] = None
    function_call: Annotated[None, only(why="It is an old form. Send tool_calls.")] = None


def for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message, as it was sent, in the words that templates know."""
    # A template that asks whether there is a list of calls would go through null.
    made = {name: value for name, value in message.items() if value is not None or name == "content"}
    if made["role"] == "developer":
        # OpenAI's later word.
        made["role"] = "system"
    content, refusal = made.get("content"), made.pop("refusal", None)
    if isinstance(content, list):
        made["content"] = [_as_text(part) for part in content]
    elif content is None and refusal is not None:
        made["content"] = refusal
    return made


def _as_text(part: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "text", "text": part["refusal"]} if part["type"] == "refusal" else part
