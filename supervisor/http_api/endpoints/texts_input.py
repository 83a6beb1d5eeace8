"""A text, or a list of texts: what a prompt and the input of embeddings are. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError


def _are_texts(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], (int, list)):
        raise PydanticCustomError("token_ids", "Lists of token ids aren't taken. Send their text.")
    if not isinstance(value, (str, list)):
        raise PydanticCustomError("texts_kind", "Send a text, or a list of texts.")
    return value


BeTexts = BeforeValidator(_are_texts)
# The library says better than a pattern why it refuses an empty one.
Text = Annotated[str, Field(json_schema_extra={"minLength": 1})]
Several = Annotated[list[Text], Field(min_length=1)]


def texts_of(value: str | Sequence[str]) -> list[str]:
    """Return the texts, in order."""
    return [value] if isinstance(value, str) else list(value)
