"""The names and types of what a request takes, for editors and type checkers. Nothing here is checked when it runs:
`request_input` does that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from infervisor.supervisor.settings import Deadlines


class SamplingOptions(TypedDict, total=False):
    """The fields of `protocol.generation.Sampling`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repeat_penalty: float
    repeat_last_n: int
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]


class RequestOptions(SamplingOptions, total=False):
    """What `Supervisor.stream` takes beside prompt and messages."""

    max_tokens: int | None
    stop: str | Sequence[str] | None
    seed: int | None
    ignore_eos: bool
    special: bool
    window: int | None
    deadlines: Deadlines | None
    on_crash: str | None
    priority: int
    logprobs: bool
    top_logprobs: int
    grammar: str | None
    json_schema: Mapping[str, Any] | str | None
    response_format: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
