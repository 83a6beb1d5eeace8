"""The second and third rung: what happens when the worker doesn't hear, doesn't obey, or doesn't run."""

from __future__ import annotations

import os
import signal
from typing import Any

import anyio
import psutil
import pytest

from infervisor import EndReason, Escalation, Report, Stage, WorkerDied
from infervisor.supervisor.events import CancelEscalated, ReleaseLate, RequestReleased, WorkerExited
from tests.helpers.inside import PATIENT, freeze, holds_nothing, request_of, until, words, worker_of
from tests.helpers.supervised import scripted

pytestmark = pytest.mark.anyio

SIGNAL_S, KILL_S = 0.2, 0.4
"""Graces of `QUICK_ESCALATION`: from the cancel to the signal, and from there to the kill."""
BOUND_S = 10.0


def check_latencies(report: Report, least_s: float) -> None:
    """The release took at least the graces before the rung that did it, and is bounded."""
    assert report.timeline.release_s is not None
    assert least_s <= report.timeline.release_s < BOUND_S


@pytest.mark.produces("attempt: paused × ProcessGone → released", "end: worker_killed")
async def test_an_engine_that_ignores_the_cancel_is_killed_and_its_neighbour_is_told_why() -> None:
    options: dict[str, Any] = {
        "slots": 2,
        "faults": [{"at": "decode", "after": 3, "kind": "ignore_cancel", "prompt_contains": "deaf"}],
    }
    async with scripted(options) as (supervisor, told):
        pid = worker_of(supervisor).pid
        async with supervisor.stream("neighbour", window=2) as neighbour, supervisor.stream("deaf") as deaf:
            await until(lambda: request_of(deaf).window.received == 3)
            async with supervisor.stream("waits", max_tokens=4) as waiting:
                deaf.cancel()
                report = await deaf.released()
                assert report.stage is Stage.KILL
                assert report.end_reason is EndReason.CANCELLED
                check_latencies(report, SIGNAL_S + KILL_S)
                assert neighbour.end_reason is EndReason.WORKER_KILLED
                with pytest.raises(WorkerDied, match="to release a cancelled request") as caught:
                    await neighbour.text()
                assert caught.value.code == "worker_killed"
                assert caught.value.signal_name == "SIGKILL"
                assert neighbour.report.is_released
                assert await waiting.text() == words(4), "what waits goes on waiting for the next worker"
        assert [event.stage for event in told.of(CancelEscalated)] == [Stage.SIGNAL, Stage.KILL]
        (exited,) = told.of(WorkerExited)
        assert exited.pid == pid
        assert set(exited.requests) == {neighbour.report.request_id, deaf.report.request_id}
        assert not psutil.pid_exists(pid)
        assert supervisor.status().restarts == {"cancel_kill": 1}


async def test_a_stopped_process_is_killed_and_a_late_release_is_told_while_it_is_late() -> None:
    slow = Escalation(
        signal_after_s=0.3, signal_step_factor=0, kill_after_s=1.0, kill_step_factor=0, alert_after_s=0.2
    )
    async with scripted({"pace_s": 0.01}, escalation=slow) as (supervisor, told):
        pid = worker_of(supervisor).pid
        async with supervisor.stream("count") as stream:
            await stream.__anext__()
            await freeze(pid)
            stream.cancel()
            late = await told.wait_for(ReleaseLate)
            assert not stream.report.is_released, "the alert comes while the release is late, not afterwards"
            assert late.request_id == stream.report.request_id
            assert late.stage is Stage.IN_BAND
            assert 0.2 <= late.waited_s < 1.3
            await told.wait_for(ReleaseLate, where=lambda event: event.stage is Stage.SIGNAL)
            report = await stream.released()
        assert report.stage is Stage.KILL
        check_latencies(report, 1.3)
        alerts = len(told.of(ReleaseLate))
        assert (await supervisor.generate("next", max_tokens=3)).text == words(3)
        assert len(told.of(ReleaseLate)) == alerts, "no alert after the release"
        waited = [event.waited_s for event in told.of(ReleaseLate)]
        assert waited == sorted(waited)


@pytest.mark.produces("attempt: submitted × ProcessGone → released")
async def test_a_submit_that_hasnt_left_is_taken_back_at_once() -> None:
    async with scripted({"slots": 2, "mode": "echo"}, escalation=PATIENT) as (supervisor, _):
        pid = worker_of(supervisor).pid
        await freeze(pid)
        first = supervisor.stream("x" * 200_000)
        async with first, supervisor.stream("y" * 1000) as second:
            second.cancel()
            report = second.report
            assert report.is_released, "not a byte of it was written"
            assert report.timeline.started_ns is None
            assert report.timeline.ended_ns is not None
            os.kill(pid, signal.SIGCONT)
            assert await first.text() == "x" * 200_000
        assert worker_of(supervisor).pid == pid


async def test_killing_at_once_skips_the_graces() -> None:
    patient = Escalation(signal_after_s=100, kill_after_s=100)
    async with scripted({"pace_s": 60}, escalation=patient) as (supervisor, told):
        async with supervisor.stream("count") as stream:
            await until(lambda: stream.report.timeline.started_ns is not None)
            await freeze(worker_of(supervisor).pid)
            stream.cancel()
            assert stream.report.stage is Stage.IN_BAND
            stream.kill()
            with anyio.fail_after(BOUND_S):
                report = await stream.released()
        assert report.stage is Stage.KILL
        assert [event.stage for event in told.of(CancelEscalated)] == [Stage.KILL]
        await supervisor.wait_ready()
        assert holds_nothing(supervisor)


@pytest.mark.produces("attempt: ending × ProcessGone → released", "request: ended × Abandoned → ended")
async def test_a_release_that_hangs_after_a_natural_end_is_told_and_ended_by_the_caller() -> None:
    options: dict[str, Any] = {"faults": [{"at": "release", "kind": "hang", "prompt_contains": "stuck"}]}
    async with scripted(options) as (supervisor, told):
        async with supervisor.stream("stuck", max_tokens=3) as stream:
            assert await stream.text() == words(3)
            late = await told.wait_for(ReleaseLate)
            assert late.stage is None
            stream.kill()
            report = await stream.released()
        assert report.end_reason is EndReason.LENGTH, "the answer was whole"
        assert report.stage is Stage.KILL
        assert (await supervisor.generate("next", max_tokens=3)).text == words(3)


async def test_the_kill_of_one_request_doesnt_count_as_a_crash() -> None:
    options: dict[str, Any] = {
        "faults": [{"at": "decode", "kind": "ignore_cancel", "prompt_contains": "deaf"}]
    }
    async with scripted(options) as (supervisor, told):
        for _ in range(7):  # more often than crashes would be forgiven
            async with supervisor.stream("deaf") as stream:
                await until(lambda stream=stream: stream.report.timeline.started_ns is not None)  # type: ignore[misc]
                stream.kill()
                assert (await stream.released()).stage is Stage.KILL
        assert (await supervisor.generate("next", max_tokens=3)).text == words(3)
        assert supervisor.status().restarts == {"cancel_kill": 7}
        assert len(told.of(RequestReleased)) == 8
