"""A worker that SIGSTOP stopped: found out, named and replaced in time, or spared if it goes on before that."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from infervisor import (
    DeadlineExceeded,
    Deadlines,
    EndReason,
    Escalation,
    Liveness,
    Stage,
    WorkerDied,
    WorkerUnresponsive,
)
from infervisor.protocol.machines.process import DeathCause
from infervisor.supervisor.events import (
    CancelEscalated,
    LoadProgress,
    RequestReleased,
    WorkerBecameReady,
    WorkerExited,
    WorkerHung,
    WorkerSpawned,
)
from tests.helpers.inside import PATIENT, freeze, holds_nothing, request_of, until, words, worker_of
from tests.helpers.leaks import no_leftovers
from tests.helpers.supervised import Told, answers, scripted
from tests.helpers.waiting import is_gone

pytestmark = pytest.mark.anyio

SIGNAL_S, KILL_S = 0.1, 0.15
LADDER = Escalation(
    signal_after_s=SIGNAL_S, signal_step_factor=0, kill_after_s=KILL_S, kill_step_factor=0, alert_after_s=20
)
"""For cancels of a worker that stands still for good: nobody waits for what can't come."""
BOUND_S = 10.0
"""An order of magnitude above what is measured."""
WATCHFUL = Liveness(hang_after_s=0.8, step_factor=4, unmeasured_s=0.8, dump_s=0.2)
SLOW_PREFILL: dict[str, Any] = {"prefill_tokens_per_s": 20, "slice_s": 0.05}


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """Check children, descriptors and threads around each test."""
    with no_leftovers():
        yield


def released_once(told: Told, requests: int) -> bool:
    """Whether so many requests were told as released, each once."""
    ids = [event.report.request_id for event in told.of(RequestReleased)]
    return len(ids) == len(set(ids)) == requests


# --- a cancel, and it doesn't go on ------------------------------------------------------------------


@pytest.mark.parametrize("state", ["prefill", "decode", "paused"])
async def test_a_cancel_climbs_to_the_kill_and_everybody_is_told_what_became_of_him(state: str) -> None:
    options = {"slots": 2, "pace_s": 0.005, **(SLOW_PREFILL if state == "prefill" else {})}
    prompt = "word " * 2000 if state == "prefill" else "one"
    async with scripted(options, escalation=LADDER) as (supervisor, told):
        pid = worker_of(supervisor).pid
        async with (
            supervisor.stream("neighbour") as neighbour,
            supervisor.stream(prompt, window=2 if state == "paused" else 64) as stream,
            supervisor.stream("waits", max_tokens=4) as waits,
        ):
            assert (await anext(neighbour)).text == "w0 "
            if state == "prefill":
                await until(lambda: stream.report.timeline.started_ns is not None)
            else:
                await until(lambda: request_of(stream).window.received >= 2)
            await freeze(pid)
            stream.cancel()
            assert stream.end_reason is EndReason.CANCELLED, "the reader is told at once"
            report = await stream.released()
            assert report.stage is Stage.KILL
            assert report.timeline.release_s is not None
            assert SIGNAL_S + KILL_S <= report.timeline.release_s < BOUND_S
            assert report.timeline.cancel_noticed_ns is None, "it never ran again"
            with pytest.raises(WorkerDied, match="to release a cancelled request") as caught:
                await neighbour.text()
            assert caught.value.code == EndReason.WORKER_KILLED
            assert caught.value.report.is_released
            assert await waits.text() == words(4)
            assert waits.report.worker_pid != pid
        assert [(event.request_id, event.stage) for event in told.of(CancelEscalated)] == [
            (report.request_id, Stage.SIGNAL),
            (report.request_id, Stage.KILL),
        ]
        (exited,) = told.of(WorkerExited)
        assert (exited.pid, exited.cause, exited.status) == (pid, DeathCause.CANCEL_KILL, "SIGKILL(-9)")
        assert set(exited.requests) == {neighbour.report.request_id, report.request_id}
        assert is_gone(pid)
        assert await answers(supervisor) == waits.report.worker_pid
        assert supervisor.status().restarts == {"cancel_kill": 1}
        assert len(told.of(WorkerSpawned)) == 2
        assert released_once(told, 4)
        assert holds_nothing(supervisor)


async def test_a_cancel_of_what_a_stopped_idle_worker_never_read_climbs_to_the_kill() -> None:
    async with scripted(escalation=LADDER) as (supervisor, told):
        pid = await answers(supervisor)
        await freeze(pid)
        async with supervisor.stream("hello") as stream:
            stream.cancel()
            report = await stream.released()
        assert (report.end_reason, report.stage) == (EndReason.CANCELLED, Stage.KILL)
        assert report.timeline.started_ns is None
        (exited,) = told.of(WorkerExited)
        assert (exited.cause, exited.requests) == (DeathCause.CANCEL_KILL, (report.request_id,))
        assert await answers(supervisor) != pid
        assert released_once(told, 3)


# --- nobody cancels, and it doesn't go on --------------------------------------------------------------


@pytest.mark.parametrize("state", ["idle", "decode"])
async def test_whoever_is_in_it_is_told_that_it_stood_still_and_who_waits_is_served_by_the_next(
    state: str,
) -> None:
    options = {"pace_s": 0.005}
    async with scripted(options, liveness=WATCHFUL) as (supervisor, told):
        pid = await answers(supervisor)
        if state == "idle":
            await freeze(pid)
        async with supervisor.stream("hello") as stream:
            if state == "decode":
                await anext(stream)
                await freeze(pid)
            async with supervisor.stream("waits", max_tokens=4) as waits:
                with pytest.raises(WorkerUnresponsive, match="stood still while serving") as caught:
                    await stream.text()
                assert await waits.text() == words(4)
        report = caught.value.report
        assert report.end_reason is EndReason.WORKER_UNRESPONSIVE
        assert report.is_released
        assert (report.timeline.started_ns is None) == (state == "idle")
        (hung,) = told.of(WorkerHung)
        assert hung.pid == pid
        assert WATCHFUL.hang_after_s <= hung.stalled_s < BOUND_S
        (exited,) = told.of(WorkerExited)
        assert (exited.pid, exited.cause, exited.requests) == (
            pid,
            DeathCause.UNRESPONSIVE,
            (report.request_id,),
        )
        assert is_gone(pid)
        assert waits.report.worker_pid != pid
        assert await answers(supervisor) == waits.report.worker_pid
        assert supervisor.status().restarts == {"unresponsive": 1}
        assert released_once(told, 4)


async def test_one_that_idles_is_left_alone_for_as_long_as_nobody_wants_anything_of_it() -> None:
    async with scripted(liveness=WATCHFUL) as (supervisor, told):
        pid = await answers(supervisor)
        await freeze(pid)
        # Longer than the watchdog would give it, if it owed anything.
        with anyio.move_on_after(WATCHFUL.hang_after_s + WATCHFUL.dump_s + 0.3):
            await told.wait_for(WorkerHung)
        assert told.of(WorkerHung) == []
        os.kill(pid, signal.SIGCONT)
        assert await answers(supervisor) == pid
        assert told.of(WorkerExited) == []


async def test_one_that_was_loading_is_ended_by_the_startup_deadline_and_patient_requests_wait_for_the_next() -> (
    None
):
    startup_s = 0.6
    async with scripted(
        {"load_s": 0.4, "load_steps": 10}, deadlines=Deadlines(startup_s=startup_s), wait_until_ready=False
    ) as (supervisor, told):
        patient = Deadlines(startup_s=None)
        async with (
            supervisor.stream("patient", max_tokens=4, deadlines=patient) as waits,
            supervisor.stream("hasty", max_tokens=4, deadlines=Deadlines(startup_s=0.3)) as hasty,
        ):
            progress = await told.wait_for(LoadProgress, where=lambda event: event.phase == "load")
            await freeze(progress.pid)
            with pytest.raises(DeadlineExceeded) as caught:
                await hasty.text()
            assert caught.value.code == EndReason.STARTUP_TIMEOUT
            assert told.of(WorkerExited) == [], "one request's deadline is not the worker's"
            exited = await told.wait_for(WorkerExited)
            assert (exited.pid, exited.cause) == (progress.pid, DeathCause.STARTUP_TIMEOUT)
            assert exited.requests == ()
            assert f"made no progress for {startup_s:g} s while loading the model" in exited.message
            assert await waits.text() == words(4)
        (ready,) = told.of(WorkerBecameReady)
        assert ready.pid == waits.report.worker_pid != progress.pid
        assert is_gone(progress.pid)
        assert await answers(supervisor) == ready.pid
        assert supervisor.status().restarts == {"startup_timeout": 1}


# --- it goes on in time --------------------------------------------------------------------------------


async def test_one_that_goes_on_before_the_watchdog_looks_has_lost_nothing() -> None:
    async with scripted({"pace_s": 0.002, "slots": 2}) as (supervisor, told):
        async with (
            supervisor.stream("one", max_tokens=100) as one,
            supervisor.stream("two", max_tokens=100, window=2) as two,
        ):
            texts = {(await anext(one)).text, (await anext(two)).text}
            assert texts == {"w0 "}
            pid = worker_of(supervisor).pid
            for _ in range(3):
                await freeze(pid)
                os.kill(pid, signal.SIGCONT)
                texts = {(await anext(one)).text, (await anext(two)).text}
                assert len(texts) == 1
            assert await one.text() == await two.text() == words(96, start=4)
        assert told.of(WorkerExited) == []
        assert told.of(WorkerHung) == []


async def test_one_that_goes_on_while_its_stacks_are_asked_for_is_spared() -> None:
    liveness = Liveness(hang_after_s=0.3, step_factor=4, unmeasured_s=0.3, dump_s=1)
    async with scripted({"pace_s": 0.005}, liveness=liveness) as (supervisor, told):
        async with supervisor.stream("hello", max_tokens=250) as stream:
            assert (await anext(stream)).text == "w0 "
            pid = worker_of(supervisor).pid
            await freeze(pid)
            await told.wait_for(WorkerHung)
            os.kill(pid, signal.SIGCONT)
            # It is still at it when the kill would come.
            assert await stream.text() == words(249, start=1)
        assert len(told.of(WorkerHung)) == 1
        assert await answers(supervisor) == pid
        assert told.of(WorkerExited) == []


async def test_one_that_was_loading_and_goes_on_becomes_ready() -> None:
    async with scripted(
        {"load_s": 0.3, "load_steps": 10}, deadlines=Deadlines(startup_s=30), wait_until_ready=False
    ) as (supervisor, told):
        async with supervisor.stream("hello", max_tokens=4) as stream:
            progress = await told.wait_for(LoadProgress, where=lambda event: event.phase == "load")
            await freeze(progress.pid)
            os.kill(progress.pid, signal.SIGCONT)
            assert await stream.text() == words(4)
            assert stream.report.worker_pid == progress.pid
        assert told.of(WorkerExited) == []


async def test_a_cancel_that_it_notices_when_it_goes_on_before_the_signal_is_in_band_and_costs_nobody_a_token() -> (
    None
):
    options = {"slots": 2, "pace_s": 0.005, **SLOW_PREFILL}
    async with scripted(options, escalation=PATIENT) as (supervisor, told):
        pid = worker_of(supervisor).pid
        async with supervisor.stream("neighbour", max_tokens=60) as neighbour:
            for state in ("prefill", "decode", "paused"):
                prompt = "word " * 2000 if state == "prefill" else "one"
                async with supervisor.stream(prompt, window=2 if state == "paused" else 64) as stream:
                    if state == "prefill":
                        await until(lambda stream=stream: stream.report.timeline.started_ns is not None)  # type: ignore[misc]
                    else:
                        await until(lambda stream=stream: request_of(stream).window.received >= 2)  # type: ignore[misc]
                    await freeze(pid)
                    stream.cancel()
                    with anyio.move_on_after(0.1):
                        await request_of(stream).released.wait()
                    assert not stream.report.is_released, "nobody has released it"
                    os.kill(pid, signal.SIGCONT)
                    report = await stream.released()
                assert (report.end_reason, report.stage) == (EndReason.CANCELLED, Stage.IN_BAND)
                assert report.timeline.release_s is not None
                assert 0.1 <= report.timeline.release_s < BOUND_S
            assert await neighbour.text() == words(60)
        assert await answers(supervisor) == pid
        assert told.of(CancelEscalated) == []
        assert told.of(WorkerExited) == []
        assert released_once(told, 5)


async def test_one_that_goes_on_between_the_signal_and_the_kill_is_not_killed_and_its_neighbour_is_exact() -> (
    None
):
    ladder = Escalation(signal_after_s=0.1, signal_step_factor=0, kill_after_s=20, kill_step_factor=0)
    async with scripted({"slots": 2, "pace_s": 0.005}, escalation=ladder) as (supervisor, told):
        pid = worker_of(supervisor).pid
        async with (
            supervisor.stream("neighbour", max_tokens=40) as neighbour,
            supervisor.stream("one") as stream,
        ):
            await anext(stream)
            await freeze(pid)
            stream.cancel()
            await told.wait_for(CancelEscalated)
            os.kill(pid, signal.SIGCONT)
            report = await stream.released()
            assert (report.end_reason, report.stage) == (EndReason.CANCELLED, Stage.SIGNAL)
            assert await neighbour.text() == words(40)
        assert await answers(supervisor) == pid, "it reads its control pipe: it only couldn't for a while"
        assert [event.stage for event in told.of(CancelEscalated)] == [Stage.SIGNAL]
        assert told.of(WorkerExited) == []
        assert released_once(told, 3)
