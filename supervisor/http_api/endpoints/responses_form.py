"""How an answer of /v1/responses is to look: the form of its text, and the functions that may be called.

Pure. Its shapes are flatter than those of a chat; here they are turned into those. Source: OpenAI's API reference,
"Responses".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from infervisor.supervisor.http_api.endpoints.input_model import InputModel
from infervisor.supervisor.http_api.endpoints.tool_choice import BY_KIND, CHECKED, ByName, Word

# --- text ------------------------------------------------------------------------------------------


class PlainFormat(InputModel):
    """Text as it comes."""

    type: Literal["text"]


class ObjectFormat(InputModel):
    """Any object of JSON."""

    type: Literal["json_object"]


class SchemaFormat(InputModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextForm(InputModel):
    """The form of the text. verbosity: there is only the one that models have by themselves."""

    format: Annotated[PlainFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None

    def response_format(self) -> dict[str, Any] | None:
        """Return it as a chat has it; None for text."""
        if self.format is None or isinstance(self.format, PlainFormat):
            return None
        if isinstance(self.format, ObjectFormat):
            return {"type": "json_object"}
        named: dict[str, Any] = {"name": self.format.name, "schema": self.format.schema_}
        if self.format.description is not None:
            named["description"] = self.format.description
        if self.format.strict is not None:
            named["strict"] = self.format.strict
        return {"type": "json_schema", "json_schema": named}


# --- tools -----------------------------------------------------------------------------------------


def _is_function(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") != "function":
        raise PydanticCustomError(
            "tool_kind",
            "Only tools of type function are taken: there are no built-in tools here. Offer a function, and "
            "carry out its calls yourself.",
        )
    return value


class ResponseTool(InputModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def of_chat(self) -> dict[str, Any]:
        """Return it as a chat has it."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


Tool = Annotated[ResponseTool, BeforeValidator(_is_function)]


class ResponseToolChoice(InputModel):
    """The one function that must be called."""

    type: Literal["function"]
    name: str


ToolChoice = Annotated[Word | Annotated[ResponseToolChoice, ByName], BY_KIND, CHECKED]


def choice_of_chat(choice: str | ResponseToolChoice) -> str | dict[str, Any]:
    """Return it as a chat has it."""
    return choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice.name}}
