"""Starts that fail, hang or take long: told once, by name, and never a loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from infervisor import (
    Deadlines,
    EndReason,
    ModelLoadError,
    RestartPolicy,
    Supervisor,
    Unavailable,
    WorkerDied,
    WorkerSpawnError,
    WorkerUnresponsive,
)
from infervisor.protocol.machines.process import DeathCause
from infervisor.supervisor.events import (
    BreakerOpened,
    WorkerBecameReady,
    WorkerExited,
    WorkerSpawned,
)
from tests.helpers.supervised import Told, answers, scripted

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("phase", ["import", "load", "warm_up"])
@pytest.mark.produces(
    "process: loading × Exited → exited",
    "slot: starting × WorkerDied → backoff",
    "slot: starting × WorkerDied → open",
)
async def test_a_worker_that_crashes_at_every_start_opens_the_breaker(phase: str) -> None:
    told = Told()
    options = {"faults": [{"at": phase, "kind": "segfault"}]}
    restart = RestartPolicy(max_failed_starts=2, backoff_initial_s=0.01, cooldown_s=60)
    with pytest.raises(WorkerDied, match=r"while loading the model: SIGSEGV\(-11\)") as caught:
        async with Supervisor(engine="scripted", options=options, on_event=told, restart=restart):
            pytest.fail("it became ready")
    assert "Fatal Python error: Segmentation fault" in caught.value.output_tail
    assert len(told.of(WorkerSpawned)) == len(told.of(WorkerExited)) == 3
    opened = told.of(BreakerOpened)
    assert [event.cooldown_s for event in opened] == [60]
    assert "SIGSEGV" in opened[0].reason


@pytest.mark.produces(
    "process: loading × FailedArrived → terminating",
    "slot: starting × WorkerDied → open",
    "slot: open × SlotStopAsked → stopped",
)
async def test_a_permanent_refusal_opens_the_breaker_at_once() -> None:
    told = Told()
    fault = {"at": "load", "kind": "load_refused", "code": "odd_model", "message": "no\x1b[2J good"}
    with pytest.raises(ModelLoadError) as caught:
        async with Supervisor(engine="scripted", options={"faults": [fault]}, on_event=told):
            pytest.fail("it became ready")
    assert (caught.value.code, str(caught.value)) == ("odd_model", r"no\x1b[2J good")
    assert "\x1b" not in caught.value.detail
    assert len(told.of(WorkerSpawned)) == 1
    assert told.of(WorkerExited)[0].cause is DeathCause.LOAD_FAILED


async def test_an_unknown_engine_is_refused_by_name() -> None:
    with pytest.raises(ModelLoadError, match="no engine 'nonesuch'") as caught:
        async with Supervisor(engine="nonesuch"):
            pytest.fail("it became ready")
    assert caught.value.code == "unknown_engine"


@pytest.mark.parametrize(
    "healed",
    [
        pytest.param(True, marks=pytest.mark.produces("slot: half_open × WorkerReady → running")),
        pytest.param(False, marks=pytest.mark.produces("slot: half_open × WorkerDied → open")),
    ],
)
@pytest.mark.produces(
    "slot: open × WorkerWanted → open",
    "slot: open × WorkerWanted → half_open",
    "end: unavailable",
)
async def test_after_the_cool_down_a_request_tries_one_start(healed: bool, tmp_path: Path) -> None:
    once = str(tmp_path / "once")
    fault: dict[str, Any] = {
        "at": "load", "kind": "load_refused", "message": "not today", "permanent": False,
    }  # fmt: skip
    if healed:
        fault["once_file"] = once
    restart = RestartPolicy(max_failed_starts=0, cooldown_s=0.5)
    async with scripted({"faults": [fault]}, restart=restart, wait_until_ready=False) as (supervisor, told):
        opened = await told.wait_for(BreakerOpened)
        with pytest.raises(Unavailable, match="not today"):
            await supervisor.generate("hello")
        with pytest.raises(ModelLoadError):
            await supervisor.wait_ready()
        assert len(told.of(WorkerSpawned)) == 1
        assert opened.cooldown_s is not None
        await anyio.sleep(opened.cooldown_s)
        if healed:
            await answers(supervisor)
            assert supervisor.status().slot == "running"
        else:
            with pytest.raises(Unavailable, match="not today") as caught:
                await supervisor.generate("hello")
            assert caught.value.report.end_reason is EndReason.UNAVAILABLE
            assert len(told.of(BreakerOpened)) == 2
        assert len(told.of(WorkerSpawned)) == 2
        assert supervisor.status().restarts == {}


@pytest.mark.produces("slot: open × ResetAsked → starting")
async def test_a_breaker_that_is_open_is_closed_by_hand(tmp_path: Path) -> None:
    fault = {"at": "load", "kind": "load_refused", "once_file": str(tmp_path / "once")}
    restart = RestartPolicy(cooldown_s=600)
    async with scripted({"faults": [fault]}, wait_until_ready=False, restart=restart) as (supervisor, told):
        await told.wait_for(BreakerOpened)
        supervisor.restart_worker()
        await supervisor.wait_ready()
        await answers(supervisor)


@pytest.mark.produces("process: loading × KillAsked → killing")
async def test_a_load_that_hangs_is_ended_by_its_deadline() -> None:
    told = Told()
    options = {"faults": [{"at": "load", "kind": "hang"}]}
    with pytest.raises(WorkerUnresponsive, match=r"made no progress for 2 s while loading the model"):
        async with Supervisor(
            engine="scripted", options=options, on_event=told, deadlines=Deadlines(startup_s=2),
            restart=RestartPolicy(max_failed_starts=0),
        ):  # fmt: skip
            pytest.fail("it became ready")
    assert [event.cause for event in told.of(WorkerExited)] == [DeathCause.STARTUP_TIMEOUT]


async def test_a_load_may_take_longer_than_its_deadline_while_it_progresses() -> None:
    options = {"load_s": 4.0, "load_steps": 40}
    async with scripted(options, deadlines=Deadlines(startup_s=2.0)) as (supervisor, told):
        assert told.of(WorkerBecameReady)[0].startup_s > 3.9
        assert told.of(WorkerExited) == []
        await answers(supervisor)


async def test_a_worker_that_cannot_be_started_is_no_loop() -> None:
    told = Told()
    with pytest.raises(WorkerSpawnError, match=r"'/nonexistent/python'.*python="):
        async with Supervisor(engine="scripted", python="/nonexistent/python", on_event=told):
            pytest.fail("it became ready")
    assert told.of(WorkerSpawned) == []
    assert len(told.of(BreakerOpened)) == 1
