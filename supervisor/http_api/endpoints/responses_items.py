"""The items of a conversation as /v1/responses takes them, and the chat messages that they are.

Pure. What nobody here could make sense of (images, files, references to stored items) is refused with what to send
instead. Source: OpenAI's API reference, "Responses".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from infervisor.supervisor.http_api.endpoints.input_model import InputModel

ItemStatus = Literal["in_progress", "completed", "incomplete"]

ITEMS = ("message", "function_call", "function_call_output")
PARTS = ("input_text", "output_text", "refusal")


class InputTextPart(InputModel):
    """Text that somebody wrote."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class OutputTextPart(InputModel):
    """Text that a model wrote, as an earlier answer has it."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalPart(InputModel):
    """What a model wrote instead of an answer."""

    type: Literal["refusal"]
    refusal: str


def _known_part(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in PARTS:
        raise PydanticCustomError(
            "part_kind",
            "A part must be an object of type input_text, output_text or refusal: images, files and sound "
            "aren't taken here. Send text.",
        )
    return value


def _one_part(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Part = Annotated[
    InputTextPart | OutputTextPart | RefusalPart, Field(discriminator="type"), BeforeValidator(_known_part)
]
Parts = Annotated[list[Part], BeforeValidator(_one_part, json_schema_input_type=str | list[Part])]


class MessageItem(InputModel):
    """What somebody said: an easy message, an input message, or a message of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    id: str | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(InputModel):
    """A call that the model wanted."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: ItemStatus | None = None


class FunctionOutputItem(InputModel):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts
    id: str | None = None
    status: ItemStatus | None = None


def _known_item(value: Any) -> Any:
    if not isinstance(value, dict):
        raise PydanticCustomError(
            "item_kind", "An item must be an object with a type, or with role and content."
        )
    kind = value.get("type", "message")
    if kind == "item_reference":
        raise PydanticCustomError(
            "item_kind", "Nothing is stored here: send the item instead of a reference to it."
        )
    if kind not in ITEMS:
        raise PydanticCustomError(
            "item_kind",
            "An item must be a message, a function_call or a function_call_output. Leave out others: what "
            "built-in tools, images and reasoning are about doesn't exist here.",
        )
    return value


def _kind_of(value: Any) -> str:
    kind = value.get("type", "message") if isinstance(value, dict) else value.type
    return str(kind)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")],
    Discriminator(_kind_of),
    BeforeValidator(_known_item),
]


def messages_of(
    items: Sequence[MessageItem | FunctionCallItem | FunctionOutputItem],
) -> list[tuple[dict[str, Any], int]]:
    """Return the chat messages, each with the index of the item that it begins with.

    A call belongs to the message before it, if that is the model's, as a chat has it.
    """
    messages: list[tuple[dict[str, Any], int]] = []
    names: dict[str, str] = {}
    for index, item in enumerate(items):
        if isinstance(item, MessageItem):
            role = "system" if item.role == "developer" else item.role
            messages.append(({"role": role, "content": _text(item.content)}, index))
        elif isinstance(item, FunctionCallItem):
            names[item.call_id] = item.name
            if not messages or messages[-1][0]["role"] != "assistant":
                messages.append(({"role": "assistant", "content": ""}, index))
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            messages[-1][0].setdefault("tool_calls", []).append(call)
        else:
            told = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
            if item.call_id in names:
                # Some templates tell results apart by it.
                told["name"] = names[item.call_id]
            messages.append((told, index))
    return messages


def _text(parts: Sequence[InputTextPart | OutputTextPart | RefusalPart]) -> str:
    return "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in parts)
