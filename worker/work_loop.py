"""The loop that owns the engine: takes requests, steps the runnable ones, sends what comes out.

Runs in the main thread, after loading. Its heart is `run`; everything in it is bounded but a step, and a
step can be cut from outside (`worker.abort`). It waits only when nothing is runnable.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from infervisor.protocol.errors import InvalidRequest, LocalProtocolError, RemoteProtocolError
from infervisor.protocol.messages import (
    Cancel,
    Credit,
    Drain,
    Ended,
    Query,
    Released,
    Shutdown,
    Started,
    Submit,
    Tokens,
    Vectors,
)
from infervisor.worker.abort import Abort
from infervisor.worker.attempt import Attempt
from infervisor.worker.engine import Broken, Embedded, Engine, ModelFacts, Opened, Outcome, Prefilled
from infervisor.worker.inbox import Event, Inbox
from infervisor.worker.outbox import Outbox, sendable
from infervisor.worker.preparing import Prepared, Preparing
from infervisor.worker.queries import Queries
from infervisor.worker.scheduler import Scheduler, Share
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
        step_budget_s: float | None = None,
    ) -> None:
        self._engine = engine
        self._facts = facts
        self._scheduler = Scheduler(
            facts.largest_slice_tokens, fixed_slices=facts.fixed_slices, budget_s=step_budget_s
        )
        self._preparing = Preparing(engine.prepare, inbox.put)
        self._queries = Queries(engine, outbox)
        self._inbox = inbox
        self._outbox = outbox
        self._abort = abort
        self._snapshots = snapshots
        self._arrived: dict[int, Attempt] = {}
        """Attempts that are being prepared."""
        self._waiting: list[Attempt] = []
        """Prepared ones without a slot, in the order in which they get one."""
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
            runnable = {attempt.id: attempt for attempt in self._active.values() if attempt.runnable}
            if runnable:
                self._step(runnable, self._scheduler.plan([each.want for each in runnable.values()]))
            self._beat()
            if not runnable:
                self._wait()
        for attempt in list(self._all()):
            self._end(attempt, "cancelled")

    def settle(self, timeout_s: float) -> bool:
        """Wait for other threads' use of the engine; return whether it may be closed."""
        return self._queries.close(timeout_s) and self._preparing.wait_idle(timeout_s)

    def _all(self) -> Iterator[Attempt]:
        yield from self._arrived.values()
        yield from self._waiting
        yield from self._active.values()

    # --- what the parent says ----------------------------------------------------------------------

    def _take_inbox(self) -> None:
        for message in self._inbox.take():
            self._take(message)

    def _take(self, message: Event) -> None:
        match message:
            case Submit():
                self._arrive(Attempt.arrived(message))
            case Prepared():
                self._prepared(message)
            case Credit():
                # Credit for an attempt that has ended was sent before the parent knew: nothing to do.
                attempt = self._find(message.id)
                if attempt is not None:
                    attempt.grant.raise_to(message.limit)
            case Cancel():
                pass  # it took effect in the thread that read it; here it only woke the loop
            case Query():
                self._queries.take(message)
            case Drain():
                self._draining = True
            case Shutdown():
                self._shutting_down = True
            case _:
                raise RemoteProtocolError(f"{message.name} came after the model was loaded")

    def _arrive(self, attempt: Attempt) -> None:
        self._arrived[attempt.id] = attempt
        if self._draining:
            refusal = {"code": "draining", "message": "the worker is draining and takes no more requests"}
            self._end(attempt, "engine_error", error=refusal)
            return
        try:
            attempt.check()
        except InvalidRequest as error:
            self._refuse(attempt, error)
        else:
            self._preparing.start(attempt.submit)

    def _prepared(self, prepared: Prepared) -> None:
        attempt = self._arrived.get(prepared.id)
        if attempt is None:
            return  # it was cancelled meanwhile
        if isinstance(prepared.error, InvalidRequest):
            self._refuse(attempt, prepared.error)
        elif prepared.error is not None:
            self._end(attempt, "engine_error", error=self._describe("preparing", prepared.error))
        else:
            del self._arrived[attempt.id]
            attempt.prepared = prepared.value
            self._waiting.append(attempt)
            # Ids grow: of equals, the one that came first. One that is still being prepared keeps nobody waiting.
            self._waiting.sort(key=lambda each: (-each.submit.priority, each.id))

    def _refuse(self, attempt: Attempt, error: InvalidRequest) -> None:
        message = sendable(str(error))[:MESSAGE_CHARACTERS]
        self._end(
            attempt, "invalid_request", error={"code": error.code, "message": message, "field": error.field}
        )

    def _find(self, attempt_id: int) -> Attempt | None:
        attempt = self._active.get(attempt_id) or self._arrived.get(attempt_id)
        if attempt is not None:
            return attempt
        return next((waiting for waiting in self._waiting if waiting.id == attempt_id), None)

    # --- between steps -----------------------------------------------------------------------------

    def _drop_cancelled(self) -> None:
        if not self._abort.any_cancelled:
            return
        for attempt in list(self._all()):
            if self._abort.noticed_ns(attempt.id) is not None:
                self._end(attempt, "cancelled")

    def _open_waiting(self) -> None:
        while self._waiting and self._free_slots:
            self._open(self._waiting[0])

    def _open(self, attempt: Attempt) -> None:
        try:
            opened = self._engine.open(self._free_slots, attempt.submit, attempt.prepared)
        except InvalidRequest as error:
            self._refuse(attempt, error)
        except Exception as error:
            self._end(attempt, "engine_error", error=self._describe("opening", error))
        else:
            self._waiting.remove(attempt)
            self._begin(attempt, opened)

    def _begin(self, attempt: Attempt, opened: Opened) -> None:
        leader = None
        if opened.after is not None:
            leader = next((each for each in self._active.values() if each.slot == opened.after[0]), None)
        attempt.opened(opened, self._facts.context_tokens, leader)
        attempt.prepared = None
        self._free_slots.remove(opened.slot)
        self._active[attempt.id] = attempt
        # Race "died between its last token and its end": all was delivered, only the end has to be told again.
        why = attempt.already_ended
        if why is None and self._snapshots is not None and attempt.submit.texts is None:
            attempt.in_memory(self._snapshots.open(opened.slot, attempt.submit.snapshot))
        self._outbox.send(
            Started(
                time.monotonic_ns(), attempt.id, attempt.slot, attempt.cached_tokens, attempt.prompt_tokens
            )
        )
        if why is not None:
            self._end_naturally(attempt, why)

    # --- a step ------------------------------------------------------------------------------------

    def _step(self, runnable: dict[int, Attempt], shares: Sequence[Share]) -> None:
        wanted = self._abort.begin_step([share.id for share in shares])
        if len(wanted) < len(shares):
            shares = [share for share in shares if share.id in wanted]
        members = [runnable[share.id] for share in shares]
        if not members:
            self._abort.end_step()
            return
        started_ns = time.monotonic_ns()
        try:
            outcomes = self._engine.step(
                [attempt.slot for attempt in members], [share.tokens for share in shares]
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
        self._measure(members, outcomes, now_ns - started_ns)
        for attempt, outcome in zip(members, outcomes, strict=True):
            self._send_outcome(attempt, outcome, now_ns)
        if self._snapshots is not None:
            # After the step and after its tokens have gone: no grace counts it, no reader waits for it.
            open_ones = [(one.slot, not one.prefilled) for one in members if one.id in self._active]
            self._snapshots.worked(open_ones, (now_ns - started_ns) / 1e9 / len(members))

    def _measure(self, members: Sequence[Attempt], outcomes: Sequence[Outcome], took_ns: int) -> None:
        reading = read_tokens = 0
        for attempt, outcome in zip(members, outcomes, strict=True):
            if isinstance(outcome, (Prefilled, Embedded)):
                copied = outcome.copied_tokens if isinstance(outcome, Prefilled) else 0
                reading += 1
                read_tokens += max(0, outcome.done_tokens - copied - attempt.read_tokens)
        self._scheduler.measured(len(members) - reading, read_tokens, took_ns / 1e9)
        phase = "prefill" if reading else "decode"
        if took_ns > self._longest_ns.get(phase, 0):
            self._longest_ns[phase] = took_ns

    def _send_outcome(self, attempt: Attempt, outcome: Outcome, now_ns: int) -> None:
        # Race "cancelled while the step ran, but it finished": its token was computed, so it is sent; a
        # natural end stays one. What else is cancelled ends in the next round.
        if isinstance(outcome, Broken):
            message = sendable(outcome.message)[:MESSAGE_CHARACTERS]
            self._end(attempt, "engine_error", error={"code": "engine_error", "message": message})
            return
        try:
            taken = attempt.take(outcome)
            if taken is None:
                return
            if taken.tokens:
                self._send_tokens(now_ns, attempt.id, taken.index, taken.tokens)
            for number, vector in enumerate(taken.vectors, taken.index):
                self._outbox.send(Vectors(now_ns, attempt.id, number, [vector]))
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
            attempt.is_open = False
            self._engine.release(attempt.slot)
            self._free_slots.append(attempt.slot)
            self._scheduler.forget(attempt.id)
        elif self._arrived.pop(attempt.id, None) is None and attempt in self._waiting:
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
        state = (self._steps, len(self._active), len(self._waiting) + len(self._arrived))
        if state != self._told and self._outbox.beat_due_in_s() <= 0:
            self._outbox.beat(state[0], self._longest_ns, state[1], state[2])
            self._told = state

    def _wait(self) -> None:
        # With a beat owed, wait only until it is due: so the parent hears of the end of activity.
        owed = self._told != (self._steps, len(self._active), len(self._waiting) + len(self._arrived))
        self._inbox.wait(self._outbox.beat_due_in_s() if owed else None)
