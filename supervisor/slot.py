"""A slot keeps one worker alive: starts it, replaces it when it dies, and gives up in time.

The slot table decides; this shell starts tasks and aims the backoff alarm. Runs in the event loop's thread.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from infervisor.protocol.errors import InfervisorError, Unavailable, WorkerSpawnError
from infervisor.protocol.machines import slot as s
from infervisor.protocol.machines.process import DeathCause
from infervisor.protocol.timeline import NS_PER_S
from infervisor.supervisor.exit_report import ExitReport
from infervisor.supervisor.timers import Timers
from infervisor.supervisor.worker import Worker

_PASSES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETXTBSY)
"""Why a process can't be started now, though later it may: something is used up, or is just being written."""

_COMING = (s.SlotPhase.STARTING, s.SlotPhase.HALF_OPEN, s.SlotPhase.BACKOFF)


class SlotOwner(Protocol):
    """What a slot tells its pool, in the loop's thread."""

    def slot_must_wait(self, slot: Slot) -> bool:
        """Whether a start would take cores from somebody who needs them more; `go_on` follows then."""
        ...

    def slot_spawned(self, slot: Slot, worker: Worker) -> None:
        """A worker process was started."""
        ...

    def slot_backs_off(self, slot: Slot, delay_s: float, restarts: int) -> None:
        """The next start comes after a delay."""
        ...

    def slot_opened(self, slot: Slot, reason: str) -> None:
        """No worker will be started by itself any more; refuse what waits."""
        ...


class Slot:
    """The place for one worker. `worker` is None while there is none. Nothing happens before `start`."""

    def __init__(
        self,
        rules: s.RestartRules,
        make_worker: Callable[[], Worker],
        start_task: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
        owner: SlotOwner,
        timers: Timers,
    ) -> None:
        self.state = s.SlotState(rules)
        self.worker: Worker | None = None
        self.last_error: Callable[[], InfervisorError] | None = None
        self.last_message = ""
        self.is_started = False
        self._is_held = False
        """Whether a worker is to be started once nobody needs the cores more."""
        self._make_worker = make_worker
        self._start_task = start_task
        self._owner = owner
        self._backoff_alarm = timers.alarm(lambda: self.apply(s.BackoffOver()))

    def start(self) -> None:
        """Start the first worker. Does nothing the second time, or after a stop."""
        if not self.is_started and not self.is_ending:
            self.is_started = True
            self._spawn()

    def apply(self, event: object) -> None:
        """Step the slot table and carry out its effects."""
        now = time.monotonic_ns()
        self.state, effects = s.SLOT.step(self.state, event, now)
        for effect in effects:
            match effect:
                case s.Spawn():
                    self._spawn()
                case s.ArmBackoff(delay_ns):
                    self._backoff_alarm.aim(now + delay_ns)
                    self._owner.slot_backs_off(self, delay_ns / NS_PER_S, len(self.state.restarts_ns))
                case s.BreakerOpened():
                    self._owner.slot_opened(self, self.last_message)

    def _spawn(self) -> None:
        self._is_held = self._owner.slot_must_wait(self)
        if not self._is_held:
            self._spawn_now()

    def go_on(self) -> None:
        """Start the worker that had to wait, if there is one."""
        if self._is_held:
            self._is_held = False
            self._spawn_now()

    def _spawn_now(self) -> None:
        try:
            worker = self._make_worker()
        except WorkerSpawnError as error:
            self.last_message = message = str(error)
            self.last_error = lambda: WorkerSpawnError(message)
            passes = isinstance(error.__cause__, OSError) and error.__cause__.errno in _PASSES
            self.apply(s.WorkerDied(ours=False, permanent=not passes, luck=random.random()))
            return
        self.worker = worker
        self._start_task(worker.run)
        self._owner.slot_spawned(self, worker)

    def worker_exited(self, report: ExitReport) -> None:
        """The worker is collected: decide what follows."""
        self.worker = None
        self.last_message = report.message
        self.last_error = report.error
        self.apply(
            s.WorkerDied(ours=report.cause.is_ours, permanent=report.is_permanent, luck=random.random())
        )

    @property
    def is_open(self) -> bool:
        """Whether requests are refused."""
        return self.state.phase is s.SlotPhase.OPEN

    @property
    def is_open_for_good(self) -> bool:
        """Whether requests are refused until the cause is gone or somebody asks for a start."""
        return self.is_open and self.state.is_permanent

    @property
    def is_coming(self) -> bool:
        """Whether a worker is being started, or will be by itself."""
        return self.is_started and self.state.phase in _COMING

    @property
    def is_ending(self) -> bool:
        """Whether no worker is wanted any more; the last one may still be there."""
        return self.state.phase is s.SlotPhase.STOPPED

    @property
    def is_done(self) -> bool:
        """Whether there is no worker, and none will come."""
        return self.is_ending and self.worker is None

    @property
    def cooldown_s(self) -> float:
        """Seconds after which an open breaker lets a request try, unless it is open for good."""
        return self.state.rules.cooldown_ns / NS_PER_S

    def refusal(self) -> Unavailable:
        """Return a fresh error for a request that comes or waits while the breaker is open."""
        if self.is_open_for_good:
            error = Unavailable(
                f"no worker is available: {self.last_message}; none is started before the model's file "
                "changes or restart_worker() is called"
            )
            error.retryable = False
            return error
        wait_s = max(0, self.state.closes_ns - time.monotonic_ns()) / NS_PER_S
        return Unavailable(
            f"no worker is available: {self.last_message}; the next try can be made in {wait_s:.0f} s"
        )

    def replace(self, cause: DeathCause = DeathCause.STOPPED, grace_ns: int | None = None) -> None:
        """Let the worker finish and start a new one; with an open breaker, close it and start.

        grace_ns: how long it may take to finish, or None for as long as it takes.
        """
        if self.worker is not None:
            self.worker.retire(cause, grace_ns)
        else:
            self.apply(s.ResetAsked())

    def cause_gone(self) -> None:
        """Start again, if nothing but the change that has just been seen was waited for."""
        if self.is_open_for_good:
            self.apply(s.CauseGone())

    def end(self, cause: DeathCause = DeathCause.RECYCLED, grace_ns: int | None = None) -> None:
        """Let the worker finish what it has, as in `replace`, and want none after it."""
        self._want_none()
        if self.worker is not None:
            self.worker.retire(cause, grace_ns)

    def stop(self) -> None:
        """Want no worker any more. The worker that is there is stopped with its graces."""
        self._want_none()
        if self.worker is not None:
            self.worker.stop()

    def _want_none(self) -> None:
        # Also the second time: one that is ending is stopped when everything closes.
        if not self.is_ending:
            self._is_held = False
            self._backoff_alarm.retire()
            self.apply(s.SlotStopAsked())
