"""Cancelling from everywhere, at every moment of a request's life: first rung only, the engine obeys."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import pytest

from infervisor import EndReason, RequestCancelled, Stage, Stream, Supervisor
from infervisor.supervisor.events import RequestReleased
from tests.helpers.inside import (
    PATIENT,
    dispatcher_of,
    holds_nothing,
    next_is_exact,
    request_of,
    until,
    until_buffered,
    words,
)
from tests.helpers.supervised import Told
from tests.helpers.supervised import scripted as quick

pytestmark = pytest.mark.anyio

SOON_S = 5.0
"""Far below the graces of the patient ladder, far above what a release takes."""


@asynccontextmanager
async def scripted(
    options: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Supervisor, Told]]:
    """Yield a supervisor whose cancels have all the time they need at the first rung."""
    async with quick(options, **{"escalation": PATIENT, **settings}) as both:
        yield both


def release_of(told: Told, stream: Stream) -> RequestReleased:
    """Return the one event that tells of the release."""
    request_id = stream.report.request_id
    (event,) = [event for event in told.of(RequestReleased) if event.report.request_id == request_id]
    return event


# --- at every moment -----------------------------------------------------------------------------


async def test_in_the_tick_of_the_submit() -> None:
    async with scripted({"pace_s": 0.05}) as (supervisor, told):
        async with supervisor.stream("count") as stream:
            stream.cancel()
            assert stream.end_reason is EndReason.CANCELLED
            report = await stream.released()
        assert report.is_released
        assert report.timeline.release_s is not None
        assert report.timeline.release_s < SOON_S
        assert release_of(told, stream).report == report
        await next_is_exact(supervisor)


@pytest.mark.produces("request: queued × Abandoned → ended", "end: cancelled")
async def test_in_the_queue_nothing_is_computed_and_the_release_is_at_once() -> None:
    async with scripted({"pace_s": 0.02}) as (supervisor, told), supervisor.stream("first") as running:
        await running.__anext__()
        async with supervisor.stream("second") as waiting:
            waiting.cancel()
            report = waiting.report
            assert report.is_released, "a request that waits is released by taking it out"
            assert report.end_reason is EndReason.CANCELLED
            timeline = report.timeline
            assert (timeline.submitted_ns, timeline.started_ns, timeline.first_token_ns) == (None, None, None)
            assert report.usage.computed_tokens == 0
            assert report.worker_pid is None
            assert report.stage is None
            assert timeline.ended_ns is not None
            assert release_of(told, waiting).report == report
            assert dispatcher_of(supervisor).queue.peak == 1
        assert running.end_reason is None


async def test_while_the_model_loads() -> None:
    async with scripted({"load_s": 0.5}, wait_until_ready=False) as (supervisor, _):
        streams = [supervisor.stream("count", max_tokens=3) for _ in range(3)]
        async with streams[0], streams[1], streams[2]:
            streams[1].cancel()
            assert streams[1].report.is_released
            assert supervisor.status().queue_depth == 2
            assert await streams[0].text() == words(3)
            assert await streams[2].text() == words(3)
            with pytest.raises(RequestCancelled):
                await streams[1].text()
    async with scripted({"load_s": 0.5}, wait_until_ready=False) as (supervisor, _):
        streams = [supervisor.stream("count") for _ in range(3)]
        async with streams[0], streams[1], streams[2]:
            for stream in streams:
                stream.cancel()
            assert holds_nothing(supervisor)
            assert all(stream.report.timeline.started_ns is None for stream in streams)
        await supervisor.wait_ready()
        await next_is_exact(supervisor)


@pytest.mark.produces("attempt: prefill × EndArrived → ending")
async def test_inside_a_long_prefill() -> None:
    async with scripted({"prefill_s": 60, "slice_s": 30}) as (supervisor, _):
        async with supervisor.stream("a long prompt of many words") as stream:
            await until(lambda: stream.report.timeline.started_ns is not None)
            stream.cancel()
            report = await stream.released()
        assert report.stage is Stage.IN_BAND
        assert report.timeline.release_s is not None
        assert report.timeline.release_s < SOON_S
        assert report.timeline.first_token_ns is None


@pytest.mark.parametrize("pace_s", [0.0, 0.02, 30.0])
@pytest.mark.produces("request: running × Abandoned → ended", "end: cancelled")
async def test_while_decoding(pace_s: float) -> None:
    faults = [{"at": "decode", "kind": "hang", "seconds": 0.001}]
    async with scripted({"pace_s": pace_s, "faults": faults}) as (supervisor, _):
        async with supervisor.stream("count", window=4) as stream:
            if pace_s < 1:
                await stream.__anext__()
            else:
                await until(lambda: stream.report.timeline.started_ns is not None)
            stream.cancel()
            report = await stream.released()
        assert report.stage is Stage.IN_BAND
        assert report.timeline.release_s is not None
        assert report.timeline.release_s < SOON_S
        timeline = report.timeline
        assert timeline.cancel_requested_ns is not None
        assert timeline.cancel_noticed_ns is not None
        assert timeline.released_ns is not None
        assert timeline.cancel_requested_ns <= timeline.cancel_noticed_ns <= timeline.released_ns


@pytest.mark.produces("attempt: paused × EndArrived → ending")
async def test_while_paused_for_want_of_credit() -> None:
    async with scripted() as (supervisor, _):
        async with supervisor.stream("count", window=3) as stream:
            await until_buffered(stream, 3)
            stream.cancel()
            report = await stream.released()
            assert [chunk async for chunk in stream] == [], "who cancels wants no more text"
        assert report.usage.computed_tokens == 3
        await next_is_exact(supervisor)


@pytest.mark.produces("request: ended × Abandoned → ended", "end: length")
async def test_between_the_natural_end_and_its_release_the_natural_end_stands() -> None:
    faults = [{"at": "release", "kind": "hang", "seconds": 0.3, "prompt_contains": "slow"}]
    async with scripted({"faults": faults}) as (supervisor, _):
        async with supervisor.stream("slow to release", max_tokens=3) as stream:
            await until(lambda: stream.end_reason is not None)
            assert not stream.report.is_released
            stream.cancel()
            assert stream.end_reason is EndReason.LENGTH
            assert await stream.text() == words(3), "what had arrived before the cancel is still read"
            report = await stream.released()
        assert report.end_reason is EndReason.LENGTH
        assert report.timeline.cancel_requested_ns is None
        assert report.stage is None
        await next_is_exact(supervisor)


# --- more than once, too late, from elsewhere ------------------------------------------------------


async def test_twice_and_after_the_end_changes_nothing() -> None:
    async with scripted({"pace_s": 0.01}) as (supervisor, told):
        async with supervisor.stream("count") as stream:
            await stream.__anext__()
            stream.cancel()
            asked_ns = stream.report.timeline.cancel_requested_ns
            stream.cancel(EndReason.CLIENT_DISCONNECTED)
            report = await stream.released()
            stream.cancel()
            assert stream.report == report
        assert report.end_reason is EndReason.CANCELLED
        assert report.timeline.cancel_requested_ns == asked_ns
        async with supervisor.stream("count", max_tokens=2) as whole:
            assert await whole.text() == words(2)
            await whole.released()
            whole.cancel()
            assert whole.end_reason is EndReason.LENGTH
        assert len(told.of(RequestReleased)) == 2


@pytest.mark.produces("end: client_disconnected")
async def test_a_client_that_left_is_told_apart() -> None:
    async with scripted({"pace_s": 0.01}) as (supervisor, _):
        async with supervisor.stream("count") as stream:
            stream.cancel(EndReason.CLIENT_DISCONNECTED)
            with pytest.raises(RequestCancelled) as caught:
                await stream.text()
        assert stream.end_reason is EndReason.CLIENT_DISCONNECTED
        assert caught.value.code == "client_disconnected"
        assert caught.value.report.end_reason is EndReason.CLIENT_DISCONNECTED


async def test_from_another_thread() -> None:
    async with scripted({"pace_s": 0.01}) as (supervisor, _):
        async with supervisor.stream("count") as stream:
            await stream.__anext__()
            await anyio.to_thread.run_sync(stream.cancel)
            with anyio.fail_after(SOON_S):
                rest = [chunk async for chunk in stream]
                report = await stream.released()
        assert len(rest) < 40
        assert report.end_reason is EndReason.CANCELLED


async def test_from_another_task_while_the_reader_waits() -> None:
    async with scripted({"pace_s": 30}) as (supervisor, _):
        for read_text in (False, True):
            ended: list[str] = []

            async def read(stream: Stream, as_text: bool, ended: list[str]) -> None:
                if as_text:
                    with pytest.raises(RequestCancelled) as caught:
                        await stream.text()
                    assert caught.value.code == "cancelled"
                    ended.append("error")
                else:
                    async for _ in stream:
                        raise AssertionError("nothing was computed")
                    ended.append("quiet")

            async with supervisor.stream("count") as stream, anyio.create_task_group() as tasks:
                tasks.start_soon(read, stream, read_text, ended)
                await until(lambda stream=stream: request_of(stream).news._waiting != [])  # type: ignore[misc]
                stream.cancel()
            assert ended == ["error" if read_text else "quiet"]


async def test_generate_raises_what_ended_it() -> None:
    async with scripted({"pace_s": 30}) as (supervisor, _):

        async def cancel_it() -> None:
            dispatcher = dispatcher_of(supervisor)
            await until(lambda: bool(dispatcher.attempts))
            (request,) = dispatcher.requests.values()
            dispatcher.abandon(request, EndReason.CANCELLED)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel_it)
            with pytest.raises(RequestCancelled) as caught:
                await supervisor.generate("count")
        assert caught.value.report.is_released


# --- leaving ---------------------------------------------------------------------------------------


async def test_a_stream_that_is_dropped_in_the_middle_frees_the_worker() -> None:
    async with scripted({"pace_s": 0.005}) as (supervisor, told):

        async def take_three() -> list[str]:
            texts: list[str] = []
            async for chunk in supervisor.stream("count"):
                texts.append(chunk.text)
                if len(texts) == 3:
                    break
            return texts

        assert await take_three() == ["w0 ", "w1 ", "w2 "]
        gc.collect()
        event = await told.wait_for(RequestReleased, within_s=SOON_S)
        assert event.report.end_reason is EndReason.CANCELLED
        assert holds_nothing(supervisor)
        await next_is_exact(supervisor)


async def test_a_stream_that_was_never_started_is_no_request() -> None:
    async with scripted() as (supervisor, told):
        unread = supervisor.stream("count")
        del unread
        gc.collect()
        cancelled = supervisor.stream("count")
        cancelled.cancel()
        assert await cancelled.released() == cancelled.report
        assert [chunk async for chunk in cancelled] == []
        await next_is_exact(supervisor)
        assert [event.report.request_id for event in told.of(RequestReleased)] == [3]


async def test_a_reader_task_that_is_cancelled_loses_no_chunk_and_one_that_leaves_releases() -> None:
    async with scripted({"pace_s": 0.03}) as (supervisor, _):
        async with supervisor.stream("count", max_tokens=12) as stream:
            texts: list[str] = []
            while stream.end_reason is None or request_of(stream).has_chunk:
                with anyio.move_on_after(0.01):
                    async for chunk in stream:
                        texts.append(chunk.text)
        assert "".join(texts) == words(12)

        streams: list[Stream] = []
        with anyio.move_on_after(0.1) as scope:
            async with supervisor.stream("count") as stream:
                streams.append(stream)
                await stream.__anext__()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert streams[0].report.is_released, "leaving waits for the release, shielded"
        assert streams[0].end_reason is EndReason.CANCELLED


async def test_leaving_with_an_exception_releases_and_lets_it_pass() -> None:
    async with scripted({"pace_s": 0.01}) as (supervisor, _):
        stream = supervisor.stream("count")

        async def fail_inside() -> None:
            async with stream:
                await stream.__anext__()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail_inside()
        assert stream.report.is_released
        assert stream.end_reason is EndReason.CANCELLED
        await next_is_exact(supervisor)


async def test_a_cancel_from_another_thread_counts_from_its_call_however_long_the_loop_is_blocked() -> None:
    async with quick({"pace_s": 0.01}) as (supervisor, _), supervisor.stream("count") as stream:
        await anext(stream)
        called_ns: list[int] = []

        def cancel() -> None:
            called_ns.append(time.monotonic_ns())
            stream.cancel()

        canceller = threading.Timer(0.1, cancel)
        canceller.start()
        time.sleep(0.6)  # noqa: ASYNC251 (the blocked loop)
        report = await stream.released()
        canceller.join()
    asked_ns = report.timeline.cancel_requested_ns
    assert asked_ns is not None
    assert 0 <= asked_ns - called_ns[0] < 200_000_000
    assert report.timeline.release_s is not None
    assert report.timeline.release_s > 0.3
    assert report.stage is Stage.IN_BAND, "the grace began when the message was sent"
