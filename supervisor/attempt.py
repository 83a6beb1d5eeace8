"""One run of a request on one worker: applies the worker's frames to the request.

Every frame is checked against the attempt table and the credit; what breaks them raises
`RemoteProtocolError`, and the worker is replaced.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from infervisor.protocol.endings import EndReason
from infervisor.protocol.errors import FlowControlError, RemoteProtocolError
from infervisor.protocol.machines.attempt import (
    ATTEMPT,
    AttemptPhase,
    AttemptState,
    Began,
    CreditSent,
    EndArrived,
    FreePlace,
    ProcessGone,
    ReleaseArrived,
    RestartClock,
    StopClock,
    TokensArrived,
)
from infervisor.protocol.messages import Credit, Ended, Released, Started, Tokens, Vectors
from infervisor.protocol.quoting import quoted
from infervisor.protocol.timeline import NS_PER_S
from infervisor.supervisor.embedding import read_vectors
from infervisor.supervisor.report import ErrorInfo, Usage
from infervisor.supervisor.request import Chunk, Request

if TYPE_CHECKING:
    from infervisor.supervisor.worker import Worker

MAX_SILENT_TOKENS = 1 << 20
"""In a row: they need no reader, so credit doesn't bound what is kept of them."""

IDLE_SUSPECT_NS = NS_PER_S
"""How long the reader of a suspect may take nothing before others may join it."""

_REASON_OF = {
    "stop": EndReason.STOP,
    "stop_sequence": EndReason.STOP_SEQUENCE,
    "length": EndReason.LENGTH,
    "context_full": EndReason.CONTEXT_FULL,
    "invalid_request": EndReason.INVALID_REQUEST,
    "engine_error": EndReason.ENGINE_ERROR,
    # A worker that says this without having been asked has not finished the answer.
    "cancelled": EndReason.ENGINE_ERROR,
}


class AttemptOwner(Protocol):
    """What an attempt tells the dispatcher."""

    def attempt_started(self, request: Request) -> None:
        """Its prompt sits in a slot."""
        ...

    def attempt_finished(self, request: Request, reason: EndReason) -> None:
        """The worker ended it by itself."""
        ...

    def attempt_went_on(self, request: Request, now: int) -> None:
        """The first tokens since it lost a worker have arrived."""
        ...

    def attempt_acquitted(self, request: Request) -> None:
        """It has outlived what killed its worker, and needn't be alone any more."""
        ...

    def attempt_pauses(self, attempt: Attempt, until_ns: int) -> None:
        """A suspect waits for its reader; from `until_ns` on it keeps nobody out any more, if it still does."""
        ...

    def attempt_released(self, attempt: Attempt, now: int) -> None:
        """Its place is free."""
        ...


class Attempt:
    """One attempt, on one worker."""

    def __init__(
        self, attempt_id: int, request: Request, worker: Worker, owner: AttemptOwner, now: int
    ) -> None:
        self.id = attempt_id
        self.request = request
        self.worker = worker
        self.state = AttemptState()
        self._owner = owner
        self._submitted_ns = now
        self._paused_ns = now
        self._computed_before = len(request.delivered)
        texts = request.input.texts
        self._embeds = texts is not None
        self._vectors = 0
        """How many vectors this attempt has sent, and how many it was asked for."""
        self._vectors_due = 0 if texts is None else len(texts) - len(request.vectors)

    def step(self, event: object, now: int) -> None:
        """Apply an event. Raises `RemoteProtocolError` if the worker may not do that now."""
        if not ATTEMPT.allows(self.state, event):
            raise RemoteProtocolError(
                f"attempt {self.id}: {type(event).__name__} can't happen while {self.state.phase}"
            )
        was_paused = self.state.phase is AttemptPhase.PAUSED
        self.state, effects = ATTEMPT.step(self.state, event, now)
        request = self.request
        is_paused = self.state.phase is AttemptPhase.PAUSED
        if is_paused and not was_paused:
            request.timeline.pause(now)
        elif was_paused and not is_paused:
            request.timeline.go_on(now)
        for effect in effects:
            match effect:
                case RestartClock(budget):
                    request.restart_clock(budget, now)
                case StopClock(budget):
                    request.clocks.stop(budget)
                case FreePlace():
                    self._owner.attempt_released(self, now)

    # --- frames ----------------------------------------------------------------------------------

    def on_started(self, message: Started, now: int) -> None:
        """The prompt fits and sits in a slot."""
        request = self.request
        self.step(Began(request.window.worker_may_compute), now)
        self._note_pause(now)
        if request.resumes:
            request.restored(message.cached_tokens)
        if request.timeline.started_ns is not None:
            return
        request.usage = Usage(prompt_tokens=message.prompt_tokens, cached_tokens=message.cached_tokens)
        if not request.has_ended:
            request.timeline.started_ns = now
            self._owner.attempt_started(request)

    def on_tokens(self, message: Tokens, now: int) -> None:
        """Tokens were computed."""
        if self._embeds:
            raise RemoteProtocolError(f"tokens for attempt {self.id}, which has texts to embed")
        request = self.request
        window = request.window
        count = len(message.tokens)
        window.receive(message.index, count)
        self.step(TokensArrived(window.worker_may_compute), now)
        if request.has_ended:
            return
        request.timeline.receive_tokens(count, now, self._plausible(message.t_ns, now))
        if request.resumes:
            self._owner.attempt_went_on(request, now)
        silent = request.put(message.tokens, now)
        if request.suspicion.is_suspect:
            self._acquit()
            self._note_pause(now)
        if request.silent_tokens > MAX_SILENT_TOKENS:
            raise RemoteProtocolError(f"tokens: more than {MAX_SILENT_TOKENS} in a row have no text")
        if silent:
            self._take(silent, now)

    def on_vectors(self, message: Vectors, now: int) -> None:
        """Texts were embedded. With the last vector all is there: it need not wait for being told of the end."""
        if not self._embeds:
            raise RemoteProtocolError(f"vectors for attempt {self.id}, which has nothing to embed")
        request = self.request
        vectors = read_vectors(message.vectors, len(request.vectors[0]) if request.vectors else None)
        if message.index != self._vectors:
            raise FlowControlError(f"vector {message.index} arrived where {self._vectors} was due")
        self._vectors += len(vectors)
        if self._vectors > self._vectors_due:
            raise FlowControlError(f"vector {self._vectors - 1} arrived for {self._vectors_due} texts")
        # Never paused: it owes either another vector or its end.
        self.step(TokensArrived(credit_left=True), now)
        if request.has_ended:
            return
        # Stamps alone: vectors aren't tokens, and have no rate that could be learned from.
        request.timeline.receive_tokens(0, now, self._plausible(message.t_ns, now))
        if request.resumes:
            self._owner.attempt_went_on(request, now)
        request.vectors.extend(vectors)
        if request.suspicion.is_suspect:
            self._acquit()
        if self._vectors == self._vectors_due:
            # Race "it dies between its last vector and its end": nothing is left that another one could do.
            self._owner.attempt_finished(request, EndReason.STOP)

    @property
    def is_idle_suspect(self) -> bool:
        """Whether it is a suspect that computes nothing because its reader has taken nothing for a while.

        It can't kill its worker then, and mustn't keep everybody else out of it.
        """
        if self.state.phase is not AttemptPhase.PAUSED or not self.request.suspicion.is_suspect:
            return False
        return time.monotonic_ns() - self._paused_ns >= IDLE_SUSPECT_NS

    def _note_pause(self, now: int) -> None:
        if self.state.phase is AttemptPhase.PAUSED and self.request.suspicion.is_suspect:
            self._paused_ns = now
            self._owner.attempt_pauses(self, now + IDLE_SUSPECT_NS)

    def _acquit(self) -> None:
        request = self.request
        request.suspicion = request.suspicion.progressed(request.progress)
        if not request.suspicion.is_suspect:
            self._owner.attempt_acquitted(request)

    def on_ended(self, message: Ended, now: int) -> None:
        """The worker ended it."""
        if self._embeds and self._vectors < self._vectors_due and _REASON_OF[message.why].is_natural:
            raise RemoteProtocolError(
                f"ended: {message.why}, with {self._vectors} vectors of {self._vectors_due} texts"
            )
        self.step(EndArrived(), now)
        request = self.request
        try:
            usage = Usage(**message.usage)
        except TypeError as error:
            # Its text holds the unknown name, which the worker chose: whole and unescaped.
            raise RemoteProtocolError(f"ended.usage: {quoted(str(error), 200)}") from error
        if request.resumes:
            # What a worker takes over from the one before, it neither computed nor found in a cache of its own.
            computed = self._computed_before + usage.computed_tokens
            usage = replace(usage, computed_tokens=computed, cached_tokens=request.usage.cached_tokens)
        if self._embeds:
            # What its first worker had is the whole; a later one has only what is left. Nothing is sampled.
            usage = Usage(prompt_tokens=request.usage.prompt_tokens)
        request.usage = usage
        if request.has_ended:
            return
        if request.resumes:
            self._owner.attempt_went_on(request, now)
        if message.error is not None:
            request.error = _error_info(message)
        request.put_leftover(message.text, now)
        self._owner.attempt_finished(request, _REASON_OF[message.why])

    def on_released(self, message: Released, now: int) -> None:
        """Its slot is free."""
        request = self.request
        if request.timeline.cancel_requested_ns is not None and message.noticed_ns is not None:
            request.timeline.cancel_noticed_ns = self._plausible(message.noticed_ns, now)
        # The worker's own stamp, on the clock that both ends share: the frame may have waited in the pipe. But
        # nothing is called released before the last token, or the end, that was seen.
        timeline = request.timeline
        seen_ns = max(timeline.last_token_ns or 0, timeline.ended_ns or 0)
        freed_ns = max(self._plausible(message.freed_ns, now), seen_ns)
        self.step(ReleaseArrived(), freed_ns)

    def _plausible(self, stamp_ns: int, now: int) -> int:
        """Return a worker's stamp, moved into the time in which it can have been made."""
        return min(max(stamp_ns, self._submitted_ns), now)

    def on_process_gone(self, now: int) -> None:
        """The worker's exit was collected."""
        request = self.request
        if self.state.phase is not AttemptPhase.ENDING:
            # It never came to tell its counts: what arrived is what is known.
            arrived = request.timeline.tokens
            request.usage = replace(request.usage, completion_tokens=arrived, computed_tokens=arrived)
        self.step(ProcessGone(), now)

    # --- the reader's side -----------------------------------------------------------------------

    def take(self, now: int) -> Chunk:
        """Hand the next chunk to the reader and send credit when it is worth a frame."""
        chunk, weight = self.request.take(now)
        if weight:
            self._take(weight, now)
        return chunk

    def _take(self, count: int, now: int) -> None:
        request = self.request
        limit = request.window.take(count)
        if limit is not None and not request.has_ended:
            self.worker.link.send(Credit(self.id, limit))
            was_paused = self.state.phase is AttemptPhase.PAUSED
            self.step(CreditSent(), now)
            if was_paused:
                self.worker.owes_again(self, now)

    @property
    def owes_a_step(self) -> bool:
        """Whether the worker has something to do for it: compute, or release it."""
        return self.state.is_runnable or self.state.phase == "ending"

    @property
    def told_phase(self) -> str:
        """Its phase as callers know it: from the submit to the first token it is prefill."""
        phase = self.state.phase
        return "prefill" if phase is AttemptPhase.SUBMITTED else str(phase)

    @property
    def step_phase(self) -> str:
        """Which kind of step it waits for: prefill or decode; or "preparing", before it sits in a slot."""
        if self.state.phase is AttemptPhase.SUBMITTED:
            return "preparing"
        return "prefill" if self._embeds or self.state.phase is AttemptPhase.PREFILL else "decode"


def _error_info(message: Ended) -> ErrorInfo:
    given = message.error or {}
    field = given.get("field")
    return ErrorInfo(
        code=str(given.get("code", message.why)),
        message=str(given.get("message", message.why)),
        detail=str(given.get("detail", "")),
        field=field if isinstance(field, str) else None,
    )
