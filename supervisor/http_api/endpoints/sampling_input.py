"""What the bodies of chats and completions have in common: how tokens are chosen, and what is accepted for nothing.

Sources: OpenAI's API reference; llama.cpp's server for what goes beyond it. Pure.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from infervisor.supervisor.http_api.endpoints.input_model import InputModel
from infervisor.supervisor.http_api.errors import HttpRefused

MAX_BIASES = 4096

Seed = Annotated[int, Field(ge=0, lt=1 << 32)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def _limit(value: int) -> int:
    if value < 1 and value != -1:
        raise PydanticCustomError("limit", "Send 1 or more, or -1 or null for no limit.")
    return value


MaxTokens = Annotated[
    int,
    Field(ge=-(1 << 63), lt=1 << 63),
    AfterValidator(_limit),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": (1 << 63) - 1}, {"const": -1}]}),
]
"""-1 and null are no limit."""

# The library says better than a pattern why it refuses an empty one.
_StopString = Annotated[str, Field(json_schema_extra={"minLength": 1, "maxLength": 1024})]
Stop = _StopString | Annotated[list[_StopString], Field(max_length=64)]

LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    # Checked when they are read: a message about a pattern says less.
    Field(json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,9}$"}}, max_length=MAX_BIASES),
]


class StreamOptions(InputModel):
    """include_usage: counts in an event of their own, before the end."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(InputModel):
    """The form of the answer. json_schema: an object with a name and a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class SamplingRequest(InputModel):
    """A request for text."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Stop | None = None
    seed: Seed | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    # What llama.cpp has beyond OpenAI.
    top_k: Annotated[int, Field(ge=-1, le=1 << 20, description="0 and -1 leave all tokens.")] | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    repeat_last_n: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    ignore_eos: bool | None = None
    # Accepted, and without a meaning here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    cache_prompt: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the options of the library. What is left out means what OpenAI's reference says.

        Raises `HttpRefused` for names in logit_bias that are no ids of tokens.
        """
        options: dict[str, Any] = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            # OpenAI's sampling cuts nothing off but what top_p says.
            "top_k": max(0, self.top_k or 0),
            "min_p": self.min_p or 0.0,
        }
        same = (
            "stop", "seed", "frequency_penalty", "presence_penalty", "typical_p", "repeat_penalty", "repeat_last_n",
            "grammar", "json_schema", "ignore_eos",
        )  # fmt: skip
        for name in same:
            value = getattr(self, name)
            if value is not None:
                options[name] = value
        if self.logit_bias is not None:
            options["logit_bias"] = {_token(name): value for name, value in self.logit_bias.items()}
        return options


def _token(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 10):
        raise HttpRefused(
            "invalid_request",
            f'logit_bias has the name {name[:40]!r}: names are the ids of tokens, such as "42".',
            "logit_bias",
        )
    return int(name)


def no_limit_is_none(limit: int | None) -> int | None:
    """Return a limit as the library has it."""
    return None if limit == -1 else limit
