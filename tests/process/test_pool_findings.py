"""What attacks on resuming and on the pool have found: each a kind of fault that must not come back."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from infervisor import (
    EndReason,
    InfervisorError,
    Poisoned,
    RestartPolicy,
    Supervisor,
    WorkerDied,
    WorkerSpawnError,
)
from infervisor.supervisor import dispatcher
from infervisor.supervisor.events import (
    BreakerOpened,
    RequestInterrupted,
    RequestReleased,
    RestartScheduled,
    WorkerBecameReady,
)
from tests.helpers.inside import dispatcher_of
from tests.helpers.supervised import QUICK_GRACES, Told, scripted
from tests.helpers.waiting import until

pytestmark = pytest.mark.anyio

NO_RESTART = RestartPolicy(backoff_initial_s=600, backoff_max_s=600, period_s=3600)


def words(count: int) -> str:
    """Return what the scripted engine says."""
    return "".join(f"w{number} " for number in range(count))


def kill(supervisor: Supervisor, number: int = signal.SIGKILL) -> None:
    """Send a signal to the worker that serves."""
    os.kill(supervisor.status().worker_pid or 0, number)


def runs_python(interpreter: Path, *, runs: bool) -> None:
    """Make it an interpreter, or a file that can't be run."""
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    interpreter.chmod(0o700 if runs else 0o600)


async def test_a_changed_model_file_is_tried_once_in_each_place_that_gave_up(tmp_path: Path) -> None:
    model, interpreter = tmp_path / "model", tmp_path / "python"
    model.write_text("one")
    runs_python(interpreter, runs=False)
    told = Told()
    async with Supervisor(
        model, engine="scripted", python=interpreter, workers=3, on_event=told, wait_until_ready=False
    ) as supervisor:
        pool = dispatcher_of(supervisor).pool
        await told.wait_for(BreakerOpened)
        for slot in pool.slots[1:]:
            slot.start()
        assert len(told.of(BreakerOpened)) == 3
        model.write_text("two, which is longer")
        for _ in range(3):
            with pytest.raises(InfervisorError):
                await supervisor.generate("hello")
        assert len(told.of(BreakerOpened)) == 6


async def test_a_suspect_whose_reader_stands_still_keeps_nobody_waiting(tmp_path: Path) -> None:
    once = {"at": "decode", "kind": "segfault", "after": 4, "once_file": str(tmp_path / "once")}
    async with scripted({"slots": 4, "faults": [once]}, on_crash="resume") as (supervisor, told):
        async with (
            supervisor.stream("slow", max_tokens=60, window=4) as slow,
            supervisor.stream("quick", max_tokens=60, window=4) as quick,
        ):
            await until(lambda: slow._request.window.received == 4)
            assert await quick.text() == words(60)
            assert (await supervisor.generate("new", max_tokens=5)).text == words(5)
            assert await slow.text() == words(60)
        assert told.of(RequestInterrupted) != []


async def test_an_answer_too_long_to_be_sent_again_ends_with_the_reason_of_the_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "MOST_DELIVERED", 10)
    async with scripted({"pace_s": 0.002}, on_crash="resume") as (supervisor, _):
        async with supervisor.stream("hello", max_tokens=100, window=4) as stream:
            text = "".join([(await anext(stream)).text for _ in range(12)])
            kill(supervisor)
            with pytest.raises(WorkerDied, match="more than 10 tokens can't go on"):  # noqa: PT012 - it is read to there
                async for chunk in stream:
                    text += chunk.text
        assert words(100).startswith(text)
        assert stream.end_reason is EndReason.WORKER_CRASHED


async def test_recycling_ends_when_the_place_that_it_waits_for_gives_up(tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    runs_python(interpreter, runs=True)
    restart = RestartPolicy(backoff_initial_s=0.3, backoff_max_s=0.3, jitter=0, cooldown_s=600)
    async with scripted(python=interpreter, standby=1, restart=restart) as (supervisor, told):
        await told.wait_for(WorkerBecameReady, count=2)
        (spare,) = [worker.pid for worker in supervisor.status().workers if worker.role == "standby"]
        os.kill(spare, signal.SIGKILL)
        await told.wait_for(RestartScheduled)
        runs_python(interpreter, runs=False)
        with anyio.fail_after(20), pytest.raises(WorkerSpawnError):
            await supervisor.recycle()
        assert (await supervisor.generate("hello", max_tokens=3)).text == words(3)


async def test_who_asks_for_less_time_to_recycle_gets_it() -> None:
    async with scripted({"pace_s": 0.005}, on_crash="resume") as (supervisor, _):
        async with (
            supervisor.stream("hello", max_tokens=300, window=4) as stream,
            anyio.create_task_group() as tasks,
        ):

            async def read() -> None:
                assert await stream.text() == words(300)

            tasks.start_soon(supervisor.recycle)
            tasks.start_soon(read)
            await until(lambda: supervisor.status().workers[0].role == "retiring")
            with anyio.fail_after(20):
                await supervisor.recycle(grace_s=0.05)
        assert stream.report.resumes


async def test_a_cancel_from_within_the_telling_of_its_loss_releases_a_request_once() -> None:
    told = Told()
    streams: list[Any] = []

    def on_event(event: object) -> None:
        told(event)
        if isinstance(event, RequestInterrupted):
            streams[0].cancel()

    async with Supervisor(
        engine="scripted",
        options={"pace_s": 0.005},
        graces=QUICK_GRACES,
        restart=NO_RESTART,
        on_event=on_event,
    ) as supervisor:
        async with supervisor.stream("hello", window=4) as stream:
            streams.append(stream)
            await anext(stream)
            kill(supervisor)
            await told.wait_for(RequestReleased)
        assert len(told.of(RequestReleased)) == 1
        assert stream.end_reason is EndReason.CANCELLED


async def test_no_request_goes_on_from_what_another_one_left() -> None:
    fault = {"at": "decode", "kind": "segfault", "after": 8}
    options = {"pace_s": 0.002, "prefill_s": 0.05, "slice_s": 0.01, "faults": [fault]}
    prompt = "a b c d e f g h i j k l m n o p"
    async with scripted(options, on_crash="resume") as (supervisor, _):
        for _ in range(2):
            with pytest.raises(Poisoned) as caught:
                await supervisor.generate(prompt)
            assert caught.value.report.usage.cached_tokens == 0
            assert caught.value.report.resumes[0].restored_tokens > 0, "but its own are used"


async def test_a_failed_successor_is_not_tried_again_with_every_request(tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    runs_python(interpreter, runs=True)
    restart = RestartPolicy(cooldown_s=600)
    async with scripted(python=interpreter, max_requests=1, restart=restart) as (supervisor, told):
        runs_python(interpreter, runs=False)
        for _ in range(6):
            assert (await supervisor.generate("hello", max_tokens=2)).text == words(2)
        assert len(told.of(BreakerOpened)) == 1
