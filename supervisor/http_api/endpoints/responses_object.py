"""The object of /v1/responses and the items in it. Pure. Source: OpenAI's API reference, "Responses"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infervisor import Report, TokenLogprob, ToolCall
from infervisor.supervisor.http_api.endpoints.chat_writer import logprob_of
from infervisor.supervisor.http_api.errors import error_body
from infervisor.supervisor.http_api.writer import usage_of

ERROR_WORDS = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}
"""Type of an error → its code in this object, for which OpenAI has few words; all others are `server_error`."""


class ResponseObject:
    """What all objects of one answer have in common.

    head: id, created and model. repeated: what of the request OpenAI's object says again.
    """

    def __init__(self, head: Mapping[str, Any], repeated: Mapping[str, Any]) -> None:
        self.key: str = head["id"].partition("-")[2]
        """What the ids of the answer and of its items end with."""
        self._created_s: int = head["created"]
        self._shared = {
            "id": f"resp_{self.key}",
            "object": "response",
            "created_at": self._created_s,
            "model": head["model"],
            "background": False,
            "previous_response_id": None,
            # Nothing is kept, whatever was asked.
            "store": False,
            **repeated,
        }

    def of(
        self,
        status: str,
        items: Sequence[Mapping[str, Any]],
        *,
        report: Report | None = None,
        error: BaseException | None = None,
        told: Any = None,
    ) -> dict[str, Any]:
        """Return the object in a status. report: of an answer that has ended; told: for `x_infervisor`."""
        completed_s = None
        if status == "completed" and report is not None:
            completed_s = self._created_s + int(report.timeline.total_s or 0)
        return {
            **self._shared,
            "status": status,
            "completed_at": completed_s,
            "output": list(items),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "error": None if error is None else _error(error),
            "usage": None if report is None else _usage(report),
            **({} if told is None else {"x_infervisor": told}),
        }


def text_part(text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the one part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def message_item(key: str, status: str, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a message of the model. key: unique in the service."""
    return {
        "id": f"msg_{key}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": list(parts),
    }


def call_item(key: str, status: str, call: ToolCall, arguments: str) -> dict[str, Any]:
    """Return a call of a function, with as much of its arguments as is told."""
    return {
        "id": f"fc_{key}",
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        "name": call.name,
        "arguments": arguments,
    }


def logprobs_of(told: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return how probable tokens were, as parts have it."""
    return [logprob_of(each) for each in told]


def without_bytes(told: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the same as the events of a text have it."""
    brief: list[dict[str, Any]] = []
    for each in told:
        tops = [{"token": top["token"], "logprob": top["logprob"]} for top in each["top_logprobs"]]
        brief.append({"token": each["token"], "logprob": each["logprob"], "top_logprobs": tops})
    return brief


def _usage(report: Report) -> dict[str, Any]:
    counts = usage_of([report])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }


def _error(error: BaseException) -> dict[str, Any]:
    body = error_body(error)["error"]
    return {
        "code": ERROR_WORDS.get(body["type"], "server_error"),
        "message": body["message"],
        "param": body["param"],
        "type": body["type"],
        # The same code as everywhere else in the service.
        "x_infervisor_code": body["code"],
    }
