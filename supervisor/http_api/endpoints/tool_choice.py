"""Which tool is to be called: a word, or one function by its name. All bodies that have tools share this."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Tag
from pydantic_core import PydanticCustomError

WORDS = ("none", "auto", "required")


def _check(value: Any) -> Any:
    is_word = isinstance(value, str) and value in WORDS
    if is_word or (isinstance(value, dict) and value.get("type") == "function"):
        return value
    raise PydanticCustomError(
        "tool_choice_kind",
        "Send none, auto, required, or an object of type function with a function's name. To allow some of the "
        "tools, send only those.",
    )


def _kind(value: Any) -> str:
    return "word" if isinstance(value, str) else "function"


Word = Annotated[Literal["none", "auto", "required"], Tag("word")]
ByName = Tag("function")
"""Marks the object that names a function; its shape is the endpoint's."""
BY_KIND = Discriminator(_kind)
CHECKED = BeforeValidator(_check)
