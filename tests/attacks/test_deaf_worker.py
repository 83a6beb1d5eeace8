"""Workers that don't read their control pipe: every rung of the ladder comes on time, and for the right request."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from infervisor import EndReason, Escalation, Liveness, Stage, Supervisor, WorkerUnresponsive
from infervisor.protocol.machines.process import DeathCause
from infervisor.protocol.messages import Credit
from infervisor.supervisor.events import CancelEscalated, WorkerExited
from tests.helpers.inside import (
    freeze,
    holds_nothing,
    read_into,
    until,
    until_buffered,
    words,
    worker_of,
)
from tests.helpers.leaks import no_leftovers
from tests.helpers.lying_worker import lying
from tests.helpers.models import LOOP, build_model
from tests.helpers.supervised import QUICK_GRACES, QUICK_RESTART, Told, scripted

pytestmark = pytest.mark.anyio

SIGNAL_S, KILL_S = 0.4, 0.8
LADDER = Escalation(
    signal_after_s=SIGNAL_S, signal_step_factor=0, kill_after_s=KILL_S, kill_step_factor=0, alert_after_s=60
)
LATE_S = 3.0
"""How late a rung may come and how long the loop may stand on a busy machine. A write that blocks never ends."""
BIG = "x" * 200_000
"""A prompt of which no pipe holds more than a part."""
PRETENDS = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
control = int(sys.argv[sys.argv.index("--control") + 1])
ready()
while True:
    READS
    time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """Check children, descriptors and threads around each test."""
    with no_leftovers():
        yield


class Clocked(Told):
    """What was told, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[float] = []

    def __call__(self, event: Any) -> None:
        self.at.append(time.monotonic())
        super().__call__(event)

    def when(self, *wanted: object) -> list[float]:
        """Return when these events were told."""
        return [at for at, event in zip(self.at, self.events, strict=True) if event in wanted]


class Ticker:
    """The longest time for which the event loop stood still."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        """Task: measure."""
        while True:
            before = time.monotonic()
            await anyio.sleep(0.01)
            self.longest_s = max(self.longest_s, time.monotonic() - before)


@asynccontextmanager
async def ticking() -> AsyncIterator[Ticker]:
    """Yield a ticker; at the end, the loop has never stood still for long."""
    ticker = Ticker()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ticker.run)
        yield ticker
        tasks.cancel_scope.cancel()
    assert ticker.longest_s < LATE_S


@asynccontextmanager
async def deaf(kind: str, tmp_path: Path) -> AsyncIterator[tuple[Supervisor, Clocked]]:
    """Yield a supervisor whose worker reads its control pipe no more, or never did."""
    told = Clocked()
    settings: dict[str, Any] = {
        "escalation": LADDER, "restart": QUICK_RESTART, "graces": QUICK_GRACES, "on_event": told,
    }  # fmt: skip
    if kind in ("never reads", "reads a byte at a time"):
        # The second one is in the middle of the submit for as long as the test lasts.
        reads = "os.read(control, 1)" if kind == "reads a byte at a time" else "pass"
        python = lying(tmp_path, PRETENDS.replace("READS", reads))
        async with Supervisor(engine="lies", python=python, **settings) as supervisor:
            yield supervisor, told
    elif kind == "llama is stopped":
        model = build_model(tmp_path / "loop.gguf", LOOP)
        async with Supervisor(model, options={"threads": 1}, **settings) as supervisor:
            await freeze(worker_of(supervisor).pid)
            yield supervisor, told
    else:
        # Once only: the next worker is healthy.
        fault = {"at": "release", "kind": "block_reader", "once_file": str(tmp_path / "once")}
        faults = [fault] if kind == "its reader is blocked" else []
        async with Supervisor(engine="scripted", options={"faults": faults}, **settings) as supervisor:
            if faults:
                await supervisor.generate("deafen", max_tokens=1)
            else:
                await freeze(worker_of(supervisor).pid)
            yield supervisor, told


@pytest.mark.parametrize(
    "kind",
    ["is stopped", "llama is stopped", "its reader is blocked", "never reads", "reads a byte at a time"],
)
async def test_a_submit_that_a_worker_doesnt_read_holds_up_neither_the_ladder_nor_the_loop(
    kind: str, tmp_path: Path
) -> None:
    async with deaf(kind, tmp_path) as (supervisor, told), ticking():
        pid = worker_of(supervisor).pid
        async with supervisor.stream(BIG) as stream, supervisor.stream("waits", max_tokens=3) as waits:
            assert worker_of(supervisor).link._now, "the frame is under way"
            asked = time.monotonic()
            stream.cancel()
            report = await stream.released()
            (exited,) = told.of(WorkerExited)
            if kind in ("never reads", "reads a byte at a time"):
                waits.cancel()
            else:
                assert await waits.text() == ("abc" if "llama" in kind else words(3))
        assert (report.end_reason, report.stage) == (EndReason.CANCELLED, Stage.KILL)
        assert (exited.pid, exited.cause) == (pid, DeathCause.CANCEL_KILL)
        escalated = told.of(CancelEscalated)
        assert [event.stage for event in escalated] == [Stage.SIGNAL, Stage.KILL]
        signalled, killed = (at - asked for at in told.when(*escalated))
        (collected,) = (at - asked for at in told.when(exited))
        assert SIGNAL_S <= signalled < SIGNAL_S + LATE_S
        assert signalled + KILL_S <= killed < signalled + KILL_S + LATE_S
        assert killed <= collected < killed + LATE_S
        assert report.timeline.release_s is not None
        assert SIGNAL_S + KILL_S <= report.timeline.release_s <= collected + 0.001
        assert not psutil.pid_exists(pid)


async def test_many_submits_to_a_worker_that_doesnt_read_are_taken_back_or_share_one_kill(
    tmp_path: Path,
) -> None:
    told = Clocked()
    async with Supervisor(
        engine="scripted", options={"slots": 4}, escalation=LADDER, restart=QUICK_RESTART, on_event=told
    ) as supervisor:
        await freeze(worker_of(supervisor).pid)
        streams = [supervisor.stream(BIG) for _ in range(8)]
        async with ticking():
            for stream in streams:
                await stream.__aenter__()
            for stream in reversed(streams):
                stream.cancel()
            # Of four not a byte was written, and four never had a place.
            assert [stream.report.is_released for stream in streams] == [False, *[True] * 7]
            reports = [await stream.released() for stream in streams]
        assert [report.stage for report in reports] == [Stage.KILL, *[Stage.IN_BAND] * 3, *[None] * 4]
        assert {report.end_reason for report in reports} == {EndReason.CANCELLED}
        assert len(told.of(WorkerExited)) == 1
        assert (await supervisor.generate("next", max_tokens=3)).text == words(3)
        assert holds_nothing(supervisor)


@pytest.mark.parametrize("jam", ["blocked", "blocked and full"])
async def test_the_signal_ends_only_the_right_request_and_the_deaf_worker_goes_once_the_others_are_done(
    jam: str, tmp_path: Path
) -> None:
    fault = {"at": "decode", "after": 3, "kind": "block_reader", "prompt_contains": "jam"}
    options: dict[str, Any] = {"slots": 4, "pace_s": 0.01, "faults": [fault]}
    ladder = Escalation(signal_after_s=SIGNAL_S, signal_step_factor=0, kill_after_s=60, kill_step_factor=0)
    async with scripted(options, escalation=ladder) as (supervisor, told), ticking():
        worker = worker_of(supervisor)
        # All the credit that they need comes with their submits: no credit can follow.
        async with (
            supervisor.stream("one", window=1000, max_tokens=150) as one,
            supervisor.stream("right", window=1000) as right,
            supervisor.stream("other", window=1000, max_tokens=120) as other,
            supervisor.stream("jam", window=1000, max_tokens=100) as jammed,
            supervisor.stream("waits", max_tokens=3) as waits,
        ):
            await until(lambda: "block_reader at decode" in worker.link.output.tail())
            if jam == "blocked and full":
                # Credit for what ended long ago is ignored, and takes up room.
                while not worker.link._now:
                    worker.link.send(Credit(1, 1))
            await until_buffered(right, 10)
            right.cancel()
            report = await right.released()
            assert (report.end_reason, report.stage) == (EndReason.CANCELLED, Stage.SIGNAL)
            assert report.timeline.release_s is not None
            assert SIGNAL_S <= report.timeline.release_s < SIGNAL_S + LATE_S
            assert report.timeline.cancel_noticed_ns is not None
            assert report.usage.computed_tokens < 1000, "it was stopped, and not for want of credit"
            assert waits.report.timeline.submitted_ns is None, "a deaf worker gets nothing more to do"
            for stream, tokens in ((one, 150), (other, 120), (jammed, 100)):
                assert await stream.text() == words(tokens)
                assert (await stream.released()).stage is None
                assert stream.end_reason is EndReason.LENGTH
            assert await waits.text() == words(3)
        assert [event.stage for event in told.of(CancelEscalated)] == [Stage.SIGNAL]
        (exited,) = told.of(WorkerExited)
        assert (exited.pid, exited.cause, exited.requests) == (worker.pid, DeathCause.DEAF, ())
        assert waits.report.worker_pid not in (None, worker.pid)
        assert holds_nothing(supervisor)


async def test_who_needs_more_of_a_deaf_worker_than_it_has_heard_is_told_in_time(tmp_path: Path) -> None:
    fault = {"at": "decode", "after": 3, "kind": "block_reader", "prompt_contains": "jam"}
    options: dict[str, Any] = {"slots": 2, "pace_s": 0.01, "faults": [fault]}
    liveness = Liveness(hang_after_s=1.5, step_factor=1, unmeasured_s=1.5, dump_s=0.2)
    async with scripted(options, escalation=LADDER, liveness=liveness) as (supervisor, told):
        async with supervisor.stream("needs credit", window=8) as needs, supervisor.stream("jam") as jammed:
            texts: list[str] = []
            await until_buffered(jammed, 10)
            jammed.cancel()
            assert (await jammed.released()).stage is Stage.SIGNAL
            with pytest.raises(WorkerUnresponsive) as caught:
                await read_into(needs, texts)
            assert "".join(texts) == words(len(texts))
            assert len(texts) >= 8, "what its credit was good for has arrived"
            assert caught.value.report.end_reason is EndReason.WORKER_UNRESPONSIVE
        assert (await supervisor.generate("next", max_tokens=3)).text == words(3)
        assert told.of(WorkerExited)[0].cause is DeathCause.UNRESPONSIVE
