"""From a checked body to a running request: what all endpoints that ask for text have in common.

Makes the streams and the ledger's entry; `exchange` runs them. Runs in the request's task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from infervisor import Deadlines, InvalidRequest, Status, Streams, Supervisor
from infervisor.supervisor.http_api.asked import Asked
from infervisor.supervisor.http_api.context import Context
from infervisor.supervisor.http_api.errors import HttpRefused, name_as_body
from infervisor.supervisor.http_api.exchange import Exchange
from infervisor.supervisor.http_api.ledger import Entry
from infervisor.supervisor.http_api.request_headers import Wishes, wishes_of
from infervisor.supervisor.http_api.writer import Writer

MAX_CHOICES = 128
"""Answers of one HTTP request, all its prompts together."""


@dataclass(frozen=True, slots=True)
class Made:
    """What a writer is made for. head: id, created, model, system_fingerprint."""

    head: dict[str, Any]
    asked: Asked
    request_id: str


def request_id_of(request: Request) -> str:
    """Return the id that this HTTP request goes by."""
    told: str = request.scope["state"]["request_id"]
    return told


def model_of(context: Context, name: str | None, *, generates: bool) -> tuple[str, Supervisor, Status]:
    """Return a model, its supervisor and that's state. Raises `HttpRefused` for one that can't do it.

    generates: whether text is wanted from it, or vectors.
    """
    context.ledger.check_open()
    model, supervisor = context.models.find(name)
    status = supervisor.status()
    extra = status.facts.get("extra", {})
    if generates and extra.get("generates") is False:
        raise HttpRefused(
            "invalid_request", f"The model {model} only makes embeddings: ask at /v1/embeddings.", "model"
        )
    return model, supervisor, status


def options_of(asked: Mapping[str, Any], wishes: Wishes) -> dict[str, Any]:
    """Return the options of a request, with what its headers say."""
    options = dict(asked)
    for name in ("deadlines", "priority", "on_crash"):
        value = getattr(wishes, name)
        if value is not None:
            options[name] = value
    return options


def head_of(prefix: str, request_id: str, model: str, status: Status) -> dict[str, Any]:
    """Return what every object of an answer begins with. prefix: of its id."""
    fingerprint = status.facts.get("fingerprint")
    return {
        "id": f"{prefix}-{request_id.removeprefix('req-')}",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": None if fingerprint is None else f"fp_{str(fingerprint)[:16]}",
    }


def ask(
    request: Request,
    context: Context,
    asked: Asked,
    prefix: str,
    make_writer: Callable[[Made], Writer],
    field_of: Callable[[str | None], str | None],
) -> Exchange:
    """Return the answer to a request, which runs when it is sent.

    field_of: names a field of the library as the body has it. Raises `HttpRefused` and `InvalidRequest`.
    """
    model, supervisor, status = model_of(context, asked.model, generates=True)
    wishes = wishes_of(request.headers, supervisor.deadlines)
    options = options_of(asked.options, wishes)
    choices = max(1, len(asked.prompts)) * asked.n
    if choices > MAX_CHOICES:
        raise HttpRefused(
            "invalid_request", f"{choices} answers are asked for; at most {MAX_CHOICES} in one request.", "n"
        )
    groups: list[Streams] = []
    try:
        if asked.messages is not None:
            groups.append(supervisor.streams(n=asked.n, messages=asked.messages, **options))
        for prompt in asked.prompts:
            groups.append(supervisor.streams(prompt, n=asked.n, **options))
    except InvalidRequest as error:
        name_as_body(error, field_of)
        raise
    entry = Entry(
        request_id_of(request),
        request.scope["path"],
        model,
        [stream for group in groups for stream in group],
        is_streaming=asked.stream,
        client_request_id=wishes.client_id,
        asked=asked,
    )
    deadlines: Deadlines = wishes.deadlines or supervisor.deadlines
    writer = make_writer(Made(head_of(prefix, entry.id, model, status), asked, entry.id))
    return Exchange(
        entry,
        groups,
        writer,
        context.ledger,
        context.settings,
        place=wishes.report or context.settings.report,
        unread_s=deadlines.consumer_s,
        field_of=field_of,
    )
