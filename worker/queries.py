"""Questions that compute nothing, answered beside the steps: a text's tokens, and back.

One thread of its own takes them one after the other, so that a long text holds up neither the work loop nor the
engine, only the questions behind it; the parent bounds how many there are. It sends its answers itself.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from typing import Any

from infervisor.protocol.errors import InvalidRequest, LocalProtocolError
from infervisor.protocol.messages import Answered, Query
from infervisor.worker.engine import AnswersQueries, Engine
from infervisor.worker.exits import start_thread
from infervisor.worker.outbox import Outbox, sendable

MESSAGE_CHARACTERS = 2_048
DETAIL_CHARACTERS = 32_768


class Queries:
    """The questions to one engine. `take` and `close` are called by the work loop's thread."""

    def __init__(self, engine: Engine, outbox: Outbox) -> None:
        self._engine = engine
        self._outbox = outbox
        self._changed = threading.Condition()
        self._waiting: deque[Query] = deque()
        self._has_thread = False
        self._is_busy = False
        self._is_closed = False

    def take(self, query: Query) -> None:
        """Answer it soon; returns at once. After `close` nothing is answered any more."""
        with self._changed:
            if self._is_closed:
                return
            self._waiting.append(query)
            self._changed.notify_all()
            has_thread, self._has_thread = self._has_thread, True
        if not has_thread:
            start_thread("queries", self._run)

    def close(self, timeout_s: float) -> bool:
        """Drop what waits, and wait until nothing is being answered; return whether that is so.

        Only then may the engine be closed: what an answer reads would be gone.
        """
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._is_busy, timeout_s)

    def _run(self) -> None:
        while (query := self._next()) is not None:
            answer = self._answer(query)
            # Race "closed while it was computed": nobody listens any more, and the pipe may be full for good.
            if not self._is_closed:
                self._send(answer)

    def _next(self) -> Query | None:
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_closed or self._waiting)
            if self._is_closed:
                return None
            self._is_busy = True
            return self._waiting.popleft()

    def _answer(self, query: Query) -> Answered:
        value, error = None, None
        try:
            value = self._ask_engine(query)
        except InvalidRequest as refusal:
            error = _error(refusal.code, str(refusal), field=refusal.field)
        except Exception as failure:
            error = _error(
                "engine_error",
                f"the engine failed at the query {query.kind}: {type(failure).__name__}: {failure}",
                detail=sendable("".join(traceback.format_exception(failure)))[-DETAIL_CHARACTERS:],
            )
        return Answered(time.monotonic_ns(), query.id, value, error)

    def _ask_engine(self, query: Query) -> Any:
        if not isinstance(self._engine, AnswersQueries):
            raise InvalidRequest("this engine answers no queries: it has no tokens to tell of")
        return self._engine.answer(query.kind, query.arguments)

    def _send(self, answer: Answered) -> None:
        try:
            self._outbox.send(answer)
        except LocalProtocolError as error:
            # Frames from a worker are small, so that a parent can read them without waiting.
            text = f"the answer is too long for one frame: ask in parts ({error})"
            refusal = _error(InvalidRequest.code, text)
            self._outbox.send(Answered(answer.t_ns, answer.id, None, refusal))


def _error(code: str, message: str, *, field: str | None = None, detail: str = "") -> dict[str, Any]:
    return {"code": code, "message": sendable(message)[:MESSAGE_CHARACTERS], "field": field, "detail": detail}
