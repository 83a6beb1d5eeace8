"""The one owner of requests and queue: every decision about them is carried out here.

Runs in the event loop's thread, synchronously: frames, alarms and callers' calls come one at a time, and that
order is the order in which end reasons are named. Nothing here awaits.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from infervisor.protocol.codec import MAX_TO_WORKER_BYTES
from infervisor.protocol.deadlines import TIMEOUT_OF, Budget
from infervisor.protocol.endings import EndReason
from infervisor.protocol.errors import (
    InfervisorError,
    InvalidRequest,
    LocalProtocolError,
    Overloaded,
    ShuttingDown,
)
from infervisor.protocol.machines import request as r
from infervisor.protocol.machines.process import DeathCause
from infervisor.protocol.timeline import NS_PER_S
from infervisor.supervisor import events
from infervisor.supervisor.against_facts import problem
from infervisor.supervisor.attempt import Attempt
from infervisor.supervisor.end_errors import error_of, sentence_of
from infervisor.supervisor.escalator import Escalator, only_the_signal_was_heard
from infervisor.supervisor.exit_report import ExitReport
from infervisor.supervisor.link import READS_A_TURN
from infervisor.supervisor.pool import Pool
from infervisor.supervisor.rates import Rates
from infervisor.supervisor.report import ErrorInfo
from infervisor.supervisor.request import Chunk, Request
from infervisor.supervisor.request_input import RequestInput
from infervisor.supervisor.request_queue import RequestQueue
from infervisor.supervisor.resume import OnCrash
from infervisor.supervisor.settings import Deadlines, Escalation, PoolSettings
from infervisor.supervisor.survival import Survival
from infervisor.supervisor.timers import Timers
from infervisor.supervisor.worker import Worker

if TYPE_CHECKING:
    from infervisor.supervisor.snapshot_memory import SnapshotMemory

log = logging.getLogger("infervisor")

MOST_DELIVERED = (MAX_TO_WORKER_BYTES >> 4) - 1
"""The most entries that an array to a worker may have."""

_attempt_ids = itertools.count(1)
"""Attempt ids of this process: never reused, whichever supervisor draws them."""


class Dispatcher:
    """All requests of one supervisor. `listeners` are called for everything worth telling."""

    def __init__(
        self,
        *,
        make_worker: Callable[[Pool], Worker],
        start_task: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
        pool: PoolSettings,
        escalation: Escalation,
        max_queue: int,
        max_wait_s: float | None,
        max_resumes: int,
        snapshots: SnapshotMemory | None,
        listeners: Sequence[Callable[[events.Event], None]],
    ) -> None:
        self.timers = Timers(self._parent_stalled)
        self.pool = Pool(pool, make_worker, start_task, self, self.timers)
        self.requests: dict[int, Request] = {}
        self.attempts: dict[int, Attempt] = {}
        """The attempt of each request that is in a worker, by request id."""
        self.is_closing = False
        self.escalator = Escalator(escalation, self.timers, self.attempts, self.emit)
        self._suspect_alarm = self.timers.alarm(self.pump)
        self.rates = Rates()
        self.queue = RequestQueue(max_queue, max_wait_s, self.rates)
        self._survival = Survival(self, max_resumes)
        self._snapshots = snapshots
        self._listeners = listeners
        self._request_ids = itertools.count(1)

    def emit(self, event: events.Event) -> None:
        """Tell the user. A callback that raises is logged and harms nothing."""
        # A copy: a listener may remove itself.
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:
                # Also a cancellation that the callback got from somewhere: taken for ours, it would end our tasks.
                log.exception("on_event failed for %s", type(event).__name__)

    # --- requests: in ----------------------------------------------------------------------------

    def create(
        self, given: RequestInput, deadlines: Deadlines, on_crash: OnCrash, group: int | None = None
    ) -> Request:
        """Return a request that isn't admitted yet. group: see `Request.group`."""
        request = Request(next(self._request_ids), given, deadlines, on_crash, time.monotonic_ns())
        request.group = group
        return request

    def admit(self, request: Request) -> None:
        """Take a request into the queue. Raises the refusal, which is also its end reason."""
        now = time.monotonic_ns()
        request.timeline.queued_ns = now
        if self.is_closing:
            reason = EndReason.SHUTTING_DOWN
            self._refuse(request, reason, ShuttingDown(sentence_of(reason)), now)
        self.pool.want()
        if self.pool.is_open:
            self._refuse(request, EndReason.UNAVAILABLE, self.pool.refusal(), now)
        if self.pool.is_ready:
            wrong = problem(request.input, self.pool.serving[0].facts)
            if wrong is not None:
                self._refuse(request, EndReason.INVALID_REQUEST, wrong, now)
        crowd = self.queue.crowd(self.pool.serving, self.pool.places)
        if crowd is not None:
            self._refuse(request, EndReason.OVERLOADED, Overloaded(f"{crowd}; try again later"), now)
        self.requests[request.id] = request
        self.queue.add(request)
        request.deadline_alarm = self.timers.alarm(lambda: self._deadline(request))
        request.clocks.run(Budget.TOTAL, now)
        self._let_wait(request, now)
        self.pump()
        self.queue.note_peak()
        self.emit(events.RequestQueued(request.id, len(self.queue)))

    def _let_wait(self, request: Request, now: int) -> None:
        """Run the clock of what it waits for: a place, or a worker at all."""
        if self.pool.is_ready:
            request.clocks.stop(Budget.STARTUP)
            request.clocks.run(Budget.QUEUE, now)
        else:
            request.clocks.hold(Budget.QUEUE, now)
            request.clocks.restart(Budget.STARTUP, now)
        request.aim()

    def _refuse(self, request: Request, reason: EndReason, error: InfervisorError, now: int) -> None:
        request.state, _ = r.REQUEST.step(request.state, r.Lost(reason), now)
        field = error.field if isinstance(error, InvalidRequest) else None
        request.error = ErrorInfo(reason.value, str(error), field=field)
        request.timeline.ended_ns = now
        self._released(request, now)
        error.report = request.report()
        raise error

    def pump(self) -> None:
        """Submit what waits, the first that is due first and suspects alone, while workers have places."""
        while (
            not self._survival.is_under_way and (found := self.queue.next_for(self.pool.serving)) is not None
        ):
            request, chosen = found
            worker = chosen if request.goes_on_with(chosen.facts) else self._of_its_model(request)
            if len(request.delivered) > MOST_DELIVERED:
                self._survival.give_up(
                    request, f"an answer of more than {MOST_DELIVERED} tokens can't go on in another one"
                )
            elif worker is None:
                self._survival.give_up(
                    request, "the model was changed: another one can't go on with this answer"
                )
            elif (wrong := problem(request.input, worker.facts)) is not None:
                self._is_wrong(request, wrong)
            elif worker.free_places <= 0:
                return
            else:
                self.queue.remove(request)
                self._submit(request, worker)

    def _is_wrong(self, request: Request, wrong: InvalidRequest) -> None:
        """End a request that asks for what the model hasn't got, before it reaches the worker."""
        if request.loss is not None:
            self._survival.give_up(request, f"the model was changed: {wrong}")
            return
        request.error = ErrorInfo(EndReason.INVALID_REQUEST.value, str(wrong), field=wrong.field)
        self.apply(request, r.Lost(EndReason.INVALID_REQUEST), time.monotonic_ns())

    def _of_its_model(self, request: Request) -> Worker | None:
        """Return a worker that has the model with which a request began, one with room if there is one."""
        workers = [
            each for each in self.pool.serving if each.takes_attempts and request.goes_on_with(each.facts)
        ]
        return max(workers, key=lambda each: each.free_places, default=None)

    def _submit(self, request: Request, worker: Worker) -> None:
        now = time.monotonic_ns()
        attempt = Attempt(next(_attempt_ids), request, worker, self, now)
        self.apply(request, r.Submitted(), now)
        if request.timeline.submitted_ns is None:
            request.timeline.submitted_ns = now
        request.worker_pid = worker.pid
        request.fingerprint = worker.facts["fingerprint"]
        request.tool_format = _tool_format(worker.facts)
        # Embeddings keep no sequence that could be written down.
        if request.snapshots is None and self._snapshots is not None and request.input.texts is None:
            request.snapshots = self._snapshots.take()
        request.clocks.stop(Budget.QUEUE)
        request.clocks.stop(Budget.STARTUP)
        request.clocks.run(Budget.FIRST_TOKEN, now)
        self.attempts[request.id] = attempt
        try:
            worker.submit(attempt, now)
        except LocalProtocolError as error:
            # The parts were checked one by one; together they don't fit one frame.
            if request.loss is None:
                request.error = ErrorInfo(EndReason.INVALID_REQUEST.value, str(error))
                self.apply(request, r.Finished(EndReason.INVALID_REQUEST), now)
            else:
                self._survival.give_up(request, f"prompt and answer can't be sent to another one: {error}")
            attempt.on_process_gone(now)
        request.aim()
        self.pool.used(worker)

    # --- requests: out ---------------------------------------------------------------------------

    def apply(self, request: Request, event: object, now: int) -> None:
        """Step the request table and carry out its effects."""
        request.state, effects = r.REQUEST.step(request.state, event, now)
        if request.has_ended and request.timeline.ended_ns is None:
            # Before the effects: the first of them may complete the report.
            request.timeline.ended_ns = now
        for effect in effects:
            match effect:
                case r.Dequeue():
                    self.queue.remove(request)
                    self._released(request, now)
                case r.BeginCancel():
                    self.escalator.begin(request, now)
                case r.TellEnd(_, keep_buffer):
                    self._tell_end(request, keep_buffer, now)

    def abandon(self, request: Request, reason: EndReason, asked_ns: int | None = None) -> None:
        """Nobody wants the rest. Idempotent; also for requests that have ended or were never admitted.

        asked_ns: when the caller said so, if that wasn't just now.
        """
        now = time.monotonic_ns()
        if request.id not in self.requests:
            if not request.has_ended:
                request.state, _ = r.REQUEST.step(request.state, r.Lost(reason), now)
                request.timeline.ended_ns = request.timeline.released_ns = now
                request.released.set()
            return
        if not request.has_ended:
            request.timeline.cancel_requested_ns = max(asked_ns or now, request.timeline.queued_ns)
        self.apply(request, r.Abandoned(reason), now)

    def kill(self, request: Request, reason: EndReason, asked_ns: int | None = None) -> None:
        """Cancel and go straight to the last rung of the ladder."""
        self.abandon(request, reason, asked_ns)
        if request.id in self.attempts:
            self.escalator.to_the_top(request, time.monotonic_ns())

    def _tell_end(self, request: Request, keep_buffer: bool, now: int) -> None:
        if not keep_buffer:
            request.drop_buffer()
        request.aim()
        request.news.ring()
        if request.id in self.attempts:
            self.escalator.watch_release(request, now)

    def _deadline(self, request: Request) -> None:
        attempt = self.attempts.get(request.id)
        if attempt is not None:
            # Race "the loop was blocked until just now": what is judged may lie in the pipe.
            attempt.worker.link.read_frames(READS_A_TURN)
            if request.has_ended:
                return
        now = time.monotonic_ns()
        budget = request.clocks.expired(now)
        if budget is None:
            request.aim()
            return
        reason = TIMEOUT_OF[budget]
        seconds = (request.clocks.budget_ns(budget) or 0) / NS_PER_S
        request.error = ErrorInfo(reason.value, f"{sentence_of(reason)} ({seconds:g} s)")
        self.abandon(request, reason)

    def _released(self, request: Request, now: int) -> None:
        request.timeline.released_ns = now
        for alarm in (request.deadline_alarm, request.ladder_alarm, request.late_alarm):
            if alarm is not None:
                alarm.retire()
        self.requests.pop(request.id, None)
        if request.snapshots is not None and self._snapshots is not None:
            self._snapshots.free(request.snapshots)
            request.snapshots = None
        self.rates.learn(request.timeline)
        request.released.set()
        self.emit(events.RequestReleased(request.report()))
        self.pool.on_change()

    def end_error(self, request: Request) -> InfervisorError:
        """Return a fresh error for a request whose end isn't natural."""
        reason = request.state.reason
        assert reason is not None
        error = request.make_error() if request.make_error is not None else error_of(reason, request.error)
        error.code = reason.value
        error.report = request.report()
        return error

    def take(self, request: Request) -> Chunk:
        """Hand the reader the next chunk of a request that has one."""
        attempt = self.attempts.get(request.id)
        now = time.monotonic_ns()
        if attempt is not None:
            return attempt.take(now)
        chunk, weight = request.take(now)
        # Between two workers: the credit goes to the next one, with its submit.
        request.window.take(weight)
        return chunk

    # --- what attempts tell ----------------------------------------------------------------------

    def attempt_started(self, request: Request) -> None:
        """The worker begins to read its prompt."""
        self.emit(events.RequestStarted(request.id, request.usage.prompt_tokens))

    def attempt_finished(self, request: Request, reason: EndReason) -> None:
        """The worker ended it by itself."""
        output = request.input.output
        form = "tool_choice" if output.must_call else output.form
        if form is not None and reason.is_natural and reason is not EndReason.STOP:
            # A natural end, and yet of no use to whoever parses it.
            request.warnings.append(f"the answer was cut ({reason}) before it was what {form} asks for")
        self.apply(request, r.Finished(reason), time.monotonic_ns())

    def attempt_went_on(self, request: Request, now: int) -> None:
        """The first tokens since it lost a worker have arrived."""
        resume = request.went_on(now)
        if resume is not None:
            self.emit(events.RequestResumed(request.id, request.worker_pid or 0, resume))
            self.pool.let_start()

    def attempt_acquitted(self, request: Request) -> None:
        """It has outlived what killed its worker, and needn't be alone any more."""
        self.pump()

    def attempt_pauses(self, attempt: Attempt, until_ns: int) -> None:
        """A suspect waits for its reader: others need not wait for that for ever."""
        self._suspect_alarm.aim(until_ns)

    def attempt_released(self, attempt: Attempt, now: int) -> None:
        """Its place is free: complete the report and give the place away."""
        request, worker = attempt.request, attempt.worker
        self.attempts.pop(request.id, None)
        if only_the_signal_was_heard(request):
            self._replace_deaf(worker, attempt)
        worker.free(attempt)
        if request.has_ended:
            self._released(request, now)
        self.pump()

    def _replace_deaf(self, worker: Worker, done: Attempt) -> None:
        """Replace a worker that doesn't read what it is told: at once if all others in it go on elsewhere."""
        others = [other.request for other in worker.attempts.values() if other is not done]
        if all(other.has_ended or other.on_crash is OnCrash.RESUME for other in others):
            worker.kill(DeathCause.DEAF)
        else:
            worker.retire(DeathCause.DEAF)

    # --- what the pool tells ---------------------------------------------------------------------

    def pool_loads(self) -> None:
        """A worker's loading goes on: whoever waits for it gets the whole startup budget again."""
        now = time.monotonic_ns()
        if not self.pool.is_ready:
            for request in self.queue:
                request.clocks.restart(Budget.STARTUP, now)
                request.aim()

    def pool_changed(self) -> None:
        """Other workers serve than before."""
        now = time.monotonic_ns()
        if self.pool.is_ready and self._snapshots is not None:
            self._snapshots.divide(self.pool.places)
        for request in self.queue:
            self._let_wait(request, now)
        self.pump()

    def pool_lost(self, worker: Worker, report: ExitReport) -> None:
        """A worker is collected: what was in it goes on in the next one, or ends."""
        now = time.monotonic_ns()
        if worker.was_cut:
            # Nobody is left to attend another worker, which would be cut as well, nor to ring a deadline.
            self.close()
        self._survival.lost(worker, report, now)

    def pool_is_resuming(self) -> bool:
        """Whether a request that lost its worker works its way back to where it was."""
        waiting = (attempt.request for attempt in self.attempts.values())
        return any(request.is_resuming for request in (*waiting, *self.queue))

    def pool_gave_up(self) -> None:
        """No worker will be started by itself any more: refuse what waits."""
        reason = self.pool.refusal_reason()
        for request in list(self.queue):
            if request.loss is None:
                request.error = ErrorInfo(EndReason.UNAVAILABLE.value, f"no worker is available: {reason}")
                request.make_error = self.pool.refusal
                self.apply(request, r.Lost(EndReason.UNAVAILABLE), time.monotonic_ns())
            else:
                self._survival.give_up(request, f"no worker can be had to go on: {reason}")

    # --- the parent's own troubles ---------------------------------------------------------------

    def _parent_stalled(self, stalled_ns: int) -> None:
        """Read everything first; then no clock but the total counts time in which the parent couldn't act."""
        now = time.monotonic_ns()
        for worker in list(self.pool.workers):
            worker.forgive_stall(now)
        for request in list(self.requests.values()):
            for budget in Budget:
                if budget is not Budget.TOTAL:
                    request.clocks.postpone(budget, stalled_ns, now)
            request.aim()
            self.escalator.postpone(request, stalled_ns, now)

    def close(self) -> None:
        """Take no more requests, end all that there are, and stop the workers with their graces. Idempotent."""
        if self.is_closing:
            return
        self.is_closing = True
        for request in list(self.requests.values()):
            self.abandon(request, EndReason.SHUTTING_DOWN)
        self.pool.stop()


def _tool_format(facts: Mapping[str, Any]) -> str | None:
    extra = facts.get("extra")
    told = extra.get("tool_format") if isinstance(extra, Mapping) else None
    return told if isinstance(told, str) else None
