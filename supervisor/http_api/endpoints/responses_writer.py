"""Answers of /v1/responses: typed events with numbers. Pure.

An item is open while it grows: text goes into one message until a call comes or the answer ends. Source: OpenAI's
API reference, "Responses" and "Streaming events".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infervisor import Answer, Chunk, EndReason, Stream, ToolCall
from infervisor.supervisor.http_api import sse
from infervisor.supervisor.http_api.endpoints.responses_object import (
    ResponseObject,
    call_item,
    logprobs_of,
    message_item,
    text_part,
    without_bytes,
)
from infervisor.supervisor.http_api.writer import finish_reason

OPENING = ("response.created", "response.in_progress")
"""What every stream begins with; their numbers are 0 and 1."""


class ResponsesWriter:
    """One answer, which has one choice. head and repeated: see `ResponseObject`."""

    def __init__(self, head: Mapping[str, Any], repeated: Mapping[str, Any]) -> None:
        self._object = ResponseObject(head, repeated)
        # Race "the first chunk is written before the opening": the opening's numbers are taken already.
        self._number = len(OPENING)
        self._items: list[dict[str, Any]] = []
        """Those that are whole."""
        self._texts: list[str] | None = None
        """Pieces of the open message, or None."""
        self._logprobs: list[dict[str, Any]] = []

    # --- streamed ----------------------------------------------------------------------------------

    def begin(self) -> bytes:
        """Return the events that tell of an answer without items."""
        opened = self._object.of("in_progress", [])
        return b"".join(_event(name, number, response=opened) for number, name in enumerate(OPENING))

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """Return a piece of text, and the calls that are complete with it."""
        events: list[bytes] = []
        if chunk.text:
            events += self._open()
            events.append(self._delta(chunk))
        for call in chunk.tool_calls:
            events += self._close("completed")
            events += self._call(call)
        return b"".join(events)

    def end(self, index: int, stream: Stream, report: dict[str, Any] | None) -> bytes:
        """Return the end of the last message. An answer without anything has an empty one."""
        events = [] if self._items else self._open()
        return b"".join([*events, *self._close(_status(stream.end_reason))])

    def done(self, streams: Sequence[Stream], report: list[dict[str, Any]] | None) -> bytes:
        """Return the terminal with the whole answer: completed, or incomplete if it had to end."""
        (stream,) = streams
        status = _status(stream.end_reason)
        whole = self._object.of(status, self._items, report=stream.report, told=report)
        return self._next(f"response.{status}", response=whole)

    def failed(self, error: BaseException, report: list[dict[str, Any]] | None) -> bytes:
        """Return the terminal of a failure, with the items so far."""
        items = list(self._items)
        if self._texts is not None:
            items.append(self._message("incomplete"))
        return self._next(
            "response.failed", response=self._object.of("failed", items, error=error, told=report)
        )

    # --- whole -------------------------------------------------------------------------------------

    def whole(self, answers: Sequence[Answer], report: list[dict[str, Any]] | None) -> dict[str, Any]:
        """Return the object: the text first, then the calls."""
        (answer,) = answers
        status = _status(answer.report.end_reason)
        if answer.text or not answer.tool_calls:
            self._texts, self._logprobs = [answer.text], logprobs_of(answer.logprobs)
            self._items.append(self._message(status))
        for call in answer.tool_calls:
            self._items.append(call_item(self._key(), "completed", call, call.arguments))
        return self._object.of(status, self._items, report=answer.report, told=report)

    # --- the open message --------------------------------------------------------------------------

    def _open(self) -> list[bytes]:
        if self._texts is not None:
            return []
        self._texts, self._logprobs = [], []
        item = message_item(self._key(), "in_progress", [])
        return [
            self._next("response.output_item.added", output_index=len(self._items), item=item),
            self._next("response.content_part.added", **self._place(), part=text_part("", [])),
        ]

    def _delta(self, chunk: Chunk) -> bytes:
        assert self._texts is not None
        told = logprobs_of(chunk.logprobs)
        self._texts.append(chunk.text)
        self._logprobs += told
        return self._next(
            "response.output_text.delta", **self._place(), delta=chunk.text, logprobs=without_bytes(told)
        )

    def _close(self, status: str) -> list[bytes]:
        if self._texts is None:
            return []
        item, place = self._message(status), self._place()
        (part,) = item["content"]
        text, told = part["text"], without_bytes(part["logprobs"])
        events = [
            self._next("response.output_text.done", **place, text=text, logprobs=told),
            self._next("response.content_part.done", **place, part=part),
            self._next("response.output_item.done", output_index=len(self._items), item=item),
        ]
        self._items.append(item)
        self._texts = None
        return events

    def _message(self, status: str) -> dict[str, Any]:
        return message_item(self._key(), status, [text_part("".join(self._texts or ()), self._logprobs)])

    # --- parts -------------------------------------------------------------------------------------

    def _call(self, call: ToolCall) -> list[bytes]:
        """Return the events of a call: its arguments come at once, since a part of them is not a call yet."""
        index = len(self._items)
        begun = call_item(self._key(), "in_progress", call, "")
        item = call_item(self._key(), "completed", call, call.arguments)
        place = {"output_index": index, "item_id": item["id"]}
        events = [
            self._next("response.output_item.added", output_index=index, item=begun),
            self._next("response.function_call_arguments.delta", **place, delta=call.arguments),
            self._next("response.function_call_arguments.done", **place, arguments=call.arguments),
            self._next("response.output_item.done", output_index=index, item=item),
        ]
        self._items.append(item)
        return events

    def _key(self) -> str:
        return f"{self._object.key}_{len(self._items)}"

    def _place(self) -> dict[str, Any]:
        """Return where the open message's text is."""
        return {"output_index": len(self._items), "item_id": f"msg_{self._key()}", "content_index": 0}

    def _next(self, name: str, **fields: Any) -> bytes:
        number = self._number
        self._number += 1
        return _event(name, number, **fields)


def _event(name: str, number: int, **fields: Any) -> bytes:
    return sse.event({"type": name, "sequence_number": number, **fields}, name)


def _status(reason: EndReason | None) -> str:
    """Return OpenAI's word for a natural end."""
    return "incomplete" if finish_reason(reason, has_calls=False) == "length" else "completed"
