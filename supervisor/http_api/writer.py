"""What a dialect of answers has to say: how chunks, ends and failures look on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from infervisor import Answer, Chunk, EndReason, Report, Stream

FINISH: dict[EndReason, str] = {
    EndReason.STOP: "stop",
    EndReason.STOP_SEQUENCE: "stop",
    EndReason.LENGTH: "length",
    EndReason.CONTEXT_FULL: "length",
}
"""OpenAI's word for each natural end; an answer that calls tools ends with `tool_calls` instead of `stop`."""


class Writer(Protocol):
    """Writes one answer, of one or several choices. Pure; bytes are whole events. report: one entry a choice."""

    def begin(self) -> bytes:
        """Return what comes before the first chunk."""
        ...

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """Return a piece of the choice `index`."""
        ...

    def end(self, index: int, stream: Stream, report: dict[str, Any] | None) -> bytes:
        """Return what tells that this choice has ended naturally, and is released. report: its own."""
        ...

    def done(self, streams: Sequence[Stream], report: list[dict[str, Any]] | None) -> bytes:
        """Return the terminal of a success."""
        ...

    def failed(self, error: BaseException, report: list[dict[str, Any]] | None) -> bytes:
        """Return the one terminal of a failure."""
        ...

    def whole(self, answers: Sequence[Answer], report: list[dict[str, Any]] | None) -> dict[str, Any]:
        """Return the body of an answer that isn't streamed."""
        ...


def finish_reason(reason: EndReason | None, *, has_calls: bool) -> str:
    """Return OpenAI's word for a natural end."""
    if has_calls and reason in (EndReason.STOP, EndReason.STOP_SEQUENCE):
        return "tool_calls"
    return FINISH[reason] if reason is not None else "stop"


def usage_of(reports: Sequence[Report], choices: int = 1) -> dict[str, Any]:
    """Return OpenAI's counts for the answers of one request. choices: how many share a prompt, counted once."""
    prompts = reports[::choices]
    prompt = sum(report.usage.prompt_tokens for report in prompts)
    completion = sum(report.usage.completion_tokens for report in reports)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(report.usage.cached_tokens for report in prompts),
            "audio_tokens": 0,
        },
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }
