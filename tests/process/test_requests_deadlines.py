"""Each budget runs out by itself, for its own reason, and only while it should run."""

from __future__ import annotations

import os
import signal
from typing import Any

import anyio
import pytest

from infervisor import DeadlineExceeded, Deadlines, EndReason, Stream
from infervisor.supervisor.events import LoadProgress
from tests.helpers.inside import read_into, request_of, until, until_buffered, words, worker_of
from tests.helpers.supervised import scripted

pytestmark = pytest.mark.anyio

NONE = {
    "queue_s": None,
    "startup_s": None,
    "first_token_s": None,
    "stall_s": None,
    "total_s": None,
    "consumer_s": None,
}


def only(**budgets: float) -> Deadlines:
    """Return deadlines with these budgets and no others."""
    return Deadlines(**{**NONE, **budgets})


async def runs_out(stream: Stream, reason: EndReason) -> str:
    """Read to the end that a deadline makes; return what came before."""
    texts: list[str] = []
    with pytest.raises(DeadlineExceeded) as caught, anyio.fail_after(20):
        await read_into(stream, texts)
    error = caught.value
    assert error.code == reason.value
    assert error.retryable
    assert reason.value.split("_")[0] in str(error) or "token" in str(error) or "worker" in str(error)
    assert error.report.end_reason is reason
    assert stream.end_reason is reason
    report = await stream.released()
    assert report.is_released
    # Whoever asks again gets the same error again, fresh.
    with pytest.raises(DeadlineExceeded) as again:
        await stream.__anext__()
    assert again.value is not error
    return "".join(texts)


@pytest.mark.produces("request: queued × Abandoned → ended", "end: queue_timeout")
async def test_queue() -> None:
    async with scripted({"pace_s": 0.02}) as (supervisor, _), supervisor.stream("first") as running:
        await running.__anext__()
        async with supervisor.stream("second", deadlines=only(queue_s=0.2)) as waiting:
            assert await runs_out(waiting, EndReason.QUEUE_TIMEOUT) == ""
            timeline = waiting.report.timeline
            assert timeline.submitted_ns is None
            assert timeline.queue_s is not None
            assert timeline.queue_s >= 0.2
        assert running.end_reason is None


async def test_queue_stands_still_while_no_worker_is_ready() -> None:
    options = {"load_s": 0.8, "pace_s": 0.02}
    async with scripted(options, wait_until_ready=False) as (supervisor, _):
        # It waits through the whole load, far longer than its queue budget.
        async with supervisor.stream("count", max_tokens=2, deadlines=only(queue_s=0.3)) as stream:
            assert await stream.text() == words(2)
            assert stream.report.timeline.queue_s is not None
            assert stream.report.timeline.queue_s > 0.6
        async with supervisor.stream("first") as first:
            await first.__anext__()
            async with supervisor.stream("second", max_tokens=2, deadlines=only(queue_s=1.0)) as second:
                os.kill(worker_of(supervisor).pid, signal.SIGKILL)
                assert await second.text() == words(2)


async def test_queue_stands_still_while_a_worker_is_being_replaced() -> None:
    async with scripted({"pace_s": 0.02, "load_s": 1.0}) as (supervisor, _):
        async with supervisor.stream("runs", max_tokens=10) as running:
            await running.__anext__()
            async with supervisor.stream("waits", max_tokens=2, deadlines=only(queue_s=0.9)) as waiting:
                supervisor.restart_worker()
                assert await waiting.text() == words(2)
                queue_s = waiting.report.timeline.queue_s
                assert queue_s is not None
                assert queue_s > 1.0, "it waited for longer than its budget, but not for its turn"
            assert running.end_reason is EndReason.LENGTH


@pytest.mark.produces("end: startup_timeout")
async def test_startup() -> None:
    # The load stands still after its first step: no progress, nothing extends the budget.
    faults = [{"at": "load", "after": 1, "kind": "hang", "seconds": 1.5}]
    options: dict[str, Any] = {"load_s": 0.1, "faults": faults}
    async with scripted(options, wait_until_ready=False) as (supervisor, told):
        await told.wait_for(LoadProgress, where=lambda event: event.phase == "load")
        async with supervisor.stream("count", deadlines=only(startup_s=0.3)) as stream:
            assert await runs_out(stream, EndReason.STARTUP_TIMEOUT) == ""
            assert stream.report.timeline.started_ns is None


async def test_startup_is_given_anew_by_a_load_that_is_slow_but_moves() -> None:
    options = {"load_s": 2.0, "load_steps": 20}
    async with scripted(options, wait_until_ready=False) as (supervisor, told):
        await told.wait_for(LoadProgress)
        async with supervisor.stream("count", max_tokens=2, deadlines=only(startup_s=1.0)) as stream:
            assert await stream.text() == words(2)
            assert stream.report.timeline.queue_s is not None
            assert stream.report.timeline.queue_s > 1.5


@pytest.mark.produces("end: first_token_timeout")
async def test_first_token() -> None:
    async with scripted({"prefill_s": 60, "slice_s": 0.05}) as (supervisor, _):
        async with supervisor.stream(" ".join("x" * 2000), deadlines=only(first_token_s=0.3)) as stream:
            assert await runs_out(stream, EndReason.FIRST_TOKEN_TIMEOUT) == ""
            timeline = stream.report.timeline
            assert timeline.started_ns is not None
            assert timeline.release_s is not None
            assert timeline.release_s < 10


async def test_first_token_plays_no_part_after_the_first_token_nor_in_the_queue() -> None:
    async with scripted({"pace_s": 0.2}) as (supervisor, _):
        first = supervisor.stream("first", max_tokens=8)
        async with (
            first,
            supervisor.stream("count", max_tokens=8, deadlines=only(first_token_s=1.2)) as stream,
        ):
            assert await first.text() == words(8)
            assert await stream.text() == words(8)


@pytest.mark.produces("end: stall_timeout")
async def test_stall_and_what_arrived_before_it_is_still_read() -> None:
    faults = [{"at": "decode", "after": 4, "kind": "hang", "seconds": 1.2, "prompt_contains": "stuck"}]
    async with scripted({"faults": faults}) as (supervisor, _):
        async with supervisor.stream("stuck", deadlines=only(stall_s=0.3)) as stream:
            await until(lambda: stream.end_reason is not None)
            assert await runs_out(stream, EndReason.STALL_TIMEOUT) == words(4)
        assert (await supervisor.generate("next", max_tokens=2)).text == words(2)


async def test_stall_doesnt_run_while_the_worker_has_no_credit_or_reads_the_prompt() -> None:
    options = {"prefill_s": 1.2, "slice_s": 0.1, "pace_s": 0.01}
    async with scripted(options) as (supervisor, _):
        prompt = " ".join("x" * 60)
        async with supervisor.stream(prompt, window=2, max_tokens=6, deadlines=only(stall_s=0.8)) as stream:
            first = await stream.__anext__()
            await until_buffered(stream, request_of(stream).window.limit - 1)
            with anyio.move_on_after(1.2):
                await anyio.Event().wait()
            assert stream.end_reason is None
            assert first.text + await stream.text() == words(6)


@pytest.mark.produces("end: total_timeout")
async def test_total_counts_always() -> None:
    async with scripted({"pace_s": 0.05}) as (supervisor, _):
        async with supervisor.stream("count", deadlines=only(total_s=0.4)) as running:
            text = await runs_out(running, EndReason.TOTAL_TIMEOUT)
            assert words(1000).startswith(text)
            assert text
            assert running.report.timeline.total_s is not None
            assert 0.4 <= running.report.timeline.total_s < 5
        async with supervisor.stream("count", window=1, deadlines=only(total_s=0.4)) as paused:
            await until(lambda: paused.end_reason is not None)
            assert await runs_out(paused, EndReason.TOTAL_TIMEOUT) == words(1)
        async with supervisor.stream("first") as first:
            await first.__anext__()
            async with supervisor.stream("second", deadlines=only(total_s=0.2)) as queued:
                assert await runs_out(queued, EndReason.TOTAL_TIMEOUT) == ""
    async with scripted({"load_s": 1.0}, wait_until_ready=False) as (supervisor, _):
        async with supervisor.stream("count", deadlines=only(total_s=0.2)) as loading:
            assert await runs_out(loading, EndReason.TOTAL_TIMEOUT) == ""


@pytest.mark.produces("end: consumer_timeout")
async def test_consumer_ends_a_stream_that_nobody_reads_and_leaves_its_text() -> None:
    async with scripted() as (supervisor, _):
        async with supervisor.stream("count", window=4, deadlines=only(consumer_s=0.3)) as stream:
            await stream.__anext__()
            await until(lambda: stream.end_reason is not None)
            assert await runs_out(stream, EndReason.CONSUMER_TIMEOUT) == words(
                stream.report.usage.completion_tokens - 1, start=1
            )
        assert (await supervisor.generate("next", max_tokens=2)).text == words(2)


async def test_consumer_doesnt_run_against_a_slow_worker_a_steady_reader_or_a_whole_answer() -> None:
    async with scripted({"pace_s": 0.5}) as (supervisor, _):
        # Nothing lies in the buffer while the worker computes for longer than the budget.
        async with supervisor.stream("count", max_tokens=3, deadlines=only(consumer_s=0.25)) as stream:
            assert await stream.text() == words(3)
    async with scripted() as (supervisor, _):
        async with supervisor.stream("count", window=4, deadlines=only(consumer_s=0.6)) as stream:
            texts: list[str] = []
            while len(texts) < 8:  # the buffer is never empty, but it is touched
                texts.append((await stream.__anext__()).text)
                with anyio.move_on_after(0.15):
                    await anyio.Event().wait()
            assert stream.end_reason is None
            assert "".join(texts) == words(8)
        async with supervisor.stream("count", max_tokens=3, deadlines=only(consumer_s=0.2)) as stream:
            await stream.released()
            with anyio.move_on_after(0.5):
                await anyio.Event().wait()
            assert stream.end_reason is EndReason.LENGTH, "a whole answer may lie for as long as it likes"
            assert await stream.text() == words(3)


async def test_none_is_no_limit_and_the_supervisors_deadlines_hold_where_the_request_has_none_of_its_own() -> (
    None
):
    options = {"prefill_s": 0.3, "pace_s": 0.05}
    async with scripted(options, deadlines=Deadlines(total_s=0.2)) as (supervisor, _):
        async with supervisor.stream("count", max_tokens=4, deadlines=only()) as stream:
            assert await stream.text() == words(4)
            assert request_of(stream).clocks.next_due() is None
        with pytest.raises(DeadlineExceeded) as caught:
            await supervisor.generate("count", max_tokens=100)
        assert caught.value.code == "total_timeout"
        assert caught.value.report.is_released
