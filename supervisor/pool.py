"""The places for workers: as many serve as are asked for, and the others stand by, loaded and idle.

Each place is a slot that keeps one worker alive. Owns which of the ready workers serve, and the order in which
workers are replaced. Knows nothing of requests but how many each worker holds. Runs in the loop's thread.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, Protocol

from infervisor.protocol.errors import InfervisorError, Unavailable
from infervisor.protocol.machines.process import DeathCause
from infervisor.protocol.machines.slot import SlotPhase, WorkerReady, WorkerWanted
from infervisor.protocol.messages import Log, Progress
from infervisor.protocol.quoting import printable_lines
from infervisor.protocol.timeline import NS_PER_S
from infervisor.supervisor import events
from infervisor.supervisor.exit_report import ExitReport
from infervisor.supervisor.release import WorkerRelease
from infervisor.supervisor.settings import PoolSettings, to_ns
from infervisor.supervisor.slot import Slot
from infervisor.supervisor.timers import Timers
from infervisor.supervisor.worker import Worker

HOLD_NS = 2 * NS_PER_S
"""How long the start of a worker waits at most for requests that go on in another one: loading takes all cores."""


class PoolOwner(Protocol):
    """What the pool tells the dispatcher, in the loop's thread."""

    def pool_loads(self) -> None:
        """A worker's loading goes on."""
        ...

    def pool_changed(self) -> None:
        """Who serves has changed."""
        ...

    def pool_lost(self, worker: Worker, report: ExitReport) -> None:
        """A worker is collected; its attempts are still listed. Nothing has followed from it yet."""
        ...

    def pool_is_resuming(self) -> bool:
        """Whether a request that lost its worker works its way back to where it was."""
        ...

    def pool_gave_up(self) -> None:
        """No worker will be started by itself any more: refuse what waits."""
        ...

    def emit(self, event: events.Event) -> None:
        """Tell the user."""
        ...


class Pool:
    """All workers of one supervisor. `serving` are those that get requests, in the order in which they began."""

    def __init__(
        self,
        settings: PoolSettings,
        make_worker: Callable[[Pool], Worker],
        start_task: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
        owner: PoolOwner,
        timers: Timers,
    ) -> None:
        self.serving: list[Worker] = []
        self.restarts: Counter[str] = Counter()
        self.loading: tuple[str, float] | None = None
        """Phase and fraction of the latest sign of progress of a worker that loads, while none serves."""
        self.on_change: Callable[[], None] = lambda: None
        self.is_stopping = False
        self._no_successor_until_ns = 0
        """Until then no worker is replaced for its number of requests."""
        self._no_successor: Callable[[], InfervisorError] | None = None
        """Why the last replacement without a standby failed."""
        self._settings = settings
        self._owner = owner
        self._due: deque[tuple[Worker, int | None]] = deque()
        """Workers to be replaced, with the grace of each in ns."""
        self._hold_alarm = timers.alarm(lambda: self.let_start(anyway=True))
        rules = settings.restart.rules()
        self._make_slot: Callable[[], Slot] = lambda: Slot(
            rules, lambda: make_worker(self), start_task, self, timers
        )
        self.slots = [self._make_slot() for _ in range(settings.places)]

    # --- looking at it ---------------------------------------------------------------------------

    @property
    def workers(self) -> Iterator[Worker]:
        """All workers that are not collected, serving or not."""
        return (slot.worker for slot in self.slots if slot.worker is not None)

    @property
    def first(self) -> Worker | None:
        """The worker that stands for all where there is room for one: the first that serves, or else that lives."""
        return self.serving[0] if self.serving else next(self.workers, None)

    @property
    def is_ready(self) -> bool:
        """Whether a worker serves."""
        return any(worker.is_ready for worker in self.serving)

    @property
    def standing_by(self) -> list[Worker]:
        """Workers that are loaded and would serve at once."""
        return [worker for worker in self.workers if worker not in self.serving and worker.takes_attempts]

    @property
    def places(self) -> int:
        """How many attempts run at once when all that should serve do."""
        return self._settings.workers * max((worker.places for worker in self.serving), default=1)

    @property
    def phase(self) -> SlotPhase:
        """The phase of the place that is nearest to serving."""
        order = (
            SlotPhase.RUNNING, SlotPhase.STARTING, SlotPhase.HALF_OPEN, SlotPhase.BACKOFF, SlotPhase.OPEN,
        )  # fmt: skip
        phases = {slot.state.phase for slot in self.slots if slot.is_started}
        return next((phase for phase in order if phase in phases), SlotPhase.STOPPED)

    @property
    def is_open(self) -> bool:
        """Whether requests are refused: nothing serves, and nothing is about to."""
        return self.phase is SlotPhase.OPEN

    @property
    def is_complete(self) -> bool:
        """Whether as many workers are ready as were asked for."""
        return len(self.serving) + len(self.standing_by) >= self._settings.places

    @property
    def has_given_up(self) -> bool:
        """Whether there is a place in which no worker will be started by itself."""
        return any(slot.is_open for slot in self.slots)

    @property
    def is_recycling(self) -> bool:
        """Whether workers wait for being replaced."""
        return bool(self._due)

    def role_of(self, worker: Worker) -> str:
        """Return what a worker is for now: serving, standby, retiring or starting."""
        if worker.is_retiring or worker.leaving_ns is not None:
            return "retiring"
        if worker in self.serving:
            return "serving"
        return "standby" if worker.is_ready else "starting"

    def refusal(self) -> Unavailable:
        """Return the error for a request that comes while the breaker is open."""
        # Race "it is asked for when a place tries again already": that one's reason is still the latest.
        slots = [slot for slot in self.slots if slot.is_open] or self.slots
        return min(slots, key=lambda slot: slot.state.closes_ns).refusal()

    def refusal_reason(self) -> str:
        """Return why requests are refused."""
        return next((slot.last_message for slot in self.slots if slot.is_open), "the breaker is open")

    def last_error(self) -> InfervisorError:
        """Return a fresh error that says why no worker can be had."""
        made = [slot.last_error for slot in self.slots if slot.is_open]
        make_error = next((make for make in (*made, self._no_successor) if make is not None), None)
        return self.refusal() if make_error is None else make_error()

    @property
    def problem(self) -> str | None:
        """Why no worker serves, if one was lost or couldn't be had; None while the first one is on its way."""
        if self.is_ready:
            return None
        messages = [slot.last_message for slot in self.slots if slot.last_message]
        return self.refusal_reason() if self.is_open else next(iter(messages), None)

    # --- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the first worker. The others follow when it is ready: one alone loads sooner, or fails once."""
        self.slots[0].start()

    def want(self) -> None:
        """A request asks for a worker: places whose cool-down is over try again."""
        for slot in self.slots:
            if slot.is_started and not slot.is_ending:
                slot.apply(WorkerWanted())

    def cause_gone(self) -> None:
        """What kept workers from starting has changed: places that had given up for good try again."""
        for slot in self.slots:
            slot.cause_gone()

    def replace_all(self) -> None:
        """Replace each worker once it is empty, and close open breakers."""
        for slot in list(self.slots):
            if slot.is_started:
                slot.replace(DeathCause.STOPPED)

    def stop(self) -> None:
        """Want no workers any more. Those that are there are stopped with their graces."""
        self.is_stopping = True
        self._due.clear()
        for slot in self.slots:
            if slot.is_started:
                slot.stop()

    # --- replacing workers one after the other ---------------------------------------------------

    def recycle(self, workers: Iterable[Worker], grace_ns: int | None = None) -> None:
        """Replace workers without a gap, one after the other: the next one serves before the old one goes.

        The old one finishes what it has, or, after its grace, what it has goes on in the others.
        """
        due = dict(self._due)
        for worker in workers:
            if worker.is_retiring:
                worker.retire(DeathCause.RECYCLED, grace_ns)
            elif worker in due:
                graces = [grace for grace in (due[worker], grace_ns) if grace is not None]
                due[worker] = min(graces, default=None)
            elif worker.is_ready:
                # One that is still loading is new already; replacing it again and again would never end.
                due[worker] = grace_ns
        self._due = deque(due.items())
        self._replace_next()

    def used(self, worker: Worker) -> None:
        """A request went to this worker: has it had its share?"""
        most = self._settings.max_requests
        now = time.monotonic_ns()
        if most is not None and worker.submits >= most and now >= self._no_successor_until_ns:
            self.recycle([worker])

    def _replace_next(self) -> None:
        while self._due and not self.is_stopping:
            worker, grace_ns = self._due[0]
            if worker.leaving_ns is not None:
                self._due.popleft()
                continue
            successors = [other for other in self.standing_by if other is not worker]
            if worker in self.serving and not successors:
                if not any(_is_coming(slot) for slot in self.slots):
                    # Nobody stands by, and nobody will: a place more, until the old one is gone.
                    self.slots.append(self._make_slot())
                    self.slots[-1].start()
                return
            self._due.popleft()
            self._let_go(worker, grace_ns)
        if self._surplus() > 0 and self.standing_by and not self.is_stopping:
            # Race "what was to be replaced died meanwhile": its place has been filled as well as the one more.
            self._slot_of(self.standing_by[-1]).end(DeathCause.RECYCLED)

    def _let_go(self, worker: Worker, grace_ns: int | None) -> None:
        slot = self._slot_of(worker)
        if self._surplus() > 0:
            slot.end(DeathCause.RECYCLED, grace_ns)
        else:
            slot.replace(DeathCause.RECYCLED, grace_ns)

    def _surplus(self) -> int:
        """Return how many places there are beyond those that were asked for."""
        staying = [slot for slot in self.slots if not slot.is_ending]
        return len(staying) - self._settings.places

    def _slot_of(self, worker: Worker) -> Slot:
        return next(slot for slot in self.slots if slot.worker is worker)

    # --- who serves ------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Let workers that stand by serve where one is missing."""
        self.serving = [
            worker for worker in self.serving if worker.leaving_ns is None and not worker.is_retiring
        ]
        missing = self._settings.workers - len(self.serving)
        for worker in self.standing_by[:missing]:
            self.serving.append(worker)
            if worker.has_stood_by:
                self._owner.emit(events.WorkerPromoted(worker.pid))
        for worker in self.standing_by:
            worker.has_stood_by = True

    # --- what a worker tells ---------------------------------------------------------------------

    def worker_progressed(self, worker: Worker, message: Progress) -> None:
        """Loading goes on."""
        self._owner.pool_loads()
        self.loading = None if self.is_ready else (message.phase, message.fraction)
        self._owner.emit(events.LoadProgress(worker.pid, message.phase, message.fraction))

    def worker_ready(self, worker: Worker) -> None:
        """It can serve, or stand by."""
        self.loading = None
        self._slot_of(worker).apply(WorkerReady())
        self._fill()
        startup_s = (time.monotonic_ns() - worker.spawned_ns) / NS_PER_S
        self._owner.emit(events.WorkerBecameReady(worker.pid, worker.facts, startup_s))
        if not self.is_stopping:
            for slot in self.slots:
                if not slot.is_started:
                    slot.start()
        self._replace_next()
        self._owner.pool_changed()
        self.on_change()

    def worker_retires(self, worker: Worker) -> None:
        """It takes no more attempts: another one serves in its place."""
        self._fill()
        self._owner.pool_changed()

    def worker_hung(self, worker: Worker, stalled_s: float) -> None:
        """It stood still; unless it moves while its stacks are written, it is killed."""
        self._owner.emit(events.WorkerHung(worker.pid, stalled_s))

    def worker_logged(self, worker: Worker, message: Log) -> None:
        """It told something."""
        self._owner.emit(events.WorkerLogged(worker.pid, message.level, printable_lines(message.text)))

    def worker_exited(self, worker: Worker, report: ExitReport) -> None:
        """It is collected: another one serves in its place, and its slot decides what follows."""
        now = time.monotonic_ns()
        slot = self._slot_of(worker)
        # Perhaps it was the one that loaded.
        self.loading = None
        self._owner.emit(
            events.WorkerExited(
                pid=report.pid,
                cause=report.cause,
                status=str(report.status),
                message=report.message,
                output_tail=report.output_tail,
                requests=tuple(attempt.request.id for attempt in worker.attempts.values()),
                seconds=(now - (worker.leaving_ns or now)) / NS_PER_S,
            )
        )
        self._owner.pool_lost(worker, report)
        # First who serves in its place: a new worker waits for those who go on there.
        self._fill()
        slot.worker_exited(report)
        if slot.state.phase not in (SlotPhase.OPEN, SlotPhase.STOPPED):
            self.restarts[report.cause.value] += 1
        if slot.is_done and len(self.slots) > 1:
            self.slots.remove(slot)
        self._replace_next()
        self._owner.pool_changed()
        self.let_start()
        self.on_change()

    def worker_released(self, worker: Worker, release: WorkerRelease) -> None:
        """All that it had taken of the machine has come back, or what is left won't."""
        self._owner.emit(events.WorkerReleased(worker.pid, release))

    def worker_release_late(self, worker: Worker, waited_s: float, left: tuple[int, ...]) -> None:
        """It has been going for some time, and something of it is still there."""
        self._owner.emit(events.WorkerReleaseLate(worker.pid, waited_s, left))

    # --- starts that wait ------------------------------------------------------------------------

    def slot_must_wait(self, slot: Slot) -> bool:
        """Whether the start of a worker would slow down requests that have just lost theirs, and have another."""
        if not self._starts_would_hurt():
            return False
        self._hold_alarm.aim(time.monotonic_ns() + HOLD_NS)
        return True

    def _starts_would_hurt(self) -> bool:
        return not self.is_stopping and self.is_ready and self._owner.pool_is_resuming()

    def let_start(self, *, anyway: bool = False) -> None:
        """Start the workers that had to wait, if nobody is on the way back any more, or it has taken too long."""
        if anyway or not self._starts_would_hurt():
            for slot in list(self.slots):
                slot.go_on()

    # --- what a slot tells -----------------------------------------------------------------------

    def slot_spawned(self, slot: Slot, worker: Worker) -> None:
        """A worker process was started."""
        self._owner.emit(events.WorkerSpawned(worker.pid))

    def slot_backs_off(self, slot: Slot, delay_s: float, restarts: int) -> None:
        """The next start comes after a delay."""
        self._owner.emit(events.RestartScheduled(delay_s, restarts))

    def slot_opened(self, slot: Slot, reason: str) -> None:
        """No worker will be started here by itself any more."""
        cooldown_s = None if slot.is_open_for_good else slot.cooldown_s
        self._owner.emit(events.BreakerOpened(reason, cooldown_s))
        if self._surplus() > 0 and self.serving:
            # The successor of a worker to be replaced can't be had: the old one stays.
            self._due.clear()
            self._no_successor = slot.last_error
            self._no_successor_until_ns = time.monotonic_ns() + to_ns(slot.cooldown_s)
            self.slots.remove(slot)
        elif self.is_open:
            self._owner.pool_gave_up()
        self._replace_next()
        self.on_change()


def _is_coming(slot: Slot) -> bool:
    """Whether a worker will be ready here that isn't yet."""
    if slot.worker is not None and slot.worker.is_retiring:
        return not slot.is_ending
    return slot.is_coming
