"""What a caller sees of a request while it lives: its phase, its pauses, and what listeners are told of it."""

from __future__ import annotations

import anyio
import pytest

from infervisor import ConfigurationError, EndReason, RequestCancelled
from infervisor.supervisor import events
from tests.helpers.supervised import Told, scripted

pytestmark = pytest.mark.anyio


async def until(stream: object, phase: str) -> None:
    with anyio.fail_after(20):
        while stream.phase != phase:  # type: ignore[attr-defined] # noqa: ASYNC110
            await anyio.sleep(0.002)


async def test_phases_come_in_their_order_and_a_slow_reader_pauses() -> None:
    async with scripted({"pace_s": 0.001}) as (supervisor, _):
        first = supervisor.stream("one", max_tokens=50, window=4)
        second = supervisor.stream("two", max_tokens=5)
        assert first.phase == "new"
        async with first:
            await until(first, "paused")
            assert first.report.timeline.pause_began_ns is not None
            async with second:
                read = [chunk async for chunk in first]
                assert read
                report = await first.released()
                assert first.phase == "released"
                await second.text()
        assert report.timeline.paused_ns > 0
        assert report.timeline.pause_began_ns is None
        assert report.to_dict()["figures"]["paused_s"] == report.timeline.paused_ns / 1e9


async def test_who_waits_is_queued_and_who_left_the_queue_never_reached_the_worker() -> None:
    async with scripted({"pace_s": 0.001}, slots=1) as (supervisor, told):
        async with supervisor.stream("one", max_tokens=1000, window=2) as running:
            await until(running, "paused")
            async with supervisor.stream("two") as waiting:
                assert waiting.phase == "queued"
                waiting.cancel(EndReason.CLIENT_DISCONNECTED)
                report = await waiting.released()
        assert report.end_reason is EndReason.CLIENT_DISCONNECTED
        assert report.timeline.submitted_ns is None
        assert [event.request_id for event in told.of(events.RequestStarted)] == [1]


async def test_an_embedding_can_be_cancelled_by_whoever_holds_its_request() -> None:
    async with scripted({"pace_s": 0.01}, slots=1) as (supervisor, _):
        async with supervisor.stream("one", max_tokens=1000, window=2) as running:
            await until(running, "paused")
            request = supervisor.embedding_request(["a", "b"])
            raised: list[RequestCancelled] = []

            async def ask() -> None:
                with pytest.raises(RequestCancelled) as caught:
                    await request.embeddings()
                raised.append(caught.value)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await until(request, "queued")  # no slot is free
                request.cancel(EndReason.CLIENT_DISCONNECTED)
            assert raised[0].code == "client_disconnected"
            assert raised[0].report.is_released


async def test_listeners_hear_everything_until_they_are_removed() -> None:
    async with scripted() as (supervisor, told):
        heard, failing = Told(), 0

        def fails(event: object) -> None:
            nonlocal failing
            failing += 1
            raise RuntimeError("a listener's own defect")

        remove, remove_failing = supervisor.add_listener(heard), supervisor.add_listener(fails)
        await supervisor.generate("one", max_tokens=3)
        assert [type(event) for event in heard.events] == [type(event) for event in told.events[-failing:]]
        remove()
        remove()
        remove_failing()
        count = len(heard.events)
        await supervisor.generate("two", max_tokens=3)
        assert len(heard.events) == count
        with pytest.raises(ConfigurationError):
            supervisor.add_listener(3)  # type: ignore[arg-type]


async def test_the_status_says_what_is_loading_and_why_nothing_serves() -> None:
    async with scripted({"load_s": 0.3}, wait_until_ready=False) as (supervisor, told):
        await told.wait_for(events.LoadProgress)
        status = supervisor.status()
        assert status.loading is not None
        assert status.problem is None
        await supervisor.wait_ready()
        assert supervisor.status().loading is None
        told_pid = supervisor.status().worker_pid
        assert told_pid is not None
