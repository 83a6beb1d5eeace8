"""Ends that the host wants or suffers: stopping, leaving early, cancellation, Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal

import anyio
import pytest

from infervisor import (
    EndReason,
    RestartPolicy,
    ShuttingDown,
    StopGraces,
    Supervisor,
    UsageError,
)
from infervisor.protocol.machines.process import DeathCause
from infervisor.supervisor.events import LoadProgress, RestartScheduled, WorkerExited, WorkerSpawned
from tests.helpers.host_process import complaints, host
from tests.helpers.supervised import scripted
from tests.helpers.waiting import is_gone, only_worker

pytestmark = pytest.mark.anyio

ENDLESS = {"pace_s": 0.005}


# --- stopping ------------------------------------------------------------------------------------------


@pytest.mark.produces(
    "process: spawned × Connected → handshake",
    "process: handshake × HelloArrived → loading",
    "process: loading × ReadyArrived → ready",
    "process: ready × StopAsked → draining",
    "process: draining × Drained → terminating",
    "process: terminating × Exited → exited",
    "slot: running × SlotStopAsked → stopped",
    "slot: stopped × WorkerDied → stopped",
    "end: shutting_down",
)
async def test_stopping_ends_a_stream_that_is_being_read() -> None:
    async with scripted(ENDLESS) as (supervisor, told):
        async with supervisor.stream("hello") as stream:
            await anext(stream)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(supervisor.stop)
                with pytest.raises(ShuttingDown) as caught:
                    await stream.text()
            assert caught.value.report.end_reason is EndReason.SHUTTING_DOWN
            assert stream.report.is_released
        (exited,) = told.of(WorkerExited)
        assert (exited.cause, exited.status) == (DeathCause.STOPPED, "exit code 0")
        assert is_gone(exited.pid)


@pytest.mark.produces(
    "process: loading × StopAsked → terminating",
    "slot: starting × SlotStopAsked → stopped",
)
async def test_stopping_while_the_model_loads_ends_what_waits() -> None:
    async with scripted({"load_s": 60}, wait_until_ready=False) as (supervisor, told):
        async with supervisor.stream("hello") as stream:
            await told.wait_for(LoadProgress, lambda event: event.phase == "load")
            await supervisor.stop()
            with pytest.raises(ShuttingDown):
                await stream.text()
        (exited,) = told.of(WorkerExited)
        assert (exited.cause, exited.status) == (DeathCause.STOPPED, "SIGTERM(-15)")
        assert exited.seconds < 5


async def test_stopping_right_after_the_spawn() -> None:
    async with scripted(wait_until_ready=False) as (supervisor, told):
        await supervisor.stop()
        assert [event.cause for event in told.of(WorkerExited)] == [DeathCause.STOPPED]


async def test_stopping_twice_and_by_two_tasks_returns_when_the_worker_is_gone() -> None:
    async with scripted(ENDLESS) as (supervisor, told):
        pid = supervisor.status().worker_pid
        assert pid is not None
        gone: list[bool] = []

        async def stop() -> None:
            await supervisor.stop()
            gone.append(is_gone(pid))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop)
            tasks.start_soon(stop)
        await stop()
        assert gone == [True] * 3
        assert len(told.of(WorkerExited)) == 1
        assert supervisor.status().slot == "stopped"
        for use in (lambda: supervisor.stream("hello"), supervisor.restart_worker):
            with pytest.raises(ShuttingDown):
                use()
        with pytest.raises(ShuttingDown):
            await supervisor.generate("hello")
        with pytest.raises(ShuttingDown):
            await supervisor.wait_ready()
    with pytest.raises(UsageError, match="entered before"):
        await supervisor.__aenter__()


async def test_a_stream_that_was_made_before_and_entered_after_the_stop_is_refused() -> None:
    async with scripted() as (supervisor, _):
        stream = supervisor.stream("hello")
        await supervisor.stop()
        with pytest.raises(ShuttingDown):
            await anext(stream)


# --- leaving early -------------------------------------------------------------------------------------


async def test_an_exception_in_the_host_comes_out_as_it_is() -> None:
    async def guest() -> None:
        async with scripted(ENDLESS) as (supervisor, _), supervisor.stream("hello") as stream:
            await anext(stream)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await guest()


async def test_a_host_that_runs_out_of_time_leaves_nothing() -> None:
    pid = 0
    with anyio.move_on_after(5) as scope:
        async with scripted(ENDLESS) as (supervisor, _), supervisor.stream("hello") as stream:
            await anext(stream)
            pid = only_worker()
            scope.deadline = anyio.current_time()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert is_gone(pid)


def test_a_task_that_is_cancelled_natively_leaves_nothing() -> None:
    async def guest(entered: asyncio.Event) -> None:
        async with scripted(ENDLESS) as (supervisor, _), supervisor.stream("hello") as stream:
            async for _ in stream:
                entered.set()

    async def main() -> int:
        entered = asyncio.Event()
        task = asyncio.create_task(guest(entered))
        await asyncio.wait_for(entered.wait(), 20)
        pid = only_worker()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 20)
        return pid

    assert is_gone(asyncio.run(main()))


def test_a_second_native_cancel_during_the_stop_kills_at_once() -> None:
    stopping = asyncio.Event()
    options = {"faults": [{"at": "decode", "after": 2, "kind": "hang_gil"}]}

    async def guest() -> None:
        graces = StopGraces(drain_s=300, exit_s=300, terminate_s=300)
        async with Supervisor(engine="scripted", options=options, graces=graces) as supervisor:
            stream = supervisor.stream("hello")
            await anext(stream)
            # Only a worker that hangs already doesn't obey the stop's own cancel.
            worker = supervisor._dispatcher and supervisor._dispatcher.pool.first
            while worker is not None and "hang_gil at decode" not in worker.link.output.tail():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            stopping.set()
            await supervisor.stop()

    async def main() -> int:
        task = asyncio.create_task(guest())
        await asyncio.wait_for(stopping.wait(), 20)
        pid = only_worker()
        for _ in range(2):
            await asyncio.sleep(0.05)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 20)
        return pid

    assert is_gone(asyncio.run(main()))


KEYBOARD = """
import sys
import anyio
from infervisor import Supervisor

async def main():
    async with Supervisor(engine="scripted", options={"pace_s": 0.005}) as supervisor:
        async with supervisor.stream("hello") as stream:
            async for chunk in stream:
                if chunk.index == 3:
                    print(supervisor.status().worker_pid, flush=True)

try:
    anyio.run(main, backend=sys.argv[1])
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


async def test_ctrl_c_in_the_host_ends_the_worker(anyio_backend: str) -> None:
    with host(KEYBOARD, anyio_backend) as program:
        pid = int(program.line())
        program.signal(signal.SIGINT)
        code, said, errors = program.finish()
        assert (code, said, complaints(errors)) == (0, "interrupted\n", [])
        assert is_gone(pid)


async def test_what_had_arrived_is_still_read_after_the_supervisor_is_closed() -> None:
    async with scripted({"text": "a b c"}) as (supervisor, _):
        async with supervisor.stream("hello") as stream:
            first = (await anext(stream)).text
            with anyio.fail_after(20):
                while stream.end_reason is None:
                    await anyio.lowlevel.checkpoint()
            await supervisor.stop()
            assert first + await stream.text() == "a b c"
        assert stream.end_reason is EndReason.STOP


@pytest.mark.produces("slot: backoff × SlotStopAsked → stopped")
async def test_whoever_waits_for_a_worker_is_told_when_the_supervisor_is_closed() -> None:
    policy = RestartPolicy(backoff_initial_s=600, backoff_max_s=600)
    async with scripted(restart=policy) as (supervisor, told):
        os.kill(only_worker(), signal.SIGKILL)
        await told.wait_for(RestartScheduled)
        refused: list[Exception] = []

        async def wait() -> None:
            try:
                await supervisor.wait_ready()
            except ShuttingDown as error:
                refused.append(error)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                await supervisor.stop()
        assert len(refused) == 1


@pytest.mark.produces("process: exited × StopAsked → exited")
async def test_a_supervisor_whose_tasks_are_cut_kills_its_worker_and_starts_no_other() -> None:
    async with scripted(ENDLESS) as (supervisor, told):
        pid = only_worker()
        stream = supervisor.stream("hello")
        async with stream:
            await anext(stream)
            supervisor._scope.cancel()
            exited = await told.wait_for(WorkerExited)
            assert exited.cause is DeathCause.STOPPED
            with anyio.fail_after(20):
                assert (await stream.released()).is_released
    assert is_gone(pid)
    assert len(told.of(WorkerSpawned)) == 1
