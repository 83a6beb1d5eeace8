"""The body of /v1/embeddings. Source: OpenAI's API reference, "Embeddings". Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from infervisor.supervisor.http_api.endpoints.input_model import InputModel
from infervisor.supervisor.http_api.endpoints.texts_input import BeTexts, Several, Text, texts_of

MAX_TEXTS = 2048


class EmbeddingsRequest(InputModel):
    """Texts to be turned into vectors. dimensions: only as many as the model's vectors have."""

    input: Annotated[Text | Annotated[Several, Field(max_length=MAX_TEXTS)], BeTexts]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None

    def texts(self) -> list[str]:
        """Return the texts, in order."""
        return texts_of(self.input)
