"""Carries out cancel ladders: climbs them on time, and raises the alarm while a release is late.

Belongs to the dispatcher and runs in the loop's thread, whatever becomes of the caller that cancelled. Which rung
is due when is decided in `protocol.ladder`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from infervisor.protocol.ladder import Ladder, Stage
from infervisor.protocol.machines.process import DeathCause
from infervisor.protocol.timeline import NS_PER_S
from infervisor.supervisor import events
from infervisor.supervisor.attempt import Attempt
from infervisor.supervisor.request import Request
from infervisor.supervisor.settings import Escalation, to_ns
from infervisor.supervisor.timers import Timers


class Escalator:
    """The ladders of all requests. attempts: by request id."""

    def __init__(
        self,
        settings: Escalation,
        timers: Timers,
        attempts: Mapping[int, Attempt],
        emit: Callable[[events.Event], None],
    ) -> None:
        self._rungs = settings.rungs()
        self._alert_after_ns = to_ns(settings.alert_after_s)
        self._timers = timers
        self._attempts = attempts
        self._emit = emit

    def begin(self, request: Request, now: int) -> None:
        """Start the ladder of a request that nobody wants any more."""
        request.ladder = Ladder(self._rungs, now)
        request.ladder_alarm = self._timers.alarm(lambda: self._climb(request))
        self._climb(request)

    def to_the_top(self, request: Request, now: int) -> None:
        """Take the last rung at once."""
        ladder = request.ladder or Ladder(self._rungs, now)
        request.ladder, stage = ladder.top(now)
        attempt = self._attempts.get(request.id)
        if stage is not None and attempt is not None:
            self._take(request, attempt, stage, now)

    def postpone(self, request: Request, ns: int, now: int) -> None:
        """Forgive the worker `ns` of the running grace: time in which nobody could have seen it obey."""
        ladder = request.ladder
        if ladder is not None and request.ladder_alarm is not None:
            request.ladder = replace(ladder, since_ns=min(ladder.since_ns + ns, now))
            self._climb(request)

    def bound_ns(self, request: Request) -> int:
        """Return how long a whole ladder takes at most, given the longest step that its worker has shown."""
        attempt = self._attempts.get(request.id)
        longest_ns = 0 if attempt is None else attempt.worker.longest_step_ns
        return sum(rung.grace_ns(longest_ns) for rung in self._rungs)

    def watch_release(self, request: Request, now: int) -> None:
        """Raise the alert when the request isn't released in time, and again while that is so."""
        request.late_alarm = self._timers.alarm(lambda: self._late(request))
        request.late_alarm.aim(now + self._alert_after_ns)

    def _climb(self, request: Request) -> None:
        attempt = self._attempts.get(request.id)
        while attempt is not None and request.ladder is not None:
            now = time.monotonic_ns()
            longest_ns = attempt.worker.longest_step_ns
            request.ladder, stage = request.ladder.climb(now, longest_ns)
            if stage is None:
                assert request.ladder_alarm is not None
                request.ladder_alarm.aim(request.ladder.due_ns(longest_ns))
                return
            self._take(request, attempt, stage, now)
            attempt = self._attempts.get(request.id)

    def _take(self, request: Request, attempt: Attempt, stage: Stage, now: int) -> None:
        worker = attempt.worker
        request.stage = stage
        if stage is Stage.IN_BAND:
            worker.cancel_in_band(attempt, now)
            return
        self._emit(events.CancelEscalated(request.id, stage))
        if stage is Stage.SIGNAL:
            # Race "stopped before the cancel, continued after the signal": it then hears both at once, and which of
            # them first tells nothing of its control pipe.
            if not worker.process.is_stopped():
                request.signalled_ns = now
            worker.cancel_by_signal(attempt)
        else:
            worker.kill(DeathCause.CANCEL_KILL)

    def _late(self, request: Request) -> None:
        now = time.monotonic_ns()
        since_ns = request.timeline.cancel_requested_ns or request.timeline.ended_ns or now
        self._emit(events.ReleaseLate(request.id, (now - since_ns) / NS_PER_S, request.stage))
        if request.late_alarm is not None:
            request.late_alarm.aim(now + self._alert_after_ns)


def only_the_signal_was_heard(request: Request) -> bool:
    """Whether the worker noticed a cancel no sooner than the signal: then it doesn't read its control pipe."""
    noticed_ns = request.timeline.cancel_noticed_ns
    return request.signalled_ns is not None and noticed_ns is not None and noticed_ns >= request.signalled_ns
