"""The one owner of requests, queue and slot: every decision about them is carried out here.

Runs in the event loop's thread, synchronously: frames, alarms and callers' calls come one at a time, and that
order is the order in which end reasons are named. Nothing here awaits.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from infervisor.protocol.deadlines import TIMEOUT_OF, Budget
from infervisor.protocol.endings import EndClass, EndReason
from infervisor.protocol.errors import InfervisorError, LocalProtocolError, Overloaded, ShuttingDown
from infervisor.protocol.machines import request as r
from infervisor.protocol.machines.process import DeathCause
from infervisor.protocol.machines.slot import WorkerReady, WorkerWanted
from infervisor.protocol.messages import Log, Progress
from infervisor.protocol.quoting import printable_lines
from infervisor.protocol.timeline import NS_PER_S
from infervisor.supervisor import events
from infervisor.supervisor.attempt import Attempt
from infervisor.supervisor.end_errors import error_of, sentence_of
from infervisor.supervisor.escalator import Escalator, only_the_signal_was_heard
from infervisor.supervisor.exit_report import ExitReport
from infervisor.supervisor.link import READS_A_TURN
from infervisor.supervisor.rates import Rates
from infervisor.supervisor.report import ErrorInfo
from infervisor.supervisor.request import Chunk, Request
from infervisor.supervisor.request_input import RequestInput
from infervisor.supervisor.settings import Deadlines, Escalation, RestartPolicy
from infervisor.supervisor.slot import Slot
from infervisor.supervisor.timers import Timers
from infervisor.supervisor.worker import Worker

log = logging.getLogger("infervisor")

_attempt_ids = itertools.count(1)
"""Attempt ids of this process: never reused, whichever supervisor draws them."""


class Dispatcher:
    """All requests of one supervisor. `on_event` is called for everything worth telling."""

    def __init__(
        self,
        *,
        make_worker: Callable[[Dispatcher], Worker],
        start_task: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
        restart: RestartPolicy,
        escalation: Escalation,
        max_queue: int,
        max_wait_s: float | None,
        on_event: Callable[[events.Event], None],
    ) -> None:
        self.timers = Timers(self._parent_stalled)
        self.slot = Slot(restart.rules(), lambda: make_worker(self), start_task, self, self.timers)
        self.requests: dict[int, Request] = {}
        self.attempts: dict[int, Attempt] = {}
        """The attempt of each request that is in a worker, by request id."""
        self.queue: deque[Request] = deque()
        self.queue_peak = 0
        self.is_closing = False
        self.on_state_change: Callable[[], None] = lambda: None
        self.escalator = Escalator(
            escalation, self.timers, self.attempts, lambda: self.slot.worker, self.emit
        )
        self._cooldown_s = restart.cooldown_s
        self._max_queue = max_queue
        self._max_wait_s = max_wait_s
        self.rates = Rates()
        self._on_event = on_event
        self._request_ids = itertools.count(1)

    def emit(self, event: events.Event) -> None:
        """Tell the user. A callback that raises is logged and harms nothing."""
        try:
            self._on_event(event)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            # Also a cancellation that the callback got from somewhere: taken for ours, it would end our tasks.
            log.exception("on_event failed for %s", type(event).__name__)

    # --- requests: in ----------------------------------------------------------------------------

    def create(self, given: RequestInput, deadlines: Deadlines) -> Request:
        """Return a request that isn't admitted yet."""
        return Request(next(self._request_ids), given, deadlines, time.monotonic_ns())

    def admit(self, request: Request) -> None:
        """Take a request into the queue. Raises the refusal, which is also its end reason."""
        now = time.monotonic_ns()
        request.timeline.queued_ns = now
        if self.is_closing:
            reason = EndReason.SHUTTING_DOWN
            self._refuse(request, reason, ShuttingDown(sentence_of(reason)), now)
        self.slot.apply(WorkerWanted())
        if self.slot.is_open:
            self._refuse(request, EndReason.UNAVAILABLE, self.slot.refusal(), now)
        crowd = self._crowd()
        if crowd is not None:
            self._refuse(request, EndReason.OVERLOADED, Overloaded(f"{crowd}; try again later"), now)
        self.requests[request.id] = request
        self.queue.append(request)
        request.deadline_alarm = self.timers.alarm(lambda: self._deadline(request))
        request.clocks.run(Budget.TOTAL, now)
        request.clocks.run(Budget.QUEUE if self._is_ready() else Budget.STARTUP, now)
        request.aim()
        self.pump()
        # Only what has to wait counts as depth: a free worker's request went through at once.
        self.queue_peak = max(self.queue_peak, len(self.queue))
        self.emit(events.RequestQueued(request.id, len(self.queue)))

    def _crowd(self) -> str | None:
        """Return why one more request is too many, or None."""
        worker = self.slot.worker
        if self._free_places() > 0:
            return None
        if len(self.queue) >= self._max_queue:
            return f"the queue is full ({len(self.queue)} requests wait)"
        wait_s = self.rates.wait_s(len(self.queue), 1 if worker is None else worker.places)
        if self._max_wait_s is not None and wait_s is not None and wait_s > self._max_wait_s:
            return f"the wait would be about {wait_s:.1f} s, and at most {self._max_wait_s:g} s is allowed"
        return None

    def _refuse(self, request: Request, reason: EndReason, error: InfervisorError, now: int) -> None:
        request.state, _ = r.REQUEST.step(request.state, r.Lost(reason), now)
        request.error = ErrorInfo(reason.value, str(error))
        request.timeline.ended_ns = now
        self._released(request, now)
        error.report = request.report()
        raise error

    def _is_ready(self) -> bool:
        return self.slot.worker is not None and self.slot.worker.is_ready

    def _free_places(self) -> int:
        return 0 if self.slot.worker is None else self.slot.worker.free_places

    def pump(self) -> None:
        """Submit what waits, oldest first, while a worker has places."""
        while self.queue and self._free_places() > 0:
            worker = self.slot.worker
            assert worker is not None
            request = self.queue.popleft()
            now = time.monotonic_ns()
            attempt = Attempt(next(_attempt_ids), request, self, worker.link.send)
            self.apply(request, r.Submitted(), now)
            request.timeline.submitted_ns = now
            request.worker_pid = worker.pid
            request.clocks.stop(Budget.QUEUE)
            request.clocks.stop(Budget.STARTUP)
            request.clocks.run(Budget.FIRST_TOKEN, now)
            self.attempts[request.id] = attempt
            try:
                worker.submit(attempt, now)
            except LocalProtocolError as error:
                # The parts were checked one by one; together they don't fit one frame.
                request.error = ErrorInfo(EndReason.INVALID_REQUEST.value, str(error))
                self.apply(request, r.Finished(EndReason.INVALID_REQUEST), now)
                attempt.on_process_gone(now)
            request.aim()

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
        if self.slot.worker is not None:
            # Race "the loop was blocked until just now": what is judged may lie in the pipe.
            self.slot.worker.link.read_frames(READS_A_TURN)
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
        self.rates.learn(request.timeline)
        request.released.set()
        self.emit(events.RequestReleased(request.report()))
        self.on_state_change()

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
        return request.take(now)[0] if attempt is None else attempt.take(now)

    # --- what attempts tell ----------------------------------------------------------------------

    def attempt_started(self, request: Request) -> None:
        """The worker begins to read its prompt."""
        self.emit(events.RequestStarted(request.id, request.usage.prompt_tokens))

    def attempt_finished(self, request: Request, reason: EndReason) -> None:
        """The worker ended it by itself."""
        self.apply(request, r.Finished(reason), time.monotonic_ns())

    def attempt_resumed(self, attempt: Attempt, now: int) -> None:
        """It got credit: its worker owes a step again."""
        if self.slot.worker is not None:
            self.slot.worker.owes_again(attempt, now)

    def attempt_released(self, attempt: Attempt, now: int) -> None:
        """Its place is free: complete the report and give the place away."""
        request = attempt.request
        self.attempts.pop(request.id, None)
        worker = self.slot.worker
        if worker is not None:
            if only_the_signal_was_heard(request):
                worker.retire(DeathCause.DEAF)
            worker.free(attempt)
        self._released(request, now)
        self.pump()

    # --- what the worker tells -------------------------------------------------------------------

    def worker_progressed(self, worker: Worker, message: Progress) -> None:
        """Loading goes on: whoever waits for it gets the whole startup budget again."""
        now = time.monotonic_ns()
        for request in self.queue:
            request.clocks.restart(Budget.STARTUP, now)
            request.aim()
        self.emit(events.LoadProgress(worker.pid, message.phase, message.fraction))

    def worker_ready(self, worker: Worker) -> None:
        """Requests can be submitted: waiting is now queueing."""
        now = time.monotonic_ns()
        self.slot.apply(WorkerReady())
        for request in self.queue:
            request.clocks.stop(Budget.STARTUP)
            request.clocks.run(Budget.QUEUE, now)
            request.aim()
        startup_s = (now - worker.spawned_ns) / NS_PER_S
        self.emit(events.WorkerBecameReady(worker.pid, worker.facts, startup_s))
        self.on_state_change()
        self.pump()

    def worker_hung(self, worker: Worker, stalled_s: float) -> None:
        """It stood still; unless it moves while its stacks are written, it is killed."""
        self.emit(events.WorkerHung(worker.pid, stalled_s))

    def worker_logged(self, worker: Worker, message: Log) -> None:
        """It told something."""
        text = printable_lines(message.text)
        self.emit(events.WorkerLogged(worker.pid, message.level, text))

    def worker_exited(self, worker: Worker, report: ExitReport) -> None:
        """It is collected: what was in it ends, what waits goes on waiting for the next one."""
        now = time.monotonic_ns()
        held = list(worker.attempts.values())
        reason = EndReason.SHUTTING_DOWN if self.is_closing else report.cause.end_reason
        for attempt in held:
            request = attempt.request
            if not request.has_ended:
                request.error = ErrorInfo(reason.value, report.message, report.output_tail)
                if reason.end_class is EndClass.FAULT:
                    request.make_error = report.error
                self.apply(request, r.Lost(reason), now)
            attempt.on_process_gone(now)
        for request in self.queue:
            request.clocks.hold(Budget.QUEUE, now)
            request.clocks.restart(Budget.STARTUP, now)
            request.aim()
        seconds = (now - (worker.leaving_ns or now)) / NS_PER_S
        self.emit(
            events.WorkerExited(
                pid=report.pid,
                cause=report.cause,
                status=str(report.status),
                message=report.message,
                output_tail=report.output_tail,
                requests=tuple(attempt.request.id for attempt in held),
                seconds=seconds,
            )
        )
        if worker.was_cut:
            # Nobody is left to attend another worker, which would be cut as well, nor to ring a deadline.
            self.close()
        self.slot.worker_exited(report)
        self.on_state_change()

    # --- what the slot tells ---------------------------------------------------------------------

    def slot_spawned(self, worker: Worker) -> None:
        """A worker process was started."""
        self.emit(events.WorkerSpawned(worker.pid))

    def slot_backs_off(self, delay_s: float, restarts: int) -> None:
        """The next start comes after a delay."""
        self.emit(events.RestartScheduled(delay_s, restarts))

    def slot_opened(self, reason: str) -> None:
        """No worker will be started by itself any more: refuse what waits."""
        self.emit(events.BreakerOpened(reason, self._cooldown_s))
        now = time.monotonic_ns()
        for request in list(self.queue):
            request.error = ErrorInfo(EndReason.UNAVAILABLE.value, f"no worker is available: {reason}")
            self.apply(request, r.Lost(EndReason.UNAVAILABLE), now)
        self.on_state_change()

    # --- the parent's own troubles ---------------------------------------------------------------

    def _parent_stalled(self, stalled_ns: int) -> None:
        """Read everything first; then no clock but the total counts time in which the parent couldn't act."""
        now = time.monotonic_ns()
        if self.slot.worker is not None:
            self.slot.worker.forgive_stall(now)
        for request in list(self.requests.values()):
            for budget in Budget:
                if budget is not Budget.TOTAL:
                    request.clocks.postpone(budget, stalled_ns, now)
            request.aim()
            self.escalator.postpone(request, stalled_ns, now)

    def close(self) -> None:
        """Take no more requests, end all that there are, and stop the worker with its graces. Idempotent."""
        if self.is_closing:
            return
        self.is_closing = True
        for request in list(self.requests.values()):
            self.abandon(request, EndReason.SHUTTING_DOWN)
        self.slot.stop()
