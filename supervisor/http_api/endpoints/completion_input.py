"""The body of /v1/completions. Source: OpenAI's API reference, "Completions"."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from infervisor.supervisor.http_api.asked import Asked
from infervisor.supervisor.http_api.endpoints.chat_input import (
    MaxTokens,
    ResponseFormat,
    SamplingRequest,
    limit,
)
from infervisor.supervisor.http_api.errors import HttpRefused

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, where a request says nothing."""


def _no_tokens(value: Any) -> Any:
    if isinstance(value, list) and value and not isinstance(value[0], str):
        raise PydanticCustomError("token_prompt", "Prompts of token ids aren't taken: send their text")
    return value


Prompt = Annotated[
    str | Annotated[list[str], Field(min_length=1, max_length=128)], BeforeValidator(_no_tokens)
]


class CompletionRequest(SamplingRequest):
    """One or several prompts to be continued."""

    prompt: Prompt
    max_tokens: MaxTokens | None = DEFAULT_MAX_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None
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
        options["max_tokens"] = limit(self.max_tokens, name="max_tokens")
        if self.logprobs is not None:
            options["logprobs"], options["top_logprobs"] = True, self.logprobs
        if self.response_format is not None:
            options["response_format"] = self.raw["response_format"]
        return Asked(
            model=self.model,
            prompts=(self.prompt,) if isinstance(self.prompt, str) else tuple(self.prompt),
            n=self.n or 1,
            options=options,
            stream=bool(self.stream),
            include_usage=bool(self.stream_options and self.stream_options.include_usage),
            echo=bool(self.echo),
            warnings=self.ignored,
        )
