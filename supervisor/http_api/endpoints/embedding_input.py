"""The body of /v1/embeddings. Source: OpenAI's API reference, "Embeddings"."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from infervisor.supervisor.http_api.endpoints.input_model import InputModel


def _no_tokens(value: Any) -> Any:
    if isinstance(value, list) and value and not isinstance(value[0], str):
        raise PydanticCustomError("token_input", "Lists of token ids aren't taken: send texts")
    return value


Texts = Annotated[
    str | Annotated[list[str], Field(min_length=1, max_length=2048)], BeforeValidator(_no_tokens)
]


class EmbeddingsRequest(InputModel):
    """Texts to be turned into vectors. dimensions: only as many as the model's vectors have."""

    input: Texts
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None

    def texts(self) -> list[str]:
        """Return the texts, in order."""
        return [self.input] if isinstance(self.input, str) else list(self.input)
