"""Answers of /v1/chat/completions. Pure. Source: OpenAI's API reference, "Chat Completions"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infervisor import Answer, Chunk, Stream, TokenLogprob, ToolCall, TopLogprob
from infervisor.supervisor.http_api import sse
from infervisor.supervisor.http_api.errors import error_body
from infervisor.supervisor.http_api.writer import finish_reason, usage_of


class ChatWriter:
    """One answer. head: id, created, model and fingerprint, which all objects of it begin with."""

    def __init__(self, head: dict[str, Any], choices: int, *, logprobs: bool, include_usage: bool) -> None:
        self._head = head
        self._choices = choices
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._calls = [0] * choices

    # --- streamed ----------------------------------------------------------------------------------

    def begin(self) -> bytes:
        """Return the first event of each choice: who speaks."""
        first = {"role": "assistant", "content": ""}
        return b"".join(self._event(self._choice(index, first)) for index in range(self._choices))

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """Return a piece of text, and the calls that are complete with it."""
        delta: dict[str, Any] = {}
        if chunk.text:
            delta["content"] = chunk.text
        if chunk.tool_calls:
            first = self._calls[index]
            self._calls[index] += len(chunk.tool_calls)
            delta["tool_calls"] = [
                {"index": first + offset, **call_of(call)} for offset, call in enumerate(chunk.tool_calls)
            ]
        told = {"content": [logprob_of(each) for each in chunk.logprobs]} if self._logprobs else None
        return self._event(self._choice(index, delta, told))

    def end(self, index: int, stream: Stream, report: dict[str, Any] | None) -> bytes:
        """Return why a choice has ended, and its report."""
        reason = finish_reason(stream.end_reason, has_calls=self._calls[index] > 0)
        return self._event(self._choice(index, {}, None, reason), report)

    def done(self, streams: Sequence[Stream], report: list[dict[str, Any]] | None) -> bytes:
        """Return the counts, if they are wanted, and the terminal. The reports came with the ends."""
        if not self._include_usage:
            return sse.DONE
        usage = usage_of([stream.report for stream in streams], self._choices)
        return sse.event({**self._chunk_head(), "choices": [], "usage": usage}) + sse.DONE

    def failed(self, error: BaseException, report: list[dict[str, Any]] | None) -> bytes:
        """Return the error, and nothing after it."""
        body = error_body(error)
        if report is not None:
            body["x_infervisor"] = report
        return sse.event(body)

    # --- whole -------------------------------------------------------------------------------------

    def whole(self, answers: Sequence[Answer], report: list[dict[str, Any]] | None) -> dict[str, Any]:
        """Return the object of all choices."""
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._message(index, answer) for index, answer in enumerate(answers)],
            "usage": usage_of([answer.report for answer in answers], self._choices),
            **({} if report is None else {"x_infervisor": report}),
        }

    def _message(self, index: int, answer: Answer) -> dict[str, Any]:
        calls = [call_of(call) for call in answer.tool_calls]
        told = {"content": [logprob_of(each) for each in answer.logprobs], "refusal": None}
        return {
            "index": index,
            "message": {
                "role": "assistant",
                # An answer of calls alone has no content.
                "content": answer.text if answer.text or not calls else None,
                "refusal": None,
                **({"tool_calls": calls} if calls else {}),
            },
            "logprobs": told if self._logprobs else None,
            "finish_reason": finish_reason(answer.report.end_reason, has_calls=bool(calls)),
        }

    # --- parts -------------------------------------------------------------------------------------

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _event(self, choice: dict[str, Any], report: dict[str, Any] | None = None) -> bytes:
        body = {**self._chunk_head(), "choices": [choice]}
        if self._include_usage:
            body["usage"] = None
        if report is not None:
            body["x_infervisor"] = [report]
        return sse.event(body)

    def _choice(
        self, index: int, delta: dict[str, Any], told: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": told, "finish_reason": reason}


def call_of(call: ToolCall) -> dict[str, Any]:
    """Return a call of a tool in OpenAI's shape; its arguments are text that holds JSON."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def logprob_of(told: TokenLogprob | TopLogprob) -> dict[str, Any]:
    """Return how probable a token was, and the ones in its place. A part of a character is told by its bytes."""
    shape: dict[str, Any] = {"token": told.text, "logprob": told.logprob, "bytes": list(told.data)}
    if isinstance(told, TokenLogprob):
        shape["top_logprobs"] = [logprob_of(other) for other in told.top]
    return shape
