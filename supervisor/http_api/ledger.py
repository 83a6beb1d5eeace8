"""Every HTTP request that asks a model: those in progress, and the last ones that are finished.

Owns their list, and whether new ones are taken. Decides nothing about them but a cancel that somebody asks for.
Runs in the event loop's thread.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import anyio

from infervisor import Report, Stream
from infervisor.supervisor.http_api.asked import Asked
from infervisor.supervisor.http_api.errors import HttpRefused

_log = logging.getLogger("infervisor.http")

PHASES = ("new", "queued", "prefill", "decode", "paused", "ending", "released")
"""Of a choice, in the order in which they come; a request is where its least advanced choice is."""


class Entry:
    """One HTTP request. status: of the answer, once it is told."""

    def __init__(
        self,
        request_id: str,
        endpoint: str,
        model: str,
        streams: Sequence[Stream],
        *,
        is_streaming: bool = False,
        client_request_id: str | None = None,
        asked: Asked | None = None,
    ) -> None:
        self.id = request_id
        self.endpoint = endpoint
        self.model = model
        self.is_streaming = is_streaming
        self.client_request_id = client_request_id
        self.asked = asked
        """What was asked for; forgotten when it is finished."""
        self.created_s = time.time()
        self.status: int | None = None
        self.is_finished = False
        self.streams: tuple[Stream, ...] = tuple(streams)
        self._last: dict[str, Any] = {}

    def phase(self) -> str:
        """Return where it is: see `Stream.phase`."""
        if self.is_finished:
            return "released"
        return min((stream.phase for stream in self.streams), key=PHASES.index, default="new")

    def reports(self) -> list[Report]:
        """Return what is known of each choice while it is in progress."""
        return [stream.report for stream in self.streams]

    def tokens(self) -> int:
        """Return how many tokens have come so far, of all choices."""
        return sum(stream.report.timeline.tokens for stream in self.streams)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: see docs/serve.md."""
        if self.is_finished:
            return self._last
        return {
            "id": self.id,
            "endpoint": self.endpoint,
            "model": self.model,
            "client_request_id": self.client_request_id,
            "stream": self.is_streaming,
            "created_s": self.created_s,
            "finished": False,
            "status": self.status,
            "phase": self.phase(),
            "choices": [
                {"index": index, "phase": stream.phase, "report": stream.report.to_dict()}
                for index, stream in enumerate(self.streams)
            ],
        }

    def finish(self) -> None:
        """Keep what is told of it, and let go of everything else."""
        last = self.to_dict()
        self.is_finished = True
        self._last = {**last, "finished": True}
        self.streams, self.asked = (), None


class Ledger:
    """Requests by id. keep: how many finished ones stay. on_finished: called once for each, still whole."""

    def __init__(self, keep: int, on_finished: Callable[[Entry], None] | None = None) -> None:
        self.is_draining = False
        self._live: dict[str, Entry] = {}
        self._finished: deque[Entry] = deque(maxlen=keep)
        self._on_finished = on_finished
        self._idle: anyio.Event | None = None
        self._tokens: Counter[str] = Counter()
        """Of finished requests, by model."""

    def add(self, entry: Entry) -> None:
        """Take in a request. Raises `HttpRefused` when the service is about to end."""
        self.check_open()
        self._live[entry.id] = entry

    def check_open(self) -> None:
        """Raise `HttpRefused` if no new request is taken."""
        if self.is_draining:
            raise HttpRefused("shutting_down", "The service is shutting down. Ask again when it is back.")

    def finished(self, entry: Entry) -> None:
        """Its answer is sent, or its client is gone, and its resources are free. Idempotent."""
        if self._live.pop(entry.id, None) is None:
            return
        if self._on_finished is not None:
            try:
                self._on_finished(entry)
            except Exception:
                _log.exception("on_finished failed for %s", entry.id)
        self._tokens[entry.model] += entry.tokens()
        entry.finish()
        self._finished.append(entry)
        if not self._live and self._idle is not None:
            self._idle.set()

    def live(self) -> list[Entry]:
        """Return the requests in progress, oldest first."""
        return list(self._live.values())

    def entries(self) -> list[Entry]:
        """Return the requests in progress and the last finished ones, newest first."""
        return sorted((*self._live.values(), *self._finished), key=lambda entry: -entry.created_s)

    def tokens(self, model: str) -> int:
        """Return how many tokens a model has given so far."""
        return self._tokens[model] + sum(entry.tokens() for entry in self.live() if entry.model == model)

    def get(self, request_id: str) -> Entry | None:
        """Return the request with this id, or None if it isn't known any more."""
        live = self._live.get(request_id)
        return live or next((entry for entry in self._finished if entry.id == request_id), None)

    def cancel(self, request_id: str) -> bool:
        """Stop a request as `cancelled`; return whether there was something to stop."""
        entry = self._live.get(request_id)
        if entry is None or all(stream.end_reason is not None for stream in entry.streams):
            return False
        for stream in entry.streams:
            stream.cancel()
        return True

    def begin_drain(self) -> None:
        """Take no new requests from now on."""
        self.is_draining = True

    async def wait_idle(self) -> None:
        """Return when no request is in progress. Safe to cancel."""
        while self._live:
            # One for all who wait, until it is set.
            if self._idle is None or self._idle.is_set():
                self._idle = anyio.Event()
            await self._idle.wait()
