"""What the body of a request comes down to, whichever endpoint it was sent to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request for text. Either messages, or one or several prompts.

    model: as the client named it. n: answers to each prompt. options: keyword arguments of `Supervisor.stream`.
    echo: whether the prompt stands before its answer. warnings: names of fields that were ignored, in ASCII.
    """

    model: str | None
    messages: tuple[Mapping[str, Any], ...] | None = None
    prompts: tuple[str, ...] = ()
    n: int = 1
    options: Mapping[str, Any]
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    warnings: tuple[str, ...] = ()
