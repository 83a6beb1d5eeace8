"""Streams that outlive their worker: what the reader sees, what the report says, and when they end after all."""

from __future__ import annotations

import os
import signal
from typing import Any

import anyio
import pytest

from infervisor import (
    Deadlines,
    EndReason,
    InvalidRequest,
    RestartPolicy,
    ShuttingDown,
    Supervisor,
    WorkerDied,
)
from infervisor.protocol.errors import ConfigurationError
from infervisor.protocol.machines.process import DeathCause
from infervisor.supervisor import lookout
from infervisor.supervisor.events import (
    BreakerOpened,
    RequestInterrupted,
    RequestResumed,
    WorkerBecameReady,
    WorkerExited,
)
from tests.helpers.inside import dispatcher_of
from tests.helpers.supervised import scripted
from tests.helpers.waiting import until

pytestmark = pytest.mark.anyio

SLOW_RESTART = RestartPolicy(backoff_initial_s=600, backoff_max_s=600, period_s=3600, jitter=0)


def words(count: int) -> str:
    """Return what the scripted engine says."""
    return "".join(f"w{number} " for number in range(count))


def kill(supervisor: Supervisor) -> int:
    """Kill the worker that serves; return its pid."""
    pid = supervisor.status().worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.mark.produces("request: running × Interrupted → queued")
async def test_a_stream_goes_on_where_it_was_and_the_report_tells() -> None:
    async with scripted({"pace_s": 0.002}, on_crash="resume") as (supervisor, told):
        async with supervisor.stream("hello there", max_tokens=60, window=8) as stream:
            text, indexes = "", []
            async for chunk in stream:
                text += chunk.text
                indexes.append(chunk.index)
                if len(indexes) == 10:
                    dead = kill(supervisor)
        assert text == words(60)
        assert indexes == list(range(60))
        report = stream.report
        (resume,) = report.resumes
        assert (resume.cause, resume.worker_pid) == (DeathCause.CRASHED, dead)
        assert 10 <= resume.delivered_tokens <= 18
        assert resume.pause_s is not None
        assert 0 < resume.pause_s < 20
        assert report.worker_pid not in (None, dead)
        assert report.end_reason is EndReason.LENGTH
        assert report.error is None
        usage = report.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.computed_tokens) == (2, 60, 60)
        assert "· resumed 1 × (paused " in report.to_line()
        (interrupted,) = told.of(RequestInterrupted)
        assert (interrupted.pid, interrupted.delivered_tokens) == (dead, resume.delivered_tokens)
        (resumed,) = told.of(RequestResumed)
        assert resumed.resume == resume
        (exited,) = told.of(WorkerExited)
        assert exited.requests == (report.request_id,)


@pytest.mark.produces("attempt: submitted × Began → paused")
async def test_what_the_reader_has_not_taken_by_then_is_neither_lost_nor_said_twice() -> None:
    async with scripted(on_crash="resume") as (supervisor, told):
        async with supervisor.stream("hello", max_tokens=40, window=8) as stream:
            request = stream._request
            await until(lambda: request.window.received == 8)
            kill(supervisor)
            await told.wait_for(WorkerBecameReady, count=2)
            await until(lambda: request.id in dispatcher_of(supervisor).attempts)
            attempt = dispatcher_of(supervisor).attempts[request.id]
            await until(lambda: attempt.state.phase == "paused")
            assert await stream.text() == words(40)
        assert stream.report.resumes[0].delivered_tokens == 8


async def test_a_reader_may_take_while_there_is_no_worker_and_its_credit_waits_for_the_next() -> None:
    async with scripted(on_crash="resume", restart=SLOW_RESTART) as (supervisor, told):
        async with supervisor.stream("hello", max_tokens=30, window=4) as stream:
            await until(lambda: stream._request.window.received == 4)
            kill(supervisor)
            await told.wait_for(RequestInterrupted)
            text = "".join([(await anext(stream)).text for _ in range(4)])
            supervisor.restart_worker()
            text += await stream.text()
        assert text == words(30)


@pytest.mark.produces(
    "attempt: submitted × CreditSent → submitted", "attempt: prefill × CreditSent → prefill"
)
async def test_taking_while_the_next_worker_reads_the_prompt_again_raises_its_limit() -> None:
    options = {"prefill_s": 0.6, "slice_s": 0.1, "open_s": 0.6}
    async with scripted(options, on_crash="resume", snapshots=None) as (supervisor, _):
        async with supervisor.stream("a b c d e f", max_tokens=30, window=8) as stream:
            request, dispatcher = stream._request, dispatcher_of(supervisor)
            await until(lambda: request.window.received == 8)
            first = dispatcher.attempts[request.id]
            # Half of the window is taken, so that there is credit left when the next worker begins.
            text = "".join([(await anext(stream)).text for _ in range(4)])
            await until(lambda: request.window.received >= 11)
            kill(supervisor)
            await until(lambda: dispatcher.attempts.get(request.id) not in (None, first))
            attempt = dispatcher.attempts[request.id]
            assert attempt.state.phase == "submitted"
            text += "".join([(await anext(stream)).text for _ in range(4)])
            await until(lambda: attempt.state.phase == "prefill")
            text += "".join([(await anext(stream)).text for _ in range(3)])
            text += await stream.text()
        assert text == words(30)


async def test_a_stream_that_is_cancelled_while_it_waits_for_a_worker_is_released_at_once() -> None:
    async with scripted(on_crash="resume", restart=SLOW_RESTART) as (supervisor, told):
        async with supervisor.stream("hello", max_tokens=30, window=4) as stream:
            await anext(stream)
            kill(supervisor)
            await told.wait_for(RequestInterrupted)
            assert supervisor.status().queue_depth == 1
            stream.cancel()
            assert stream.report.is_released
            assert [chunk async for chunk in stream] == []
        assert stream.end_reason is EndReason.CANCELLED
        assert supervisor.status().queue_depth == 0


async def test_after_so_many_resumes_it_ends_with_the_reason_of_the_last_death() -> None:
    async with scripted({"pace_s": 0.01}, on_crash="resume", max_resumes=2) as (supervisor, told):
        async with supervisor.stream("hello", max_tokens=3000, window=4) as stream:
            for count in range(1, 4):
                await anext(stream)
                kill(supervisor)
                await told.wait_for(WorkerExited, count=count)
                if count < 3:
                    await told.wait_for(RequestResumed, count=count)
            with pytest.raises(WorkerDied, match="SIGKILL") as caught:
                await stream.text()
        assert caught.value.report.end_reason is EndReason.WORKER_CRASHED
        assert len(stream.report.resumes) == 2


async def test_none_is_resumed_where_none_is_allowed() -> None:
    async with scripted({"pace_s": 0.01}, on_crash="resume", max_resumes=0) as (supervisor, _):
        async with supervisor.stream("hello", max_tokens=3000) as stream:
            await anext(stream)
            kill(supervisor)
            with pytest.raises(WorkerDied):
                await stream.text()


async def test_one_request_may_choose_otherwise() -> None:
    async with scripted({"pace_s": 0.005, "slots": 2}, on_crash="resume") as (supervisor, _):
        async with (
            supervisor.stream("hello", max_tokens=40, window=4) as lasting,
            supervisor.stream("hello", max_tokens=40, window=4, on_crash="fail") as mortal,
        ):
            await anext(lasting), await anext(mortal)
            kill(supervisor)
            with pytest.raises(WorkerDied):
                await mortal.text()
            assert await lasting.text() == words(40)[3:]


async def test_another_choice_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="on_crash must be 'resume' or 'fail', not 'retry'"):
        Supervisor(engine="scripted", on_crash="retry")
    async with scripted() as (supervisor, _):
        with pytest.raises(InvalidRequest, match="on_crash") as caught:
            supervisor.stream("hello", on_crash="retry")
        assert caught.value.field == "on_crash"


async def test_a_breaker_that_opens_meanwhile_ends_it_with_the_reason_of_the_death() -> None:
    async with scripted({"pace_s": 0.01}, on_crash="resume", restart=RestartPolicy(max_restarts=0)) as (
        supervisor,
        told,
    ):
        async with supervisor.stream("hello", max_tokens=3000, window=4) as stream:
            await anext(stream)
            kill(supervisor)
            await told.wait_for(BreakerOpened)
            with pytest.raises(WorkerDied, match=r"SIGKILL.*no worker can be had to go on"):
                await stream.text()
        assert stream.report.end_reason is EndReason.WORKER_CRASHED
        assert stream.report.is_released


async def test_closing_ends_one_that_waits_as_shutting_down() -> None:
    async with scripted(on_crash="resume", restart=SLOW_RESTART) as (supervisor, told):
        async with supervisor.stream("hello", max_tokens=3000, window=4) as stream:
            await until(lambda: stream._request.window.received == 4)
            kill(supervisor)
            await told.wait_for(RequestInterrupted)
            await supervisor.stop()
            with pytest.raises(ShuttingDown):
                await stream.text()
            assert stream.report.is_released


@pytest.mark.parametrize(
    ("deadlines", "reason"),
    [
        (Deadlines(total_s=0.6), EndReason.TOTAL_TIMEOUT),
        (Deadlines(startup_s=0.3), EndReason.STARTUP_TIMEOUT),
    ],
)
async def test_the_total_goes_on_while_it_waits_and_so_does_the_wait_for_a_worker(
    deadlines: Deadlines, reason: EndReason
) -> None:
    async with scripted(on_crash="resume", restart=SLOW_RESTART) as (supervisor, _):
        async with supervisor.stream("hello", max_tokens=3000, window=4, deadlines=deadlines) as stream:
            await until(lambda: stream._request.window.received == 4)
            kill(supervisor)
            with anyio.fail_after(20):
                await stream.released()
        assert stream.end_reason is reason
        assert [chunk.text for chunk in stream._request._buffer] == ["w0 ", "w1 ", "w2 ", "w3 "], (
            "still to be read"
        )


async def test_each_attempt_has_the_whole_first_token_budget() -> None:
    # Together the two prefills take longer than the budget of one.
    options = {"prefill_s": 0.7, "slice_s": 0.05}
    deadlines = Deadlines(first_token_s=3.0)
    async with scripted(options, on_crash="resume", snapshots=None) as (supervisor, _):
        async with supervisor.stream("a b c", max_tokens=20, window=4, deadlines=deadlines) as stream:
            await anext(stream)
            clocks = stream._request.clocks
            kill(supervisor)
            assert await stream.text() == words(20)[3:]
        assert clocks.next_due() is None or stream.end_reason is EndReason.LENGTH
        assert len(stream.report.resumes) == 1


@pytest.mark.parametrize("slots", [1, 3])
async def test_a_kill_for_another_ones_sake_costs_the_neighbours_a_pause(slots: int) -> None:
    options: dict[str, Any] = {"pace_s": 0.002, "slots": slots}
    async with scripted(options, on_crash="resume") as (supervisor, _):
        texts: dict[int, str] = {}

        async def read(number: int) -> None:
            texts[number] = (await supervisor.generate("hello", max_tokens=100, window=8)).text

        async with anyio.create_task_group() as tasks:
            async with supervisor.stream("hello", max_tokens=3000, window=4) as victim:
                await anext(victim)
                for number in range(4):
                    tasks.start_soon(read, number)
                await until(lambda: len(dispatcher_of(supervisor).attempts) == slots)
                victim.kill()
        assert texts == {number: words(100) for number in range(4)}
        assert supervisor.status().restarts == {"cancel_kill": 1}


async def test_restarts_without_end_are_survived_without_a_lost_token() -> None:
    restart = RestartPolicy(max_restarts=100, backoff_initial_s=0.01, backoff_max_s=0.01)
    async with scripted({"pace_s": 0.002}, on_crash="resume", max_resumes=100, restart=restart) as (
        supervisor,
        _,
    ):
        async with supervisor.stream("hello", max_tokens=200, window=4) as stream:
            text, read = "", 0
            async for chunk in stream:
                text += chunk.text
                read += 1
                if read % 25 == 0:
                    kill(supervisor)
        assert text == words(200)
        assert 5 <= len(stream.report.resumes) <= 8


async def test_what_snapshots_took_goes_back_when_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookout, "IDLE_LOOKS", 1)
    async with scripted({"pace_s": 0.005}, on_crash="resume") as (supervisor, _):
        async with supervisor.stream("hello", max_tokens=300, window=8) as stream:
            for _ in range(100):
                await anext(stream)
            assert supervisor.status().snapshot_bytes > 0
        await until(lambda: supervisor.status().snapshot_bytes == 0)
