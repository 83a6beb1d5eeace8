"""Answers of /v1/completions. Pure. Source: OpenAI's API reference, "Completions"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infervisor import Answer, Chunk, Stream, TokenLogprob
from infervisor.supervisor.http_api import sse
from infervisor.supervisor.http_api.errors import error_body
from infervisor.supervisor.http_api.writer import finish_reason, usage_of


class CompletionWriter:
    """One answer. head: id, created, model and fingerprint. choices: answers to each prompt.

    echoes: the prompts, if they are to stand before their answers.
    """

    def __init__(
        self,
        head: dict[str, Any],
        choices: int,
        *,
        echoes: Sequence[str] = (),
        logprobs: bool,
        include_usage: bool,
    ) -> None:
        self._head = {**head, "object": "text_completion"}
        self._choices = choices
        self._echoes = echoes
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._offsets: dict[int, int] = {}
        """Characters of each choice that were told already."""

    def begin(self) -> bytes:
        """Return the prompts, if they are to be repeated."""
        count = len(self._echoes) * self._choices
        return b"".join(self._event(index, self._echo(index)) for index in range(count))

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """Return a piece of text."""
        return self._event(index, chunk.text, chunk.logprobs)

    def end(self, index: int, stream: Stream, report: dict[str, Any] | None) -> bytes:
        """Return why a choice has ended, and its report."""
        return self._event(index, "", reason=finish_reason(stream.end_reason, has_calls=False), report=report)

    def done(self, streams: Sequence[Stream], report: list[dict[str, Any]] | None) -> bytes:
        """Return the counts, if they are wanted, and the terminal. The reports came with the ends."""
        if not self._include_usage:
            return sse.DONE
        usage = usage_of([stream.report for stream in streams], self._choices)
        return sse.event({**self._head, "choices": [], "usage": usage}) + sse.DONE

    def failed(self, error: BaseException, report: list[dict[str, Any]] | None) -> bytes:
        """Return the error, and nothing after it."""
        body = error_body(error)
        if report is not None:
            body["x_infervisor"] = report
        return sse.event(body)

    def whole(self, answers: Sequence[Answer], report: list[dict[str, Any]] | None) -> dict[str, Any]:
        """Return the object of all choices."""
        choices = []
        for index, answer in enumerate(answers):
            echo = self._echo(index)
            choices.append(
                {
                    "index": index,
                    "text": echo + answer.text,
                    "logprobs": self._told(answer.logprobs, len(echo)),
                    "finish_reason": finish_reason(answer.report.end_reason, has_calls=False),
                }
            )
        return {
            **self._head,
            "choices": choices,
            "usage": usage_of([answer.report for answer in answers], self._choices),
            **({} if report is None else {"x_infervisor": report}),
        }

    # --- parts -------------------------------------------------------------------------------------

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._choices] if self._echoes else ""

    def _event(
        self,
        index: int,
        text: str,
        told: Sequence[TokenLogprob] = (),
        reason: str | None = None,
        report: dict[str, Any] | None = None,
    ) -> bytes:
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(text)
        choice = {
            "index": index,
            "text": text,
            "logprobs": self._told(told, offset),
            "finish_reason": reason,
        }
        body: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._include_usage:
            body["usage"] = None
        if report is not None:
            body["x_infervisor"] = [report]
        return sse.event(body)

    def _told(self, told: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
        """Return log-probabilities as this endpoint has them: lists side by side, tokens by their text."""
        if not self._logprobs:
            return None
        offsets: list[int] = []
        for each in told:
            offsets.append(offset)
            offset += len(each.text)
        return {
            "tokens": [each.text for each in told],
            "token_logprobs": [each.logprob for each in told],
            "top_logprobs": [{other.text: other.logprob for other in each.top} for each in told],
            "text_offset": offsets,
        }
