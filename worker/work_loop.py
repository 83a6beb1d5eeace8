"""The loop that owns the engine: takes requests, steps the runnable ones, sends what comes out.

Runs in the main thread, after loading. Its heart is `run`; everything in it is bounded but a step, and a
step can be cut from outside (`worker.abort`). It waits only when nothing is runnable.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from infervisor.protocol.errors import InvalidRequest, LocalProtocolError, RemoteProtocolError
from infervisor.protocol.messages import (
    Cancel,
    Credit,
    Drain,
    Ended,
    Message,
    Released,
    Shutdown,
    Started,
    Submit,
    Tokens,
)
from infervisor.worker.abort import Abort, AttemptCancelled, T
from infervisor.worker.attempt import Attempt
from infervisor.worker.engine import Engine, ModelFacts, Opened, Outcome, Prefilled
from infervisor.worker.inbox import Inbox
from infervisor.worker.outbox import Outbox, sendable
from infervisor.worker.snapshots import Snapshots

DETAIL_CHARACTERS = 32_768
MESSAGE_CHARACTERS = 2_048


class WorkLoop:
    """One loaded engine and the attempts on it."""

    def __init__(
        self,
        engine: Engine,
        facts: ModelFacts,
        inbox: Inbox,
        outbox: Outbox,
        abort: Abort,
        snapshots: Snapshots | None = None,
    ) -> None:
        self._engine = engine
        self._facts = facts
        self._inbox = inbox
        self._outbox = outbox
        self._abort = abort
        self._snapshots = snapshots
        self._waiting: deque[Attempt] = deque()
        self._active: dict[int, Attempt] = {}
        self._free_slots = list(range(facts.slots))
        self._draining = False
        self._shutting_down = False
        self._steps = 0
        self._longest_ns: dict[str, int] = {}
        self._told: tuple[int, int, int] | None = None
        """(steps, active, waiting) of the last beat."""

    def run(self) -> None:
        """Serve until shutdown is asked for; then release everything. The caller closes the engine.

        Raises `RemoteProtocolError` for a message that the parent may not send now, and whatever the engine's
        `release` raises: a slot that can't be freed is a defect that only a new process cures.
        """
        while True:
            self._take_inbox()
            if self._shutting_down:
                break
            self._drop_cancelled()
            self._open_waiting()
            runnable = [attempt for attempt in self._active.values() if attempt.runnable]
            if runnable:
                self._step(runnable)
            self._beat()
            if not runnable:
                self._wait()
        for attempt in [*self._waiting, *self._active.values()]:
            self._end(attempt, "cancelled")

    # --- what the parent says ----------------------------------------------------------------------

    def _take_inbox(self) -> None:
        for message in self._inbox.take():
            self._take(message)

    def _take(self, message: Message) -> None:
        match message:
            case Submit():
                self._arrive(Attempt.arrived(message))
            case Credit():
                # Credit for an attempt that has ended was sent before the parent knew: nothing to do.
                attempt = self._find(message.id)
                if attempt is not None:
                    attempt.grant.raise_to(message.limit)
            case Cancel():
                pass  # it took effect in the thread that read it; here it only woke the loop
            case Drain():
                self._draining = True
            case Shutdown():
                self._shutting_down = True
            case _:
                raise RemoteProtocolError(f"{message.name} came after the model was loaded")

    def _arrive(self, attempt: Attempt) -> None:
        if self._draining:
            refusal = {"code": "draining", "message": "the worker is draining and takes no more requests"}
            self._end(attempt, "engine_error", error=refusal)
        else:
            self._waiting.append(attempt)

    def _find(self, attempt_id: int) -> Attempt | None:
        attempt = self._active.get(attempt_id)
        if attempt is not None:
            return attempt
        return next((waiting for waiting in self._waiting if waiting.id == attempt_id), None)

    # --- between steps -----------------------------------------------------------------------------

    def _drop_cancelled(self) -> None:
        if not self._abort.any_cancelled:
            return
        for attempt in [*self._waiting, *self._active.values()]:
            if self._abort.noticed_ns(attempt.id) is not None:
                self._end(attempt, "cancelled")

    def _open_waiting(self) -> None:
        while self._waiting and self._free_slots:
            self._open(self._waiting[0], self._free_slots[0])

    def _open(self, attempt: Attempt, slot: int) -> None:
        def stoppable(function: Callable[[], T]) -> T:
            return self._abort.stoppable(attempt.id, function)

        try:
            attempt.check()
            opened = self._engine.open(slot, attempt.submit, stoppable)
        except InvalidRequest as error:
            message = sendable(str(error))[:MESSAGE_CHARACTERS]
            refusal = {"code": error.code, "message": message, "field": error.field}
            self._end(attempt, "invalid_request", error=refusal)
        except AttemptCancelled:
            self._end(attempt, "cancelled")
        except Exception as error:
            self._end(attempt, "engine_error", error=self._describe("opening", error))
        else:
            self._waiting.popleft()
            self._free_slots.remove(slot)
            self._active[attempt.id] = attempt
            self._begin(attempt, slot, opened)

    def _begin(self, attempt: Attempt, slot: int, opened: Opened) -> None:
        attempt.opened(slot, opened, self._facts.context_tokens)
        # Race "died between its last token and its end": all was delivered, only the end has to be told again.
        why = attempt.already_ended
        if why is None and self._snapshots is not None:
            attempt.restored(self._snapshots.open(slot, attempt.submit.snapshot))
        self._outbox.send(
            Started(time.monotonic_ns(), attempt.id, slot, attempt.cached_tokens, attempt.prompt_tokens)
        )
        if why is not None:
            self._end_naturally(attempt, why)

    # --- a step ------------------------------------------------------------------------------------

    def _step(self, runnable: Sequence[Attempt]) -> None:
        wanted = self._abort.begin_step([attempt.id for attempt in runnable])
        members = runnable
        if len(wanted) < len(runnable):
            members = [attempt for attempt in runnable if attempt.id in wanted]
        if not members:
            self._abort.end_step()
            return
        started_ns = time.monotonic_ns()
        try:
            outcomes = self._engine.step(
                [attempt.slot for attempt in members], [attempt.allowance for attempt in members]
            )
        except Exception as error:
            self._abort.end_step()
            described = self._describe("a step", error)
            for attempt in members:
                self._end(attempt, "engine_error", error=described)
            return
        self._abort.end_step()
        self._steps += 1
        # Race "cancelled at the last node": a finished step can come back as cut, even with nobody of it
        # cancelled any more. The cancelled are dropped and the rest runs again, in the next round.
        if outcomes is None:
            return
        now_ns = time.monotonic_ns()
        self._measure(outcomes, now_ns - started_ns)
        for attempt, outcome in zip(members, outcomes, strict=True):
            self._send_outcome(attempt, outcome, now_ns)
        if self._snapshots is not None:
            # After the step and after its tokens have gone: no grace counts it, no reader waits for it.
            open_ones = [(one.slot, not one.prefilled) for one in members if one.id in self._active]
            self._snapshots.worked(open_ones, (now_ns - started_ns) / 1e9 / len(members))

    def _measure(self, outcomes: Sequence[Outcome], took_ns: int) -> None:
        prefill = any(isinstance(outcome, Prefilled) for outcome in outcomes)
        phase = "prefill" if prefill else "decode"
        if took_ns > self._longest_ns.get(phase, 0):
            self._longest_ns[phase] = took_ns

    def _send_outcome(self, attempt: Attempt, outcome: Outcome, now_ns: int) -> None:
        # Race "cancelled while the step ran, but it finished": its token was computed, so it is sent; a
        # natural end stays one. What else is cancelled ends in the next round.
        try:
            taken = attempt.take(outcome)
            if taken is None:
                return
            if taken.tokens:
                self._send_tokens(now_ns, attempt.id, taken.index, taken.tokens)
        except LocalProtocolError as error:
            # What the engine gave can't be sent: the request's end, not the process's.
            self._end(attempt, "engine_error", error=self._describe("sending a token", error))
            return
        if taken.why is not None:
            self._end_naturally(attempt, taken.why)

    def _send_tokens(self, now_ns: int, attempt_id: int, index: int, tokens: Sequence[Sequence[Any]]) -> None:
        try:
            self._outbox.send(Tokens(now_ns, attempt_id, index, tokens))
        except LocalProtocolError:
            # Each may fit a frame where all of a step don't.
            middle = len(tokens) // 2
            if not middle:
                raise
            self._send_tokens(now_ns, attempt_id, index, tokens[:middle])
            self._send_tokens(now_ns, attempt_id, index + middle, tokens[middle:])

    # --- ends --------------------------------------------------------------------------------------

    def _end_naturally(self, attempt: Attempt, why: str) -> None:
        text = attempt.text.finish()
        self._end(attempt, "stop_sequence" if attempt.text.stopped else why, text=text)

    def _end(
        self, attempt: Attempt, why: str, *, text: str = "", error: dict[str, Any] | None = None
    ) -> None:
        """Say that the attempt ends, free its slot if it has one, and say that it is free."""
        self._outbox.send(Ended(time.monotonic_ns(), attempt.id, why, text, attempt.usage(), error))
        if self._active.pop(attempt.id, None) is not None:
            self._engine.release(attempt.slot)
            self._free_slots.append(attempt.slot)
        elif attempt in self._waiting:
            self._waiting.remove(attempt)
        freed_ns = time.monotonic_ns()
        noticed_ns = self._abort.forget(attempt.id)
        self._outbox.send(Released(time.monotonic_ns(), attempt.id, noticed_ns, freed_ns))
        if self._snapshots is not None:
            self._snapshots.close(attempt.slot)

    def _describe(self, doing: str, error: Exception) -> dict[str, Any]:
        message = sendable(f"the engine failed at {doing}: {type(error).__name__}: {error}")
        detail = sendable("".join(traceback.format_exception(error)))
        self._outbox.log("error", message)
        return {
            "code": "engine_error",
            "message": message[:MESSAGE_CHARACTERS],
            "detail": detail[-DETAIL_CHARACTERS:],
        }

    # --- beats -------------------------------------------------------------------------------------

    def _beat(self) -> None:
        state = (self._steps, len(self._active), len(self._waiting))
        if state != self._told and self._outbox.beat_due_in_s() <= 0:
            self._outbox.beat(state[0], self._longest_ns, state[1], state[2])
            self._told = state

    def _wait(self) -> None:
        # With a beat owed, wait only until it is due: so the parent hears of the end of activity.
        owed = self._told != (self._steps, len(self._active), len(self._waiting))
        self._inbox.wait(self._outbox.beat_due_in_s() if owed else None)
