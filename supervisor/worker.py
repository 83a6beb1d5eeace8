"""One worker process from spawn to collection: its life cycle, its attempts, its liveness.

`run` is the task that lives as long as the process. Frames (`frames.py`), alarms and the dispatcher's calls change
the state between its awaits, all in the loop's thread; decisions come from the process table.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from signal import SIGTERM, SIGUSR1, SIGUSR2
from typing import Any, Protocol

import anyio

from infervisor.protocol.errors import RemoteProtocolError
from infervisor.protocol.machines import process as p
from infervisor.protocol.messages import Cancel, Drain, Log, Progress, Shutdown
from infervisor.protocol.timeline import NS_PER_S
from infervisor.supervisor.attempt import Attempt
from infervisor.supervisor.embedding import without_embedded
from infervisor.supervisor.exit_report import ExitReport
from infervisor.supervisor.frames import Frames
from infervisor.supervisor.launch import WorkerSettings
from infervisor.supervisor.link import READS_A_TURN, Link
from infervisor.supervisor.model_identity import FileIdentity
from infervisor.supervisor.process import WorkerProcess
from infervisor.supervisor.queries import OpenQueries
from infervisor.supervisor.release import WorkerRelease
from infervisor.supervisor.resources import Resources
from infervisor.supervisor.settings import to_ns
from infervisor.supervisor.timers import Timers
from infervisor.supervisor.watchdog import Watchdog

END_WITHOUT_EXIT_NS = NS_PER_S
"""How long a worker may live on after it closed its frames."""
COLLECT_READS = 1 << 10


class WorkerOwner(Protocol):
    """What a worker tells the pool, in the loop's thread."""

    def worker_progressed(self, worker: Worker, message: Progress) -> None:
        """Loading goes on."""
        ...

    def worker_ready(self, worker: Worker) -> None:
        """Requests can be submitted."""
        ...

    def worker_retires(self, worker: Worker) -> None:
        """It takes no more attempts."""
        ...

    def worker_hung(self, worker: Worker, stalled_s: float) -> None:
        """It stood still; unless it moves while its stacks are written, it is killed."""
        ...

    def worker_logged(self, worker: Worker, message: Log) -> None:
        """It told something."""
        ...

    def worker_released(self, worker: Worker, release: WorkerRelease) -> None:
        """All that it had taken of the machine has come back, or what is left won't."""
        ...

    def worker_release_late(self, worker: Worker, waited_s: float, left: tuple[int, ...]) -> None:
        """It has been going for waited_s seconds, and these processes of it are still there."""
        ...

    def worker_exited(self, worker: Worker, report: ExitReport) -> None:
        """It is collected; its attempts are still listed."""
        ...


class Worker:
    """One process. Created by the slot, run once."""

    def __init__(self, settings: WorkerSettings, owner: WorkerOwner, timers: Timers) -> None:
        self.settings = settings
        self.state = p.ProcessState()
        self.attempts: dict[int, Attempt] = {}
        self.facts: Mapping[str, Any] = {}
        self.versions: Mapping[str, Any] = {}
        self.ready_ns: int | None = None
        self._owner = owner
        self._during = p.ProcessPhase.SPAWNED
        self.leaving_ns: int | None = None
        self.was_cut = False
        """Whether its task was cancelled: then nobody is left to attend another worker."""
        self.submits = 0
        """How many attempts it was given so far."""
        self.has_stood_by = False
        """Whether it was ready before it was needed."""
        self.model: FileIdentity | None = None
        """The model's file as it was when this worker was started."""
        self._asked_for_stacks = False
        self._was_stopped = False
        self._limit = ""
        self._retiring: p.DeathCause | None = None
        # Raises WorkerSpawnError before anything else exists.
        self.process = WorkerProcess(settings.command, settings.environment, settings.snapshots)
        self.spawned_ns = time.monotonic_ns()
        self.resources = Resources(
            self.process,
            settings.memory,
            settings.alert_after_ns,
            timers,
            on_released=lambda release: owner.worker_released(self, release),
            on_late=lambda waited_s, left: owner.worker_release_late(self, waited_s, left),
        )
        self._grace_alarm = timers.alarm(lambda: self.apply(p.GraceOver()))
        self._retire_alarm = timers.alarm(lambda: self.kill(self._retiring or p.DeathCause.RECYCLED))
        self._startup_alarm = timers.alarm(self._startup_over)
        self._watchdog = Watchdog(
            settings.liveness,
            timers,
            self._owed_phases,
            self._hung,
            lambda: self.kill(p.DeathCause.UNRESPONSIVE),
        )
        self.frames = Frames(self, owner, self._watchdog)
        self.link = Link(self.process, self.frames.on_message, self.frames.on_broken)
        self.queries = OpenQueries(self.link)
        self._end_alarm = timers.alarm(self._ended_without_exit)
        self.aim_startup()

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def is_ready(self) -> bool:
        """Whether requests can be submitted."""
        return self.state.phase is p.ProcessPhase.READY and self.leaving_ns is None

    @property
    def is_retiring(self) -> bool:
        """Whether it takes no more attempts, and goes once it is empty."""
        return self._retiring is not None

    @property
    def takes_attempts(self) -> bool:
        """Whether it may be given more attempts, as soon as it has a place.

        Race "its last frames free a place, and it is dead": nothing is submitted to the dead.
        """
        return self.is_ready and not self.is_retiring and not self.process.has_exited()

    @property
    def free_places(self) -> int:
        """How many more attempts it takes now."""
        return self.places - len(self.attempts) if self.takes_attempts else 0

    @property
    def has_suspect(self) -> bool:
        """Whether it holds a request that may have killed its last worker: nobody else may join that."""
        return any(
            attempt.request.suspicion.is_suspect and not attempt.is_idle_suspect
            for attempt in self.attempts.values()
        )

    @property
    def busy_attempts(self) -> int:
        """How many attempts it holds, without suspects that stand still."""
        return sum(not attempt.is_idle_suspect for attempt in self.attempts.values())

    @property
    def places(self) -> int:
        """How many attempts it takes at once."""
        return int(self.facts.get("slots", 1))

    @property
    def longest_step_ns(self) -> int:
        """The longest step of any phase seen so far, in ns."""
        return self._watchdog.longest_step_ns

    # --- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Task: attend the pipes until the exit is seen, read what is left, collect, report.

        Cancelling it kills the process group and collects it before returning.
        """
        try:
            self.apply(p.Connected())
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.link.write_forever)
                tasks.start_soon(self._read_frames)
                tasks.start_soon(self.link.read_output_forever)
                await self.process.wait_exit()
                tasks.cancel_scope.cancel()
        except BaseException:
            # This task was cut, not the worker.
            self.was_cut = True
            self.kill(p.DeathCause.STOPPED)
            raise
        finally:
            self._collect()

    async def _read_frames(self) -> None:
        await self.link.read_frames_forever()
        self._end_alarm.aim(time.monotonic_ns() + END_WITHOUT_EXIT_NS)

    def _collect(self) -> None:
        # The exit decides, not the end of file: a grandchild may hold the pipes. It is killed first, and
        # what the worker had written before it died still counts.
        if self.leaving_ns is None:
            self._leaves(time.monotonic_ns())
        if self.state.phase is not p.ProcessPhase.KILLING:
            self._during = self.state.phase if self.state.cause is None else self._during
        self.process.kill_group()
        # Bounded: a grandchild that left the group may go on writing.
        self.link.read_frames(COLLECT_READS)
        self.link.read_output(COLLECT_READS)
        was_oom = self.resources.was_oom()
        status = self.process.collect()
        self.link.close()
        if self._asked_for_stacks and status.signal_number == SIGUSR2:
            # It has no handler for the signal that asks for its stacks: that is still our doing.
            unready = self.ready_ns is None
            cause = p.DeathCause.STARTUP_TIMEOUT if unready else p.DeathCause.UNRESPONSIVE
            self.apply(p.KillAsked(cause))
        self.apply(p.Exited())
        self._watchdog.stop()
        for alarm in (self._grace_alarm, self._startup_alarm, self._end_alarm, self._retire_alarm):
            alarm.retire()
        report = ExitReport(
            pid=self.pid,
            cause=self.state.cause or p.DeathCause.CRASHED,
            status=status,
            during=self._during,
            output_tail=self.link.output.tail(),
            interpreter=self.settings.command[0],
            failed=self.frames.failed,
            protocol_error=self.frames.broken,
            startup_s=self.settings.startup_s,
            was_stopped=self._was_stopped,
            was_oom=was_oom,
            limit=self._limit,
        )
        self._owner.worker_exited(self, report)
        self.queries.lose(report.error)
        self.resources.look_at_release()

    def apply(self, event: object) -> None:
        """Step the process table and carry out its effects."""
        now = time.monotonic_ns()
        before = self.state
        self.state, effects = p.PROCESS.step(before, event, now)
        if before.cause is None and self.state.cause is not None:
            self._during = before.phase
            self._leaves(now)
        for effect in effects:
            self._carry_out(effect, now)

    def _leaves(self, now: int) -> None:
        if self.leaving_ns is None:
            self.leaving_ns = now
            self.resources.begin_release(now)

    def _carry_out(self, effect: object, now: int) -> None:
        match effect:
            case p.SendLoad():
                self.link.send(self.settings.load)
            case p.AnnounceReady():
                self.ready_ns = now
                self.resources.note_fresh(now)
                self._startup_alarm.aim(None)
                self._owner.worker_ready(self)
            case p.SendDrain():
                self.link.send(Drain())
                self._drained_if_empty()
            case p.SendShutdown():
                self.link.send(Shutdown())
            case p.Terminate():
                self.process.signal(SIGTERM)
            case p.Kill():
                self.process.kill_group()
            case p.ArmGrace(grace):
                graces = self.settings.graces
                self._grace_alarm.aim(now + to_ns(getattr(graces, f"{grace}_s")))

    def stop(self, cause: p.DeathCause = p.DeathCause.STOPPED) -> None:
        """Let it finish what it has and go, with the graces of its settings."""
        self._startup_alarm.aim(None)
        self.apply(p.StopAsked(cause))

    def retire(self, cause: p.DeathCause, grace_ns: int | None = None) -> None:
        """Take no more attempts, and go once those that are here have ended, at most after a grace.

        A worker that retires because it is deaf wouldn't obey: it is killed then.
        """
        if self._retiring is None:
            self._retiring = cause
            self._owner.worker_retires(self)
        if grace_ns is not None:
            # Whoever asks for less time gets it.
            due_ns = time.monotonic_ns() + grace_ns
            self._retire_alarm.aim(min(due_ns, self._retire_alarm.due_ns or due_ns))
        self._go_if_retired()

    def _go_if_retired(self) -> None:
        if self._retiring is None or self.attempts or self.leaving_ns is not None:
            return
        if self._retiring is p.DeathCause.DEAF:
            self.kill(self._retiring)
        else:
            self.stop(self._retiring)

    def kill_for_memory(self, limit: str) -> None:
        """End it now, because it takes too much. limit: what it took and what it was allowed, for people."""
        self._limit = limit
        self.kill(p.DeathCause.MEMORY_LIMIT)

    def kill(self, cause: p.DeathCause) -> None:
        """End it now."""
        self.apply(p.KillAsked(cause))

    # --- attempts --------------------------------------------------------------------------------

    def submit(self, attempt: Attempt, now: int) -> None:
        """Send an attempt. Ask `free_places` before."""
        request = attempt.request
        self.attempts[attempt.id] = attempt
        self.submits += 1
        self._watchdog.moved(now)
        area = request.snapshots
        submit = request.input.to_submit(
            attempt.id,
            request.window.limit,
            delivered=request.delivered,
            snapshot=None if area is None else (area.offset, area.size_bytes),
        )
        self.link.send(without_embedded(submit, len(request.vectors)))
        self._watchdog.watch()

    def cancel_in_band(self, attempt: Attempt, now: int) -> None:
        """First rung: a cancel frame; a submit that hasn't left yet is taken back instead."""
        if self.link.withdraw(attempt.id):
            attempt.on_process_gone(now)
            return
        self.link.send(Cancel(attempt.id))

    def cancel_by_signal(self, attempt: Attempt) -> None:
        """Second rung: the id past anything that jams control, and a signal to look at it."""
        self.link.send_urgent(attempt.id)
        self.process.signal(SIGUSR1)

    def free(self, attempt: Attempt) -> None:
        """Forget an attempt that is released."""
        self.attempts.pop(attempt.id, None)
        self._drained_if_empty()
        self._go_if_retired()

    def _drained_if_empty(self) -> None:
        if self.state.phase is p.ProcessPhase.DRAINING and not self.attempts:
            self.apply(p.Drained())

    def _ended_without_exit(self) -> None:
        torn = " in the middle of one" if self.link.has_torn_frame else ""
        self.frames.on_broken(RemoteProtocolError(f"its frames ended{torn}, but the process lives on"))

    # --- deadlines of the process ----------------------------------------------------------------

    def aim_startup(self) -> None:
        """Give the whole time to become ready again, unless it is."""
        startup_s = self.settings.startup_s
        if startup_s is not None and self.ready_ns is None:
            self._startup_alarm.aim(time.monotonic_ns() + to_ns(startup_s))

    def _startup_over(self) -> None:
        if self.ready_ns is not None:
            return
        if self.state.phase is p.ProcessPhase.LOADING and not self._asked_for_stacks:
            # Earlier it may have no handler for the signal yet. Progress meanwhile gives it the whole time again.
            self._ask_for_stacks()
            self._startup_alarm.aim(time.monotonic_ns() + to_ns(self.settings.liveness.dump_s))
        else:
            self.kill(p.DeathCause.STARTUP_TIMEOUT)

    def _ask_for_stacks(self) -> None:
        """Have all stacks written into its output before it is killed; works while the interpreter is locked."""
        self._asked_for_stacks = True
        self.process.signal(SIGUSR2)

    def owes_again(self, attempt: Attempt, now: int) -> None:
        """A paused attempt got credit: if nothing else is owed, the liveness clock starts now."""
        if not any(other.owes_a_step for other in self.attempts.values() if other is not attempt):
            self._watchdog.moved(now)
        self._watchdog.watch()

    def _owed_phases(self) -> list[str]:
        if self.state.phase not in (p.ProcessPhase.READY, p.ProcessPhase.DRAINING):
            return []
        return [attempt.step_phase for attempt in self.attempts.values() if attempt.owes_a_step]

    def _hung(self, stalled_s: float) -> None:
        self._owner.worker_hung(self, stalled_s)
        self._was_stopped = self.process.is_stopped()
        self._ask_for_stacks()

    def forgive_stall(self, now: int) -> None:
        """The parent was stalled: read what the pipe holds first, and start the liveness clocks anew."""
        # Not until it is empty: a worker with much credit would go on filling it.
        self.link.read_frames(READS_A_TURN)
        self._watchdog.moved(now)
        if self._end_alarm.due_ns is not None:
            # Race "frames ended, then the parent stalled": its exit has had no time to be seen.
            self._end_alarm.aim(now + END_WITHOUT_EXIT_NS)
        if self.ready_ns is None and self.leaving_ns is None:
            self.aim_startup()
        self._watchdog.watch()
