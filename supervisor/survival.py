"""What becomes of requests whose worker is gone: they wait for the next one, or end with the reason of the death.

Decides nothing that `resume` and `protocol.blame` don't decide; carries it out. A part of the dispatcher: runs in
the event loop's thread, synchronously.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from infervisor.protocol.endings import EndClass, EndReason
from infervisor.protocol.errors import InfervisorError
from infervisor.protocol.machines import request as r
from infervisor.supervisor import events
from infervisor.supervisor.end_errors import poisoned_sentence
from infervisor.supervisor.exit_report import ExitReport
from infervisor.supervisor.report import ErrorInfo
from infervisor.supervisor.request import Request
from infervisor.supervisor.resume import end_reason_of
from infervisor.supervisor.worker import Worker

if TYPE_CHECKING:
    from infervisor.supervisor.dispatcher import Dispatcher


class Survival:
    """The requests of lost workers. max_resumes: how often one goes on.

    is_under_way: a worker was lost, and not all that were in it wait again: until then, and so in their order,
    nobody goes to another worker.
    """

    def __init__(self, dispatcher: Dispatcher, max_resumes: int) -> None:
        self.is_under_way = False
        self._dispatcher = dispatcher
        self._max_resumes = max_resumes

    def lost(self, worker: Worker, report: ExitReport, now: int) -> None:
        """A worker is collected: what was in it goes on in the next one, or ends."""
        held = list(worker.attempts.values())
        self.is_under_way = True
        for attempt in held:
            request = attempt.request
            if not request.has_ended:
                if report.accuses:
                    request.suspicion = request.suspicion.accused(
                        len(held) == 1, request.progress, report.in_short
                    )
                self._survive(request, worker, report, now)
            attempt.on_process_gone(now)
        self.is_under_way = False
        for request in (attempt.request for attempt in held if not attempt.request.has_ended):
            # Told last: what the user does then, such as a cancel, finds it out of the worker.
            delivered = len(request.delivered)
            self._dispatcher.emit(events.RequestInterrupted(request.id, worker.pid, report.cause, delivered))

    def _survive(self, request: Request, worker: Worker, report: ExitReport, now: int) -> None:
        """Let a request that lost its worker wait for the next one, or end."""
        reason = end_reason_of(
            report.cause,
            on_crash=request.on_crash,
            resumes=len(request.resumes),
            max_resumes=self._max_resumes,
            is_poisoned=request.suspicion.is_poisoned,
            is_closing=self._dispatcher.is_closing,
        )
        if reason is not None:
            said = report.message + _after(len(request.resumes))
            if reason is EndReason.POISONED:
                said = poisoned_sentence(request.suspicion)
            request.error = ErrorInfo(reason.value, said, report.output_tail)
            if reason.end_class is EndClass.FAULT and reason is not EndReason.POISONED:
                request.make_error = _error_after(report, len(request.resumes))
            self._dispatcher.apply(request, r.Lost(reason), now)
            return
        lost_as = report.cause.end_reason
        request.loss = lost_as, ErrorInfo(lost_as.value, report.message, report.output_tail)
        self._dispatcher.apply(request, r.Interrupted(), now)
        request.lose_worker(report.cause, worker.pid, worker.leaving_ns or now)
        self._dispatcher.queue.add(request)

    def give_up(self, request: Request, why: str) -> None:
        """End a request that waits to go on: with the reason for which it lost its worker."""
        assert request.loss is not None
        reason, error = request.loss
        request.error = ErrorInfo(error.code, f"{error.message}; {why}", error.detail)
        self._dispatcher.apply(request, r.Lost(reason), time.monotonic_ns())


def _after(resumes: int) -> str:
    """Return what is said of a request that isn't resumed again."""
    return f"; it was resumed before, and max_resumes={resumes} allows no more" if resumes else ""


def _error_after(report: ExitReport, resumes: int) -> Callable[[], InfervisorError]:
    """Return what makes the error of a request that ends with its worker."""

    def make() -> InfervisorError:
        error = report.error()
        error.args = (f"{error}{_after(resumes)}", *error.args[1:])
        return error

    return make
