"""Rows of the process table that no ordinary course takes: told to go at odd moments, told twice, and too late."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from infervisor import (
    Deadlines,
    EndReason,
    RestartPolicy,
    Stage,
    StopGraces,
    Stream,
    Supervisor,
    WorkerUnresponsive,
)
from infervisor.protocol.machines.process import DeathCause
from infervisor.supervisor.events import RequestReleased, WorkerBecameReady, WorkerExited, WorkerSpawned
from tests.helpers.inside import PATIENT, until, worker_of
from tests.helpers.lying_worker import lying
from tests.helpers.odd_worker import as_interpreter
from tests.helpers.supervised import QUICK_GRACES, Told, answers, scripted

pytestmark = pytest.mark.anyio

FRAMES = """
def all_frames():
    greet()
    say("ready", now(), "print", {"slots": 1, "context_tokens": 1000})
    say("failed", now(), "odd", "it failed as well", "", False)
"""
IGNORES: dict[str, Any] = {"faults": [{"at": "decode", "after": 1, "kind": "ignore_cancel"}]}
"""No cancel and no drain ends a request."""


def when_terminated(then: str, file: Path, before: str = "") -> str:
    """Return a script that touches `file` when SIGTERM will make it do `then`."""
    return f"""
import os, pathlib, signal
{FRAMES}
def on_term(*_):
    {then}
signal.signal(signal.SIGTERM, on_term)
{before}
pathlib.Path({str(file)!r}).touch()
done()
"""


def wait_for_file(path: Path) -> None:
    """Block this loop until the file is there: meanwhile it reads no frame."""
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} doesn't appear"
        time.sleep(0.005)


async def exit_of(told: Told) -> WorkerExited:
    """Return the only exit that there may be."""
    await told.wait_for(WorkerExited)
    (exited,) = told.of(WorkerExited)
    return exited


# --- before it is ready --------------------------------------------------------------------------------


@pytest.mark.produces(
    "process: spawned × StopAsked → terminating",
    "process: terminating × Connected → terminating",
    "slot: starting × WorkerDied → starting",
)
async def test_a_worker_that_is_replaced_in_the_moment_of_its_spawn() -> None:
    told = Told()

    def on_event(event: object) -> None:
        told(event)
        if isinstance(event, WorkerSpawned) and len(told.of(WorkerSpawned)) == 1:
            supervisor.restart_worker()

    supervisor = Supervisor(engine="scripted", on_event=on_event)
    async with supervisor:
        first, second = told.of(WorkerSpawned)
        assert await answers(supervisor) == second.pid
        exited = await exit_of(told)
        assert (exited.pid, exited.cause) == (first.pid, DeathCause.STOPPED)


@pytest.mark.produces(
    "process: spawned × KillAsked → killing",
    "process: killing × Connected → killing",
)
async def test_a_deadline_that_is_over_before_the_pipes_are_attended() -> None:
    told = Told()
    # The second one is spawned by an alarm: its own deadline rings before any other task has its turn.
    restart = RestartPolicy(max_failed_starts=1, backoff_initial_s=0.01, cooldown_s=600)
    with pytest.raises(WorkerUnresponsive, match=r"made no progress for .* s while starting"):
        async with Supervisor(
            engine="scripted", deadlines=Deadlines(startup_s=1e-9), restart=restart, on_event=told
        ):
            pytest.fail("it became ready")
    assert [event.cause for event in told.of(WorkerExited)] == [DeathCause.STARTUP_TIMEOUT] * 2


@pytest.mark.produces("process: handshake × KillAsked → killing", "process: killing × Exited → exited")
async def test_an_interpreter_that_never_says_hello_is_ended_by_the_deadline(tmp_path: Path) -> None:
    told = Told()
    with pytest.raises(WorkerUnresponsive, match="before its first message"):
        async with Supervisor(
            engine="scripted", python=as_interpreter(tmp_path, "exec sleep 600"), on_event=told,
            deadlines=Deadlines(startup_s=0.3), restart=RestartPolicy(max_failed_starts=0),
        ):  # fmt: skip
            pytest.fail("it became ready")
    assert (await exit_of(told)).status == "SIGKILL(-9)"


@pytest.mark.produces(
    "process: handshake × StopAsked → terminating",
    "process: terminating × HelloArrived → terminating",
    "process: terminating × ReadyArrived → terminating",
    "process: terminating × FailedArrived → terminating",
)
async def test_frames_that_were_under_way_when_it_was_told_to_go_change_nothing(tmp_path: Path) -> None:
    waits = tmp_path / "waits"
    python = lying(tmp_path, when_terminated("all_frames(); os._exit(0)", waits))
    async with scripted(python=python, wait_until_ready=False) as (supervisor, told):
        await until(waits.exists)
        assert supervisor.status().worker == "handshake"
        await supervisor.stop()
        exited = await exit_of(told)
        assert (exited.cause, exited.status) == (DeathCause.STOPPED, "exit code 0")
        assert told.of(WorkerBecameReady) == []


@pytest.mark.produces(
    "process: killing × HelloArrived → killing",
    "process: killing × ReadyArrived → killing",
    "process: killing × FailedArrived → killing",
)
async def test_frames_that_are_read_after_the_kill_change_nothing(tmp_path: Path) -> None:
    said = tmp_path / "said"
    script = f"import pathlib\n{FRAMES}\nready()\nhear('submit')\nall_frames()\n"
    script += f"pathlib.Path({str(said)!r}).touch()\ndone()\n"
    async with scripted(python=lying(tmp_path, script)) as (supervisor, told):
        async with supervisor.stream("hello") as stream:
            # Blocked until all of it lies in the pipe: this loop reads none of it before the kill.
            wait_for_file(said)
            stream.kill()
            assert (await stream.released()).stage is Stage.KILL
        exited = told.of(WorkerExited)[0]
        assert (exited.cause, exited.status) == (DeathCause.CANCEL_KILL, "SIGKILL(-9)")


@pytest.mark.produces("process: terminating × KillAsked → killing", "process: killing × GraceOver → killing")
async def test_a_worker_that_failed_and_stays_is_killed_by_the_first_of_two_alarms(tmp_path: Path) -> None:
    script = 'greet()\nhear("load")\nsay("failed", now(), "odd", "no", "", True)\n'
    script += "import time\ntime.sleep(600)\n"
    graces = StopGraces(exit_s=1, terminate_s=600)
    async with scripted(
        python=lying(tmp_path, script),
        deadlines=Deadlines(startup_s=1),
        graces=graces,
        wait_until_ready=False,
    ) as (supervisor, told):
        await until(lambda: supervisor.status().worker == "terminating")
        # Blocked beyond both: the deadline, which is older, rings, then the grace, and only then is the exit seen.
        time.sleep(1.1)  # noqa: ASYNC251
        exited = await exit_of(told)
        assert (exited.cause, exited.status) == (DeathCause.LOAD_FAILED, "SIGKILL(-9)")


# --- told to go, and told again ------------------------------------------------------------------------


@pytest.mark.produces("process: terminating × StopAsked → terminating")
async def test_closing_while_the_worker_is_being_replaced() -> None:
    async with scripted() as (supervisor, told):
        supervisor.restart_worker()
        assert supervisor.status().worker == "terminating"
        await supervisor.stop()
        assert (await exit_of(told)).cause is DeathCause.STOPPED
        assert len(told.of(WorkerSpawned)) == 1


@pytest.mark.produces(
    "process: ready × KillAsked → killing",
    "process: killing × KillAsked → killing",
    "process: killing × StopAsked → killing",
)
async def test_killing_two_neighbours_and_closing_all_in_one_moment() -> None:
    async with scripted({"slots": 2, "pace_s": 60}) as (supervisor, told):
        async with supervisor.stream("one") as one, supervisor.stream("two") as two:
            one.kill()
            two.kill()
            assert supervisor.status().worker == "killing"
            await supervisor.stop()
            assert [one.end_reason, two.end_reason] == [EndReason.CANCELLED] * 2
        assert (await exit_of(told)).cause is DeathCause.CANCEL_KILL
        assert len(told.of(WorkerSpawned)) == 1


@pytest.mark.produces("process: terminating × KillAsked → killing")
async def test_a_worker_that_lies_when_it_is_told_to_go_is_killed_at_once(tmp_path: Path) -> None:
    waits = tmp_path / "waits"
    script = when_terminated('say("released", now(), 7, None, 0)', waits)
    graces = StopGraces(drain_s=600, exit_s=600, terminate_s=600)
    async with scripted(python=lying(tmp_path, script), graces=graces, wait_until_ready=False) as (
        supervisor,
        told,
    ):
        await until(waits.exists)
        with anyio.fail_after(20):
            await supervisor.stop()
        exited = await exit_of(told)
        assert (exited.cause, exited.status) == (DeathCause.STOPPED, "SIGKILL(-9)")


# --- while it drains -----------------------------------------------------------------------------------


@asynccontextmanager
async def draining(**settings: Any) -> AsyncIterator[tuple[Supervisor, Told, Stream]]:
    """Yield a supervisor that is being stopped, with a stream that the worker doesn't let go."""
    async with scripted(IGNORES, **settings) as (supervisor, told):
        async with supervisor.stream("hello") as stream:
            await until(lambda: "ignore_cancel at decode" in worker_of(supervisor).link.output.tail())
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(supervisor.stop)
                while supervisor.status().worker != "draining":
                    await anyio.lowlevel.checkpoint()
                with anyio.fail_after(20):
                    yield supervisor, told, stream
                    await told.wait_for(RequestReleased)
            assert stream.end_reason is EndReason.SHUTTING_DOWN
        assert len(told.of(WorkerSpawned)) == 1


@pytest.mark.produces("process: draining × GraceOver → terminating")
async def test_a_worker_that_doesnt_drain_in_time_is_terminated() -> None:
    graces = StopGraces(drain_s=0.2, exit_s=600, terminate_s=600)
    async with draining(escalation=PATIENT, graces=graces) as (_, told, _):
        exited = await exit_of(told)
    assert (exited.cause, exited.status) == (DeathCause.STOPPED, "SIGTERM(-15)")


@pytest.mark.produces("process: draining × KillAsked → killing")
async def test_a_ladder_goes_on_while_the_worker_drains() -> None:
    graces = StopGraces(drain_s=600, exit_s=600, terminate_s=600)
    async with draining(graces=graces) as (_, told, stream):
        exited = await exit_of(told)
    assert (exited.cause, exited.status) == (DeathCause.STOPPED, "SIGKILL(-9)")
    assert stream.report.stage is Stage.KILL


@pytest.mark.produces("process: draining × Exited → exited")
async def test_a_worker_that_dies_while_it_drains_is_collected() -> None:
    graces = StopGraces(drain_s=600, exit_s=600, terminate_s=600)
    async with draining(escalation=PATIENT, graces=graces) as (supervisor, told, _):
        pid = supervisor.status().worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGSEGV)
        exited = await exit_of(told)
    assert (exited.cause, exited.status) == (DeathCause.STOPPED, "SIGSEGV(-11)")


# --- when it is gone -----------------------------------------------------------------------------------


@pytest.mark.produces("process: exited × KillAsked → exited", "end: worker_crashed", "end: cancelled")
async def test_a_kill_that_comes_while_the_death_is_being_told_is_too_late() -> None:
    told = Told()
    streams: list[Stream] = []

    def on_event(event: object) -> None:
        told(event)
        if isinstance(event, RequestReleased) and len(told.of(RequestReleased)) == 1:
            streams[1].kill()

    async with Supervisor(
        engine="scripted",
        options={"slots": 2, "pace_s": 60},
        graces=QUICK_GRACES,
        on_event=on_event,
        on_crash="fail",
    ) as supervisor:
        streams += [supervisor.stream("one"), supervisor.stream("two")]
        async with streams[0], streams[1]:
            pid = supervisor.status().worker_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await told.wait_for(WorkerExited)
            reasons = [stream.end_reason for stream in streams]
            assert reasons == [EndReason.WORKER_CRASHED, EndReason.CANCELLED]
            assert all(stream.report.is_released for stream in streams)
        assert len(told.of(RequestReleased)) == 2
        assert told.of(WorkerExited)[0].cause is DeathCause.CRASHED
