"""Makes a cell of the chaos table happen with a real worker, and looks at what became of everything.

In the worker are `keeps` (on_crash="resume"), `fails` (on_crash="fail") and, where a phase needs one, a `subject`.
The fault comes when an event, a token or a file says that the phase is reached. Afterwards the next request is
answered exactly, and every request was released once. Runs in the test's task.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

from infervisor import Deadlines, EndReason, Stage, Supervisor
from infervisor.protocol.machines.process import DeathCause
from infervisor.supervisor.events import (
    BreakerOpened,
    CancelEscalated,
    LoadProgress,
    RequestInterrupted,
    RequestReleased,
    RequestResumed,
    RequestStarted,
    WorkerBecameReady,
    WorkerExited,
    WorkerSpawned,
)
from tests.chaos.making import READ_BEFORE_DRAINING, READ_FIRST, WINDOW, Making
from tests.chaos.reader import TOKENS, Reader
from tests.chaos.table import End, Expected, Phase
from tests.helpers.inside import freeze, until, until_buffered
from tests.helpers.supervised import Told, answers
from tests.helpers.waiting import is_gone

PROMPT = "word " * 40
BLOCKED_S = 0.3
PATIENCE_S = 40.0


class CellRun(Making):
    """One cell while it happens."""

    def __init__(self, name: str, phase: Phase, expected: Expected, directory: Path) -> None:
        super().__init__(name, phase, expected, directory)
        self.told = Told()
        self.first_pid = 0
        self.supervisor: Supervisor

    # --- the fault -----------------------------------------------------------------------------------

    def on_event(self, event: Any) -> None:
        """Note it; strike in the moment of the spawn, or while the model is loaded."""
        self.told(event)
        if isinstance(event, WorkerSpawned) and not self.first_pid:
            self.first_pid = event.pid
            if self.phase is Phase.SPAWN:
                self.strike_at_once()
        if self.phase is Phase.LOAD and self.name == "host_blocked" and isinstance(event, LoadProgress):
            if event.phase == "load" and event.fraction == 0:
                self.strike_at_once()

    def strike_at_once(self) -> None:
        """Let it happen now, without waiting for anything."""
        if self.name == "host_blocked":
            time.sleep(BLOCKED_S)
        elif self.name == "stop_shortly":
            os.kill(self.first_pid, signal.SIGSTOP)
            os.kill(self.first_pid, signal.SIGCONT)
        elif self.is_by_signal:
            assert self.fault.number is not None
            os.kill(self.first_pid, self.fault.number)

    async def strike(self) -> None:
        """Let it happen now; what the engine does wrong by itself happens when it gets there."""
        if self.name == "grandchild":
            await until(self.happened.exists)
        if self.name == "stop_shortly":
            await freeze(self.first_pid)
        self.strike_at_once()

    # --- the phases --------------------------------------------------------------------------------

    @asynccontextmanager
    async def requests(self, *names: str, **options: Any) -> AsyncIterator[list[Reader]]:
        """Start a request each; `fails` ends with its worker, the others go on."""
        readers = []
        for name in names:
            on_crash = "fail" if name == "fails" else "resume"
            given = {
                "max_tokens": TOKENS,
                "window": WINDOW,
                "deadlines": Deadlines(startup_s=None),
                **options,
            }
            stream = self.supervisor.stream(f"{name} {PROMPT}", on_crash=on_crash, **given)
            await stream.__aenter__()
            readers.append(Reader(stream))
        yield readers
        # Only on success: a failing test says more with its streams as they are.
        for reader in readers:
            await reader.stream.__aexit__(None, None, None)

    async def run(self) -> None:
        """Make it happen and check everything."""
        supervisor = Supervisor(
            engine="scripted", options=self.options(), on_event=self.on_event, **self.settings()
        )
        with anyio.fail_after(PATIENCE_S):
            async with supervisor as self.supervisor:
                phase: Callable[[], Any] = getattr(self, f"_{self.phase}")
                await phase()
                if self.expected.end not in (End.CLOSED, End.REFUSED):
                    await self._next_is_answered()
            self._everything_was_told_once()

    async def _before(self) -> None:
        """Nothing is in the worker when it happens."""
        async with self.requests("keeps", "fails") as readers:
            if self.phase is Phase.LOAD and self.is_by_signal:
                await until(self.happened.exists)
                await self.strike()
            await self._finish(*readers)
            self._judge(*readers)

    _spawn = _handshake = _load = _before

    async def _idle(self) -> None:
        await answers(self.supervisor)
        await self.strike()
        if self.expected.end is End.WAITED:
            await self.told.wait_for(WorkerExited)
        await self._before()

    async def _preparing(self) -> None:
        others = ("poison", "keeps") if self.expected.end is End.POISONED else ("keeps", "fails")
        async with self.requests(*others) as readers:
            if not self.is_from_inside:
                await until(self.happened.exists)
                await self.strike()
            await self._finish(*readers)
            self._judge(*readers)

    async def _prefill(self) -> None:
        others = ("poison", "keeps") if self.expected.end is End.POISONED else ("keeps", "fails")
        async with self.requests(*others) as readers:
            if not self.is_from_inside:
                await self.told.wait_for(RequestStarted, count=2)
            await self.strike()
            await self._finish(*readers)
            self._judge(*readers)

    async def _decode(self) -> None:
        others = ("poison", "keeps") if self.expected.end is End.POISONED else ("keeps", "fails")
        async with self.requests(*others) as readers:
            for reader in readers:
                await reader.read(READ_FIRST)
            await self.strike()
            if self.expected.cause is DeathCause.MEMORY_LIMIT:
                await self.told.wait_for(WorkerExited)
            await self._finish(*readers)
            self._judge(*readers)

    async def _paused(self) -> None:
        async with self.requests("keeps", "fails", window=2) as readers:
            for reader in readers:
                await until_buffered(reader.stream, 2)
            await self.strike()
            await self._finish(*readers)
            self._judge(*readers)

    async def _ending(self) -> None:
        async with (
            self.requests("keeps", "fails") as readers,
            self.requests("subject", max_tokens=3) as (subject,),
        ):
            await subject.read(4)
            subject_reason = subject.reason
            if not self.is_from_inside:
                await until(self.happened.exists)
                await self.strike()
            await self._finish(subject, *readers)
            assert subject_reason is EndReason.LENGTH
            subject.is_whole(3)
            self._judge(*readers)

    async def _cancelling(self) -> None:
        async with self.requests("keeps", "fails") as readers, self.requests("subject") as (subject,):
            await subject.read(2)
            if self.expected.end is End.UNHARMED:
                await self._cancel_while_it_stands(subject)
            else:
                await until(self.happened.exists)
                subject.stream.cancel()
                await self.told.wait_for(CancelEscalated)
                await self.strike()
            await self._finish(subject, *readers)
            assert subject.reason is EndReason.CANCELLED
            assert subject.error is None, "its own caller hears of no fault"
            assert subject.stream.report.is_released
            assert subject.stream.report.resumes == ()
            if self.expected.cause is DeathCause.CANCEL_KILL:
                assert subject.stream.report.stage is Stage.KILL
            self._judge(*readers)

    async def _cancel_while_it_stands(self, subject: Reader) -> None:
        if self.name == "stop_shortly":
            await freeze(self.first_pid)
            subject.stream.cancel()
            os.kill(self.first_pid, signal.SIGCONT)
        else:
            subject.stream.cancel()
            self.strike_at_once()

    async def _draining(self) -> None:
        async with self.requests("keeps", "fails") as readers:
            for reader in readers:
                await reader.read(READ_BEFORE_DRAINING)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.supervisor.recycle)
                # It serves, so the old one takes no more, and finishes what it has.
                await self.told.wait_for(WorkerBecameReady, count=2)
                await anyio.lowlevel.checkpoint()
                await self.strike()
                await self._finish(*readers)
            self._judge(*readers)

    async def _closing(self) -> None:
        async with self.requests("keeps", "fails") as readers:
            await until(self.happened.exists) if self.planned() else await readers[0].read(2)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.supervisor.stop)
                while not all(reader.reason for reader in readers):
                    await anyio.lowlevel.checkpoint()
                await self.strike()
            await self._finish(*readers)
            for reader in readers:
                reader.ended_as(EndReason.SHUTTING_DOWN)
        assert len(self.told.of(WorkerSpawned)) == 1, "nobody starts a worker while closing"

    async def _finish(self, *readers: Reader) -> None:
        async with anyio.create_task_group() as tasks:
            for reader in readers:
                tasks.start_soon(reader.finish)

    # --- what is expected --------------------------------------------------------------------------

    def _judge(self, keeps: Reader, fails: Reader) -> None:
        end, cause = self.expected.end, self.expected.cause
        if end is End.POISONED:
            self._judge_poisoned(poison=keeps, keeps=fails)
        elif end is End.REFUSED:
            keeps.ended_as(EndReason.UNAVAILABLE)
            fails.ended_as(EndReason.UNAVAILABLE)
            assert len(self.told.of(BreakerOpened)) == 1
        elif end is End.FAILED:
            assert self.expected.reason is not None
            keeps.ended_as(self.expected.reason)
            # In the same step, unless it came a moment later.
            fails.ended_as(self.expected.reason) if fails.error else fails.is_whole()
        elif end in (End.UNHARMED, End.WAITED):
            keeps.is_whole()
            fails.is_whole()
            assert keeps.stream.report.resumes == fails.stream.report.resumes == ()
        else:
            assert cause is not None
            keeps.is_whole()
            (resume,) = keeps.stream.report.resumes
            assert (resume.cause, resume.worker_pid) == (cause, self.first_pid)
            assert resume.pause_s is not None
            assert 0 <= resume.delivered_tokens < TOKENS
            if self.phase is Phase.PREPARING and self.name == "hang":
                # A thread that hangs keeps nobody else waiting: its neighbour was done before it was found out.
                fails.is_whole()
            else:
                fails.ended_as(cause.end_reason)
            assert fails.stream.report.resumes == ()
            (interrupted,) = self.told.of(RequestInterrupted)
            (resumed,) = self.told.of(RequestResumed)
            assert interrupted.request_id == resumed.request_id == keeps.id
            assert (interrupted.pid, interrupted.cause) == (self.first_pid, cause)
            assert resumed.pid == keeps.stream.report.worker_pid != self.first_pid

    def _judge_poisoned(self, poison: Reader, keeps: Reader) -> None:
        poison.ended_as(EndReason.POISONED)
        assert len(poison.stream.report.resumes) >= 1
        keeps.is_whole()
        deaths = [event.requests for event in self.told.of(WorkerExited)]
        assert deaths.count((poison.id,)) >= 2, "only who is alone twice is to blame"

    async def _next_is_answered(self) -> None:
        pid = await answers(self.supervisor)
        cause = self.expected.cause
        if cause is None and self.phase is not Phase.DRAINING:
            assert pid == self.first_pid
        else:
            assert pid != self.first_pid
            await self.told.wait_for(WorkerExited)
            assert is_gone(self.first_pid)
        exited = {event.pid: event.cause for event in self.told.of(WorkerExited)}
        if self.expected.end is End.POISONED:
            assert set(exited.values()) == {DeathCause.CRASHED}
        elif self.phase is not Phase.DRAINING or cause is not None:
            assert exited == ({} if cause is None else {self.first_pid: cause})

    def _everything_was_told_once(self) -> None:
        released = [event.report for event in self.told.of(RequestReleased)]
        again = [i for i, count in Counter(report.request_id for report in released).items() if count != 1]
        assert again == [], "released more than once"
        poisoned = [report for report in released if report.end_reason is EndReason.POISONED]
        assert len(poisoned) == (self.expected.end is End.POISONED), poisoned
        assert not [child for child in self.told.of(WorkerSpawned) if not is_gone(child.pid)]
        # One that was to go anyway is not restarted.
        if self.expected.end in (End.WAITED, End.RESUMED, End.ENDED) and self.phase is not Phase.DRAINING:
            restarts = dict(self.supervisor.status().restarts)
            assert restarts.get(str(self.expected.cause)) == 1, restarts
