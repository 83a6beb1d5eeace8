"""The queue in front of the worker: order, bounds, refusals; and requests side by side that never mix."""

from __future__ import annotations

import os
import signal
from typing import Any

import anyio
import pytest

from infervisor import (
    AdmissionError,
    EndReason,
    InfervisorError,
    Overloaded,
    RestartPolicy,
    ShuttingDown,
    Stream,
    Supervisor,
    Unavailable,
)
from infervisor.supervisor.events import BreakerOpened, RequestQueued, RequestReleased, WorkerBecameReady
from tests.helpers.inside import dispatcher_of, holds_nothing, read_into, until, words, worker_of
from tests.helpers.supervised import scripted

pytestmark = pytest.mark.anyio


async def refused(supervisor: Supervisor, kind: type[AdmissionError], reason: EndReason) -> Stream:
    """Enter a stream that is refused at once, with its reason in the error, the report and nowhere else."""
    stream = supervisor.stream("refused")
    waiting = len(dispatcher_of(supervisor).queue)
    with pytest.raises(kind) as caught, anyio.fail_after(2):
        await stream.__aenter__()
    error = caught.value
    assert type(error) is kind
    assert error.code == reason.value
    assert error.report == stream.report
    assert stream.end_reason is reason
    assert stream.report.is_released
    assert stream.report.timeline.submitted_ns is None
    assert len(dispatcher_of(supervisor).queue) == waiting
    return stream


@pytest.mark.produces("request: queued × Submitted → running", "end: length")
async def test_a_second_request_waits_while_one_streams_and_both_are_whole() -> None:
    async with scripted({"pace_s": 0.005}) as (supervisor, told):
        async with supervisor.stream("first", max_tokens=30) as first:
            await first.__anext__()
            async with supervisor.stream("second", max_tokens=10) as second:
                status = supervisor.status()
                assert (status.queue_depth, status.in_flight, status.queue_peak) == (1, 1, 1)
                assert await first.text() == words(29, start=1)
                assert await second.text() == words(10)
        assert [event.depth for event in told.of(RequestQueued)] == [0, 1]
        one, two = first.report.timeline, second.report.timeline
        assert one.released_ns is not None
        assert two.submitted_ns is not None
        assert one.released_ns <= two.submitted_ns
        assert two.started_ns is not None
        assert two.submitted_ns <= two.started_ns


@pytest.mark.produces("slot: starting × WorkerWanted → starting", "slot: starting × WorkerReady → running")
async def test_requests_are_served_in_the_order_in_which_they_came() -> None:
    async with scripted({"load_s": 0.3}, wait_until_ready=False) as (supervisor, told):
        streams = [supervisor.stream("count", max_tokens=2) for _ in range(8)]
        async with anyio.create_task_group() as tasks:

            async def read(stream: Stream) -> None:
                assert await stream.text() == words(2)

            for stream in streams:
                await stream.__aenter__()
            for stream in reversed(streams):
                tasks.start_soon(read, stream)
        await until(lambda: holds_nothing(supervisor))
        ends = [event.report.request_id for event in told.of(RequestReleased)]
        assert ends == [stream.report.request_id for stream in streams]
        assert supervisor.status().queue_peak == 8
        assert supervisor.status().queue_depth == 0


@pytest.mark.produces("request: queued × Lost → ended", "end: overloaded")
async def test_a_full_queue_refuses_at_once_and_takes_again_when_there_is_room() -> None:
    async with scripted({"pace_s": 0.005}, max_queue=2) as (supervisor, _):
        running = supervisor.stream("running")
        waiting = [supervisor.stream("waits", max_tokens=3) for _ in range(2)]
        async with running, waiting[0], waiting[1]:
            for _ in range(3):
                stream = await refused(supervisor, Overloaded, EndReason.OVERLOADED)
                assert "2 requests wait" in str(stream.report.error and stream.report.error.message)
            with pytest.raises(Overloaded):
                await supervisor.generate("refused, too")
            waiting[0].cancel()
            async with supervisor.stream("fits again", max_tokens=3) as another:
                running.cancel()
                assert await waiting[1].text() == words(3)
                assert await another.text() == words(3)
        assert supervisor.status().queue_peak == 2


async def test_a_queue_of_nothing_serves_whoever_finds_a_free_worker() -> None:
    async with scripted({"pace_s": 0.005}, max_queue=0) as (supervisor, _):
        async with supervisor.stream("first") as first:
            await first.__anext__()
            await refused(supervisor, Overloaded, EndReason.OVERLOADED)
        assert (await supervisor.generate("next", max_tokens=3)).text == words(3)
        assert supervisor.status().queue_peak == 0


@pytest.mark.produces(
    "request: queued × Lost → ended",
    "slot: open × WorkerWanted → open",
    "end: unavailable",
)
async def test_an_open_breaker_refuses_what_waits_and_what_comes_until_its_cooldown() -> None:
    restart = RestartPolicy(max_restarts=0, cooldown_s=1.0)
    options: dict[str, Any] = {"pace_s": 0.01}
    async with scripted(options, restart=restart) as (supervisor, told):
        async with supervisor.stream("runs") as running, supervisor.stream("waits") as waiting:
            await running.__anext__()
            os.kill(worker_of(supervisor).pid, signal.SIGSEGV)
            with pytest.raises(Unavailable) as caught:
                await waiting.text()
            assert caught.value.code == "unavailable"
            assert "SIGSEGV" in str(caught.value)
            assert waiting.report.is_released
            assert running.end_reason is EndReason.WORKER_CRASHED
            await told.wait_for(BreakerOpened)
            stream = await refused(supervisor, Unavailable, EndReason.UNAVAILABLE)
            assert stream.report.error is not None
            assert "SIGSEGV" in stream.report.error.message
        # After the cool-down the next request tries one start, and waits for it.
        with anyio.fail_after(20):
            while True:
                try:
                    answer = await supervisor.generate("again", max_tokens=3)
                except Unavailable:
                    await anyio.sleep(0.02)
                else:
                    break
        assert answer.text == words(3)
        assert len(told.of(WorkerBecameReady)) == 2


@pytest.mark.produces("end: shutting_down")
async def test_closing_ends_what_runs_and_what_waits_as_shutting_down() -> None:
    async with scripted({"pace_s": 0.01}) as (supervisor, told):
        async with supervisor.stream("runs") as running, supervisor.stream("waits") as waiting:
            await running.__anext__()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(supervisor.stop)
                await until(lambda: running.end_reason is not None)
                for stream in (running, waiting):
                    with pytest.raises(ShuttingDown) as caught:
                        await stream.text()
                    assert caught.value.code == "shutting_down"
                    assert stream.end_reason is EndReason.SHUTTING_DOWN
                    assert not caught.value.retryable
        assert running.report.is_released
        assert waiting.report.is_released
        with pytest.raises(ShuttingDown):
            supervisor.stream("too late")
        assert len(told.of(RequestReleased)) == 2


async def test_a_stream_made_before_the_closing_and_started_after_it_is_refused() -> None:
    async with scripted() as (supervisor, _):
        early = supervisor.stream("made early")
    with pytest.raises(ShuttingDown):
        await early.__aenter__()


@pytest.mark.parametrize("slots", [1, 3])
async def test_eight_requests_at_once_each_get_their_own_answer(slots: int) -> None:
    async with scripted({"mode": "echo", "slots": slots}) as (supervisor, _):
        answers: dict[int, str] = {}

        async def ask(number: int) -> None:
            prompt = " ".join(f"n{number}.{word}" for word in range(40 + number))
            answer = await supervisor.generate(prompt, window=1 + number)
            answers[number] = answer.text
            assert answer.text == prompt

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(ask, number)
        assert sorted(answers) == list(range(8))
        assert supervisor.status().queue_peak == 8 - slots
        assert holds_nothing(supervisor)


@pytest.mark.produces("attempt: prefill × TokensArrived → paused", "attempt: paused × CreditSent → decode")
async def test_a_paused_neighbour_slows_nobody_down() -> None:
    async with scripted({"slots": 3}) as (supervisor, _):
        async with supervisor.stream("paused", window=1) as paused:
            first = await paused.__anext__()
            for _ in range(3):
                assert (await supervisor.generate("count", max_tokens=300)).text == words(300)
            assert first.text + (await paused.__anext__()).text == words(2)


@pytest.mark.produces("end: engine_error")
async def test_a_failing_engine_ends_one_request_and_serves_the_next() -> None:
    faults = [
        {"at": "decode", "after": 2, "kind": "raise", "message": "out of luck", "prompt_contains": "bad"}
    ]
    async with scripted({"faults": faults}) as (supervisor, told):
        async with supervisor.stream("bad") as stream:
            texts: list[str] = []
            with pytest.raises(InfervisorError) as caught:
                await read_into(stream, texts)
        assert "".join(texts) == words(2)
        assert caught.value.code == "engine_error"
        assert "out of luck" in str(caught.value)
        assert "Traceback" in caught.value.detail  # type: ignore[attr-defined]
        assert stream.report.error is not None
        assert stream.report.error.code == "engine_error"
        assert (await supervisor.generate("next", max_tokens=2)).text == words(2)
        assert len(told.of(WorkerBecameReady)) == 1


async def test_a_longest_wait_refuses_what_would_wait_longer_once_that_is_known() -> None:
    async with scripted({"pace_s": 0.02}, max_wait_s=0.1) as (supervisor, _):
        # Nothing is known yet: nobody is refused.
        async with (
            supervisor.stream("a", max_tokens=10) as first,
            supervisor.stream("b", max_tokens=10) as second,
        ):
            assert await first.text() == words(10)
            assert await second.text() == words(10)
        async with supervisor.stream("c"):
            with pytest.raises(Overloaded, match="the wait would be about"):
                await supervisor.generate("d")


async def test_a_window_in_seconds_follows_the_measured_rate() -> None:
    async with scripted({"pace_s": 0.01}, window=4, window_s=0.5) as (supervisor, _):
        first = await supervisor.generate("a", max_tokens=20)
        assert first.report.window == 4
        second = await supervisor.generate("b", max_tokens=20)
        assert first.report.timeline.tokens_per_s is not None
        assert second.report.window == round(0.5 * first.report.timeline.tokens_per_s)
