"""A slot keeps one worker alive: starts it, replaces it when it dies, and gives up in time.

The slot table decides; this shell starts tasks and aims the backoff alarm.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from infervisor.protocol.errors import InfervisorError, Unavailable, WorkerSpawnError
from infervisor.protocol.machines import slot as s
from infervisor.protocol.timeline import NS_PER_S
from infervisor.supervisor.exit_report import ExitReport
from infervisor.supervisor.timers import Timers
from infervisor.supervisor.worker import Worker


class SlotOwner(Protocol):
    """What a slot tells the dispatcher, in the loop's thread."""

    def slot_spawned(self, worker: Worker) -> None:
        """A worker process was started."""
        ...

    def slot_backs_off(self, delay_s: float, restarts: int) -> None:
        """The next start comes after a delay."""
        ...

    def slot_opened(self, reason: str) -> None:
        """No worker will be started by itself any more; refuse what waits."""
        ...


class Slot:
    """The place for one worker. `worker` is None while there is none."""

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
        self.restarts: Counter[str] = Counter()
        self._make_worker = make_worker
        self._start_task = start_task
        self._owner = owner
        self._backoff_alarm = timers.alarm(lambda: self.apply(s.BackoffOver()))

    def start(self) -> None:
        """Start the first worker."""
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
                    self._owner.slot_backs_off(delay_ns / NS_PER_S, len(self.state.restarts_ns))
                case s.BreakerOpened():
                    self._owner.slot_opened(self.last_message)

    def _spawn(self) -> None:
        try:
            worker = self._make_worker()
        except WorkerSpawnError as error:
            self.last_message = message = str(error)
            self.last_error = lambda: WorkerSpawnError(message)
            self.apply(s.WorkerDied(ours=False, permanent=True, luck=0.0))
            return
        self.worker = worker
        self._start_task(worker.run)
        self._owner.slot_spawned(worker)

    def worker_exited(self, report: ExitReport) -> None:
        """The worker is collected: decide what follows."""
        self.worker = None
        self.last_message = report.message
        self.last_error = report.error
        self.apply(
            s.WorkerDied(ours=report.cause.is_ours, permanent=report.is_permanent, luck=random.random())
        )
        if self.state.phase not in (s.SlotPhase.OPEN, s.SlotPhase.STOPPED):
            self.restarts[report.cause.value] += 1

    @property
    def is_open(self) -> bool:
        """Whether requests are refused."""
        return self.state.phase is s.SlotPhase.OPEN

    def refusal(self) -> Unavailable:
        """Return the error for a request that comes while the breaker is open."""
        wait_s = max(0, self.state.closes_ns - time.monotonic_ns()) / NS_PER_S
        return Unavailable(
            f"no worker is available: {self.last_message}; the next try can be made in {wait_s:.0f} s"
        )

    def replace(self) -> None:
        """Let the worker finish and start a new one; with an open breaker, close it and start."""
        if self.worker is not None:
            self.worker.retire()
        else:
            self.apply(s.ResetAsked())

    def stop(self) -> None:
        """Want no worker any more. The worker that is there is stopped with its graces."""
        self._backoff_alarm.aim(None)
        self.apply(s.SlotStopAsked())
        if self.worker is not None:
            self.worker.stop()
