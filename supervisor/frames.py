"""What each frame of a worker means, and whether it may come now. The first code that a worker's claims reach.

Runs in the loop's thread, called by the link. A frame that the tables don't allow, or whose content can't be, is a
protocol error of the worker, and nothing after it is believed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from infervisor.protocol.errors import RemoteProtocolError
from infervisor.protocol.machines import process as p
from infervisor.protocol.messages import (
    PROTOCOL_VERSION,
    Answered,
    Beat,
    Ended,
    Failed,
    Hello,
    Log,
    Message,
    Progress,
    Ready,
    Released,
    Started,
    Tokens,
    Vectors,
)
from infervisor.protocol.quoting import quoted
from infervisor.supervisor.attempt import Attempt
from infervisor.supervisor.watchdog import Watchdog

if TYPE_CHECKING:
    from infervisor.supervisor.worker import Worker, WorkerOwner


class Frames:
    """The frames of one worker. failed: why it couldn't load. broken: how it broke the protocol."""

    def __init__(self, worker: Worker, owner: WorkerOwner, watchdog: Watchdog) -> None:
        self.failed: Failed | None = None
        self.broken: RemoteProtocolError | None = None
        self._worker = worker
        self._owner = owner
        self._watchdog = watchdog
        self._load_place: tuple[str, float] = ("", -1.0)

    def on_message(self, message: Message) -> None:
        """Apply a frame; one that breaks the protocol, and what follows it, ends the worker."""
        if self.broken is not None or self._worker.state.phase is p.ProcessPhase.EXITED:
            return
        now = time.monotonic_ns()
        try:
            self._dispatch(message, now)
        except RemoteProtocolError as error:
            self.on_broken(error)

    def _dispatch(self, message: Message, now: int) -> None:
        match message:
            case Tokens():
                self._attempt(message.id, message, now).on_tokens(message, now)
            case Vectors():
                self._attempt(message.id, message, now).on_vectors(message, now)
            case Answered():
                # It says nothing of steps, which another thread computes: no proof of life.
                self._worker.queries.on_answered(message)
            case Beat():
                self._watchdog.beat(message, now)
            case Started():
                self._attempt(message.id, message, now).on_started(message, now)
            case Ended():
                self._attempt(message.id, message, now).on_ended(message, now)
                # A paused attempt owed nothing, and the watch may have gone to sleep: now it owes its release.
                self._watchdog.watch()
            case Released():
                self._attempt(message.id, message, now).on_released(message, now)
            case Hello():
                self._on_hello(message)
            case Progress():
                self._on_progress(message)
            case Ready():
                self._on_ready(message)
            case Failed():
                self._apply_frame(p.FailedArrived(), message)
                if self._worker.ready_ns is None:
                    # What was ready has loaded, whatever it says on its way out.
                    self.failed = self.failed or message
            case Log():
                self._owner.worker_logged(self._worker, message)

    def _apply_frame(self, event: object, message: Message) -> None:
        """Step the process table for a frame: what it doesn't allow is the worker's fault."""
        if not p.PROCESS.allows(self._worker.state, event):
            raise RemoteProtocolError(f"{message.name} can't happen while {self._worker.state.phase}")
        self._worker.apply(event)

    def _attempt(self, attempt_id: int, message: Message, now: int) -> Attempt:
        self._watchdog.moved(now)
        attempt = self._worker.attempts.get(attempt_id)
        if attempt is None:
            raise RemoteProtocolError(f"{message.name} for attempt {attempt_id}, which isn't in this worker")
        return attempt

    def _on_hello(self, message: Hello) -> None:
        if message.protocol != PROTOCOL_VERSION:
            raise RemoteProtocolError(
                f"the worker speaks protocol {message.protocol}, this supervisor {PROTOCOL_VERSION}: "
                "install the same version of infervisor in the worker's interpreter"
            )
        self._worker.versions = message.versions
        self._apply_frame(p.HelloArrived(), message)

    def _on_progress(self, message: Progress) -> None:
        if self._worker.state.phase not in (
            p.ProcessPhase.LOADING,
            p.ProcessPhase.TERMINATING,
            p.ProcessPhase.KILLING,
        ):
            raise RemoteProtocolError(f"progress can't happen while {self._worker.state.phase}")
        if (message.phase, message.fraction) != self._load_place:
            # Only what moves extends the budget: a loader that repeats itself hangs.
            self._load_place = (message.phase, message.fraction)
            self._worker.aim_startup()
            self._owner.worker_progressed(self._worker, message)

    def _on_ready(self, message: Ready) -> None:
        slots, context = message.facts.get("slots"), message.facts.get("context_tokens")
        if type(slots) is not int or not 1 <= slots <= 4096 or type(context) is not int or context < 1:
            raise RemoteProtocolError(
                f"ready.facts: slots {quoted(slots)} and context_tokens {quoted(context)}"
            )
        extra = message.facts.get("extra", {})
        if not isinstance(extra, Mapping):
            raise RemoteProtocolError(f"ready.facts: extra {quoted(extra)} instead of a map")
        self._worker.facts = {**message.facts, "fingerprint": message.fingerprint}
        self._apply_frame(p.ReadyArrived(), message)

    def on_broken(self, error: RemoteProtocolError) -> None:
        """The worker broke the protocol: nothing that it says counts any more."""
        if self.broken is None and self._worker.state.phase is not p.ProcessPhase.EXITED:
            # Without what the refused frame was decoded to: up to 70 MB hang on the traceback and the cause, and
            # the error lives as long as whoever shows it.
            error.before = ()
            error.__cause__ = error.__context__ = None
            self.broken = error.with_traceback(None)
            self._worker.apply(p.KillAsked(p.DeathCause.PROTOCOL_ERROR))
