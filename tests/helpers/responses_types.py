"""Answers of /v1/responses, read with the types of OpenAI's own client, strictly: those it knows and no others."""

from __future__ import annotations

import json
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

OURS = {"store", "x_infervisor", "x_infervisor_code"}
"""What this service says beyond those types."""

_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def checked_response(body: Any) -> Response:
    """Return the object of an answer."""
    response = Response.model_validate_json(json.dumps(body), strict=True)
    _check_extras(response)
    return response


def checked_events(raw: bytes) -> list[Any]:
    """Return the events of a stream: each typed, named as its type says, and numbered without a gap."""
    events: list[Any] = []
    *blocks, rest = raw.decode("ascii").split("\n\n")
    assert rest == ""
    for block in blocks:
        if block.startswith(": "):
            continue
        name, data = block.split("\n")
        event = _EVENTS.validate_json(data.removeprefix("data: "), strict=True)
        _check_extras(event)
        assert name == f"event: {event.type}"
        assert event.sequence_number == len(events)
        events.append(event)
    return events


def _check_extras(value: Any) -> None:
    if isinstance(value, BaseModel):
        assert not set(value.model_extra or ()) - OURS, value
        for name in type(value).model_fields:
            _check_extras(getattr(value, name))
    elif isinstance(value, list):
        for each in value:
            _check_extras(each)
