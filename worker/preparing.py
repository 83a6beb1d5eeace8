"""Requests on their way from the pipe to a slot: rendered, tokenised and tried in threads of their own.

So that nobody's next token waits for another one's template or grammar. Each request has a thread; the parent
submits no more than there are slots. What comes out goes into the inbox, like everything that the loop takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from infervisor.protocol.messages import Submit


@dataclass(frozen=True, slots=True)
class Prepared:
    """What became of a request: `value` as `Engine.prepare` returned it, or what it raised."""

    id: int
    value: Any = None
    error: Exception | None = None


class Preparing:
    """The threads that prepare. `start` is called by the work loop alone."""

    def __init__(self, prepare: Callable[[Submit], Any], done: Callable[[Prepared], None]) -> None:
        self._prepare = prepare
        self._done = done
        self._running = 0
        self._changed = threading.Condition()

    def start(self, submit: Submit) -> None:
        """Prepare a request; `done` is called with it, in another thread. Whoever lost interest ignores that."""
        with self._changed:
            self._running += 1
        # A daemon: what a template or a grammar does must not keep the process from exiting.
        thread = threading.Thread(target=self._run, args=(submit,), name="prepare", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # The system has no thread left, or no memory for one: this request's end, and no neighbour's.
            self._finish(Prepared(submit.id, error=error))

    def _run(self, submit: Submit) -> None:
        try:
            prepared = Prepared(submit.id, self._prepare(submit))
        except Exception as error:
            prepared = Prepared(submit.id, error=error)
        except BaseException as error:
            # An engine that wants to end its thread: nobody else would ever hear of the request again.
            prepared = Prepared(submit.id, error=RuntimeError(f"{type(error).__name__}: {error}"))
        self._finish(prepared)

    def _finish(self, prepared: Prepared) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()
        self._done(prepared)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is being prepared; return whether that is so. Only then may the engine be closed."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout_s)
