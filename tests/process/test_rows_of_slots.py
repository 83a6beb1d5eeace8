"""Rows of the slot table that no ordinary course takes: asked at odd moments, and alarms that come too late."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from infervisor import EndReason, RestartPolicy, ShuttingDown, Stream, Supervisor
from infervisor.protocol.machines.process import DeathCause
from infervisor.supervisor.events import (
    BreakerOpened,
    ModelFileChanged,
    RestartScheduled,
    WorkerBecameReady,
    WorkerExited,
    WorkerSpawned,
)
from tests.helpers.inside import dispatcher_of, until, words, worker_of
from tests.helpers.odd_worker import as_interpreter
from tests.helpers.supervised import QUICK_GRACES, Told, answers, scripted

pytestmark = pytest.mark.anyio


def kill_worker(supervisor: Supervisor) -> None:
    """Let the worker die of a crash."""
    os.kill(worker_of(supervisor).pid, signal.SIGSEGV)


def constant_delay(seconds: float, cooldown_s: float = 600) -> RestartPolicy:
    """Return a policy whose restarts come after this delay exactly."""
    return RestartPolicy(
        backoff_initial_s=seconds, backoff_max_s=seconds, jitter=0, max_failed_starts=0, cooldown_s=cooldown_s
    )


async def until_rung(supervisor: Supervisor) -> None:
    """Wait until the alarm of the delay has rung, and so has been answered."""
    alarm = dispatcher_of(supervisor).pool.slots[0]._backoff_alarm
    await until(lambda: alarm.due_ns is None)


# --- a restart by hand, and a delay that ends after it -------------------------------------------------


@pytest.mark.produces("slot: backoff × WorkerWanted → backoff", "slot: backoff × ResetAsked → starting")
async def test_a_request_that_waits_through_a_long_delay_is_served_after_a_restart_by_hand() -> None:
    async with scripted(restart=constant_delay(600)) as (supervisor, told):
        kill_worker(supervisor)
        await told.wait_for(RestartScheduled)
        async with supervisor.stream("hello", max_tokens=3) as stream:
            assert supervisor.status().slot == "backoff"
            supervisor.restart_worker()
            assert await stream.text() == words(3)
        assert len(told.of(WorkerSpawned)) == 2


@pytest.mark.produces("slot: starting × BackoffOver → starting")
async def test_a_delay_that_ends_while_the_worker_started_by_hand_loads() -> None:
    told = Told()

    def on_event(event: object) -> None:
        told(event)
        if isinstance(event, RestartScheduled):
            supervisor.restart_worker()

    supervisor = Supervisor(
        engine="scripted", options={"load_s": 0.5}, restart=constant_delay(0.02), on_event=on_event
    )
    async with supervisor:
        kill_worker(supervisor)
        await told.wait_for(RestartScheduled)
        await until_rung(supervisor)
        assert supervisor.status().slot == "starting"
        await answers(supervisor)
        assert len(told.of(WorkerSpawned)) == 2


@pytest.mark.produces("slot: running × BackoffOver → running")
async def test_a_delay_that_ends_when_the_worker_started_by_hand_is_ready() -> None:
    for delay_s in (1, 4, 16):  # the later ones are for a machine on which a start takes longer than that
        async with scripted(restart=constant_delay(delay_s)) as (supervisor, told):
            kill_worker(supervisor)
            await told.wait_for(RestartScheduled)
            supervisor.restart_worker()
            await told.wait_for(WorkerBecameReady, count=2)
            if dispatcher_of(supervisor).pool.slots[0]._backoff_alarm.due_ns is None:
                continue
            await until_rung(supervisor)
            assert supervisor.status().slot == "running"
            await answers(supervisor)
            assert len(told.of(WorkerSpawned)) == 2
            return
    pytest.fail("no start was faster than its delay")


@pytest.mark.parametrize(
    "slot",
    [
        pytest.param("open", marks=pytest.mark.produces("slot: open × BackoffOver → open")),
        pytest.param("half_open", marks=pytest.mark.produces("slot: half_open × BackoffOver → half_open")),
    ],
)
async def test_a_delay_that_ends_when_the_breaker_is_open_again(slot: str, tmp_path: Path) -> None:
    told = Told()
    python = as_interpreter(tmp_path, 'exec "$PYTHON" "$@"')
    streams: list[Stream] = []

    def on_event(event: object) -> None:
        told(event)
        if isinstance(event, RestartScheduled):
            # The restart by hand fails at once, since the interpreter is being written: that opens the breaker.
            with python.open("a"):
                supervisor.restart_worker()
            if slot == "half_open":
                as_interpreter(tmp_path, "exec sleep 600")
                streams.append(supervisor.stream("hello"))
                with pytest.raises(StopIteration):
                    streams[0].__aenter__().send(None)  # entering awaits nothing

    supervisor = Supervisor(
        engine="scripted", python=python, graces=QUICK_GRACES, on_event=on_event,
        restart=constant_delay(0.05, cooldown_s=0),
    )  # fmt: skip
    async with supervisor:
        kill_worker(supervisor)
        await told.wait_for(BreakerOpened)
        assert supervisor.status().slot == slot
        await until_rung(supervisor)
        assert supervisor.status().slot == slot
        assert len(told.of(WorkerSpawned)) == (2 if slot == "half_open" else 1)


# --- a host that restarts at each change of the model file ---------------------------------------------


def restarting_host(
    model: Path, on_exit: Callable[[], object] = lambda: None, **settings: Any
) -> tuple[Supervisor, Told]:
    """Return a supervisor whose host asks for a restart when it is told that the file has changed."""
    told = Told()

    def on_event(event: object) -> None:
        told(event)
        if isinstance(event, ModelFileChanged):
            supervisor.restart_worker()
        elif isinstance(event, WorkerExited) and len(told.of(WorkerExited)) == 1:
            on_exit()

    supervisor = Supervisor(model, engine="scripted", on_event=on_event, **settings)
    return supervisor, told


@pytest.mark.produces("slot: starting × ResetAsked → starting", "slot: running × WorkerDied → starting")
async def test_a_change_that_is_told_while_a_worker_is_being_started_starts_no_second_one(
    tmp_path: Path,
) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"weights")
    # Written between the exit and the look at the file that precedes each start.
    supervisor, told = restarting_host(model, on_exit=lambda: model.write_bytes(b"other weights"))
    async with supervisor:
        supervisor.restart_worker()
        await told.wait_for(WorkerBecameReady, count=2)
        assert len(told.of(ModelFileChanged)) == 1
        await answers(supervisor)
        assert len(told.of(WorkerSpawned)) == 2


@pytest.mark.produces(
    "slot: half_open × ResetAsked → half_open",
    "slot: half_open × WorkerReady → running",
    "slot: open × WorkerWanted → half_open",
)
async def test_a_change_that_is_told_while_the_breaker_is_tried_starts_no_second_worker(
    tmp_path: Path,
) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"weights")
    once = str(tmp_path / "once")
    faults = [{"at": "load", "kind": "load_refused", "permanent": False, "once_file": once}]
    restart = RestartPolicy(max_failed_starts=0, cooldown_s=0)
    supervisor, told = restarting_host(
        model, options={"faults": faults}, restart=restart, wait_until_ready=False
    )
    async with supervisor:
        await told.wait_for(BreakerOpened)
        stream = supervisor.stream("hello", max_tokens=3)
        model.write_bytes(b"other weights")
        async with stream:
            assert supervisor.status().slot == "half_open"
            assert await stream.text() == words(3)
        assert len(told.of(ModelFileChanged)) == 1
        assert len(told.of(WorkerSpawned)) == 2


# --- the one try after a cool-down ---------------------------------------------------------------------


@pytest.mark.produces(
    "slot: half_open × WorkerWanted → half_open",
    "slot: half_open × WorkerDied → half_open",
    "slot: half_open × SlotStopAsked → stopped",
    "process: loading × StopAsked → terminating",
    "end: shutting_down",
)
async def test_a_try_may_be_wanted_twice_replaced_and_given_up(tmp_path: Path) -> None:
    faults = [
        {"at": "import", "kind": "load_refused", "permanent": False, "once_file": str(tmp_path / "once")},
        {"at": "import", "kind": "hang"},
    ]
    restart = RestartPolicy(max_failed_starts=0, cooldown_s=0)
    async with scripted({"faults": faults}, restart=restart, wait_until_ready=False) as (supervisor, told):
        await told.wait_for(BreakerOpened)
        async with supervisor.stream("one") as one, supervisor.stream("two") as two:
            assert len(told.of(WorkerSpawned)) == 2, "both wait for the same try"
            await until(lambda: supervisor.status().worker == "loading")
            supervisor.restart_worker()
            await told.wait_for(WorkerSpawned, count=3)
            assert supervisor.status().slot == "half_open", "our own replacement decides nothing"
            await supervisor.stop()
            assert [one.end_reason, two.end_reason] == [EndReason.SHUTTING_DOWN] * 2
        assert [event.cause for event in told.of(WorkerExited)[1:]] == [DeathCause.STOPPED] * 2


# --- when it is stopped --------------------------------------------------------------------------------


@pytest.mark.produces(
    "slot: stopped × ResetAsked → stopped",
    "process: exited × StopAsked → exited",
    "end: shutting_down",
)
async def test_what_waits_in_a_supervisor_whose_tasks_are_cut_is_ended_and_what_comes_is_refused() -> None:
    async with scripted({"pace_s": 60}) as (supervisor, told):
        async with supervisor.stream("runs"), supervisor.stream("waits") as waits:
            supervisor._scope.cancel()
            with anyio.fail_after(20), pytest.raises(ShuttingDown):
                await waits.text()
            assert waits.report.is_released
            with pytest.raises(ShuttingDown):
                await supervisor.generate("comes")
            supervisor.restart_worker()
            assert supervisor.status().slot == "stopped"
        assert len(told.of(WorkerSpawned)) == 1
