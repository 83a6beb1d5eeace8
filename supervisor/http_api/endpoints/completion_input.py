"""The body of /v1/completions. Source: OpenAI's API reference, "Completions". Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from infervisor.supervisor.http_api.asked import Asked
from infervisor.supervisor.http_api.endpoints.input_model import only
from infervisor.supervisor.http_api.endpoints.sampling_input import (
    MaxTokens,
    ResponseFormat,
    SamplingRequest,
    no_limit_is_none,
)
from infervisor.supervisor.http_api.endpoints.texts_input import BeTexts, Several, Text, texts_of
from infervisor.supervisor.http_api.errors import HttpRefused

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, where a request says nothing."""
MAX_PROMPTS = 128


class CompletionRequest(SamplingRequest):
    """One or several prompts to be continued."""

    prompt: Annotated[Text | Annotated[Several, Field(max_length=MAX_PROMPTS)], BeTexts]
    max_tokens: MaxTokens | None = DEFAULT_MAX_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    suffix: Annotated[
        Literal[""] | None,
        only(
            "", why="Text isn't filled in between here: leave it out, or put the model's own marks in prompt."
        ),
    ] = None
    response_format: ResponseFormat | None = None

    def asked(self) -> Asked:
        """Return what it comes down to. Raises `HttpRefused`."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise HttpRefused(
                "invalid_request",
                "best_of other than n isn't served: ask for n answers and choose.",
                "best_of",
            )
        if self.echo and self.logprobs is not None:
            raise HttpRefused(
                "invalid_request", "echo with logprobs isn't served: leave one of the two out.", "echo"
            )
        options = self.sampling()
        options["max_tokens"] = no_limit_is_none(self.max_tokens)
        if self.logprobs is not None:
            options["logprobs"], options["top_logprobs"] = True, self.logprobs
        if self.response_format is not None:
            options["response_format"] = self.raw["response_format"]
        return Asked(
            model=self.model,
            prompts=tuple(texts_of(self.prompt)),
            n=self.n or 1,
            options=options,
            stream=bool(self.stream),
            include_usage=bool(self.stream_options and self.stream_options.include_usage),
            echo=bool(self.echo),
            warnings=self.ignored,
        )
