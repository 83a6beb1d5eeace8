"""Several streams in one worker: what happens to one of them happens to no other.

Preparing in threads of its own, a worker's death under four streams, a reader that stops, a storm of cancels.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from infervisor import DeadlineExceeded, Deadlines, EndReason, Liveness, Stage, StopGraces, Stream, Supervisor
from infervisor.protocol.machines.attempt import AttemptPhase
from infervisor.protocol.machines.process import DeathCause
from infervisor.protocol.messages import Drain, Ended, Released, Started
from infervisor.supervisor.events import RequestResumed, WorkerExited
from tests.helpers.inside import (
    PATIENT,
    dispatcher_of,
    holds_nothing,
    next_is_exact,
    read_into,
    request_of,
    until,
    until_buffered,
    words,
)
from tests.helpers.raw_worker import raw_worker, submit
from tests.helpers.supervised import scripted

pytestmark = pytest.mark.anyio

SOON_S = 5.0
"""Far below what a hang takes, and far above what a release does."""
TOKENS = 90
DRAWN: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 1.0, "window": 8}
ENDLESS: dict[str, Any] = {"max_tokens": 100_000, "window": 8}


def hangs(file: Path, seconds: float | None = None) -> dict[str, Any]:
    """Return a fault in which preparing a slow prompt hangs; the file says that it has begun."""
    parts = {"prompt_contains": "slow", "once_file": str(file)}
    return {"at": "prepare", "kind": "hang", "seconds": seconds, **parts}


async def take(stream: Stream, chunks: int) -> str:
    """Return the text of the next chunks."""
    return "".join([(await anext(stream)).text for _ in range(chunks)])


async def take_side_by_side(streams: Sequence[Stream], chunks: int) -> list[str]:
    """Return the text of the next chunks of each, read by a task each."""
    texts = [""] * len(streams)

    async def read(number: int) -> None:
        texts[number] = await take(streams[number], chunks)

    async with anyio.create_task_group() as tasks:
        for number in range(len(streams)):
            tasks.start_soon(read, number)
    return texts


async def opened(stack: AsyncExitStack, supervisor: Supervisor, count: int, **options: Any) -> list[Stream]:
    """Return so many streams that have begun; they are left with the stack."""
    streams = [
        await stack.enter_async_context(supervisor.stream(f"stream {n}", **options)) for n in range(count)
    ]
    assert await take_side_by_side(streams, 1) == ["w0 "] * count
    return streams


# --- while one is prepared -----------------------------------------------------------------------------


async def test_a_cancel_while_preparing_releases_at_once_and_its_neighbours_go_on(tmp_path: Path) -> None:
    file = tmp_path / "began"
    options = {"slots": 4, "pace_s": 0.001, "faults": [hangs(file)]}
    async with scripted(options, escalation=PATIENT) as (supervisor, _), AsyncExitStack() as stack:
        streams = await opened(stack, supervisor, 3, **ENDLESS)
        async with supervisor.stream("slow", **ENDLESS) as slow:
            await until(file.exists)
            assert await take_side_by_side(streams, 40) == [words(40, 1)] * 3
            assert slow.report.timeline.started_ns is None
            slow.cancel()
            report = await slow.released()
        assert report.stage is Stage.IN_BAND
        assert report.timeline.release_s is not None
        assert report.timeline.release_s < SOON_S
        assert report.usage.computed_tokens == 0
        # The thread hangs on, and its place is free.
        await next_is_exact(supervisor)
        assert await take_side_by_side(streams, 40) == [words(40, 41)] * 3


def test_who_is_still_being_prepared_keeps_nobody_out_of_a_slot(tmp_path: Path) -> None:
    with raw_worker() as worker:
        worker.load({"slots": 1, "text": "so it goes", "faults": [hangs(tmp_path / "began", 0.5)]})
        worker.send(submit(1, "slow"), submit(2, "quick"))
        assert worker.answer(2)[0] == worker.answer(1)[0] == "so it goes"
        worker.shut_down()


@pytest.mark.parametrize("seconds", [0.2, None], ids=["that ends", "for ever"])
async def test_closing_while_something_is_prepared(tmp_path: Path, seconds: float | None) -> None:
    file = tmp_path / "began"
    options = {"slots": 2, "pace_s": 0.001, "faults": [hangs(file, seconds)]}
    graces = StopGraces(exit_s=20)
    async with (
        scripted(options, escalation=PATIENT, graces=graces) as (supervisor, told),
        AsyncExitStack() as stack,
    ):
        (neighbour,) = await opened(stack, supervisor, 1, **ENDLESS)
        slow = await stack.enter_async_context(supervisor.stream("slow", **ENDLESS))
        await until(file.exists)
        await supervisor.stop()
        assert [slow.end_reason, neighbour.end_reason] == [EndReason.SHUTTING_DOWN] * 2
        assert slow.report.is_released
        assert neighbour.report.is_released
    (exited,) = told.of(WorkerExited)
    assert (exited.cause, exited.status) == (DeathCause.STOPPED, "exit code 0"), "no signal was needed"


def test_shutting_a_worker_down_that_prepares_tells_the_end_and_the_release_before_it_goes(
    tmp_path: Path,
) -> None:
    file = tmp_path / "began"
    with raw_worker() as worker:
        worker.load({"slots": 2, "faults": [hangs(file)]})
        worker.send(submit(1, credit=1), submit(2, "slow"))
        worker.expect(Started, 1)
        worker.tokens(1, 1)
        worker.wait_for_output(lambda output: "hang at prepare" in output)
        worker.shut_down()
        for attempt_id in (2, 1):
            assert worker.expect(Ended, attempt_id).why == "cancelled"
            worker.expect(Released, attempt_id)


def test_a_draining_worker_answers_what_is_being_prepared(tmp_path: Path) -> None:
    with raw_worker() as worker:
        worker.load({"slots": 2, "text": "so it goes", "faults": [hangs(tmp_path / "began", 0.2)]})
        worker.send(submit(1, "slow"), Drain())
        assert worker.answer(1)[0] == "so it goes"
        worker.shut_down()


async def test_one_that_hangs_while_it_is_prepared_meets_its_deadline_and_no_other_does(
    tmp_path: Path,
) -> None:
    options = {"slots": 2, "pace_s": 0.001, "faults": [hangs(tmp_path / "began")]}
    async with scripted(options, escalation=PATIENT) as (supervisor, told), AsyncExitStack() as stack:
        (neighbour,) = await opened(stack, supervisor, 1, **ENDLESS)
        with pytest.raises(DeadlineExceeded):
            await supervisor.generate("slow", deadlines=Deadlines(first_token_s=0.3))
        assert await take(neighbour, 40) == words(40, 1)
        assert told.of(WorkerExited) == []


# --- a worker dies with four of them -------------------------------------------------------------------


async def four_drawn(supervisor: Supervisor) -> list[str]:
    """Return what four streams say that nothing happens to."""
    return [(await supervisor.generate(f"p{n}", seed=n, **DRAWN)).text for n in range(4)]


async def killed_under_four(
    supervisor: Supervisor, number: int, look: Callable[[], None] = lambda: None
) -> tuple[list[str], list[Stream]]:
    """Send the signal to the worker when four streams have begun; return their texts. look: after each chunk."""
    texts = [""] * 4
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(supervisor.stream(f"p{n}", seed=n, **DRAWN)) for n in range(4)
        ]
        begun = await take_side_by_side(streams, 5)
        pids = {stream.report.worker_pid for stream in streams}
        assert len(pids) == 1
        os.kill(pids.pop() or 0, number)

        async def read(n: int) -> None:
            texts[n] = begun[n]
            async for chunk in streams[n]:
                texts[n] += chunk.text
                look()

        async with anyio.create_task_group() as tasks:
            for n in range(4):
                tasks.start_soon(read, n)
    return texts, streams


async def test_four_streams_outlive_a_kill_from_outside_side_by_side() -> None:
    options = {"slots": 4, "mode": "random", "pace_s": 0.001}
    async with scripted(options, on_crash="resume") as (supervisor, told):
        expected = await four_drawn(supervisor)
        texts, streams = await killed_under_four(supervisor, signal.SIGKILL)
        assert texts == expected
        assert len(set(texts)) == 4
        for stream in streams:
            (resume,) = stream.report.resumes
            assert resume.cause is DeathCause.CRASHED
            assert stream.report.usage.completion_tokens == TOKENS
        (exited,) = told.of(WorkerExited)
        assert len(exited.requests) == 4
        assert len({stream.report.worker_pid for stream in streams}) == 1, "nobody is accused of it"


async def test_four_streams_outlive_a_crash_one_by_one() -> None:
    options = {"slots": 4, "mode": "random", "pace_s": 0.001}
    async with scripted(options, on_crash="resume") as (supervisor, told):
        expected = await four_drawn(supervisor)
        crowds: list[tuple[int, int]] = []

        def look() -> None:
            for worker in dispatcher_of(supervisor).pool.workers:
                if worker.is_ready and told.of(WorkerExited):
                    suspects = [a for a in worker.attempts.values() if a.request.suspicion.is_suspect]
                    crowds.append((len(suspects), len(worker.attempts)))

        texts, streams = await killed_under_four(supervisor, signal.SIGSEGV, look)
        assert texts == expected
        assert [len(stream.report.resumes) for stream in streams] == [1] * 4
        assert len(told.of(WorkerExited)[0].requests) == 4
        assert len(told.of(RequestResumed)) == 4
        alone = [held for suspects, held in crowds if suspects]
        assert alone, "nobody was looked at as a suspect"
        assert set(alone) == {1}, "a suspect had company"


# --- a reader that stops -------------------------------------------------------------------------------


async def test_a_stalled_reader_pauses_one_of_four_and_costs_the_others_nothing() -> None:
    async with scripted({"slots": 4}, escalation=PATIENT) as (supervisor, _), AsyncExitStack() as stack:
        stalled, *others = await opened(stack, supervisor, 4, max_tokens=400, window=4)
        attempt = dispatcher_of(supervisor).attempts[request_of(stalled).id]
        await until(lambda: attempt.state.phase is AttemptPhase.PAUSED)
        received = request_of(stalled).window.received
        assert await take_side_by_side(others, 399) == [words(399, 1)] * 3
        assert attempt.state.phase is AttemptPhase.PAUSED
        assert request_of(stalled).window.received == received <= 5
        for other in others:
            assert (await other.released()).usage.computed_tokens == 400
        assert await stalled.text() == words(399, 1)
        assert (await stalled.released()).usage.computed_tokens == 400, "none of it was computed twice"


async def test_a_paused_stream_is_in_no_step() -> None:
    async with scripted({"slots": 4, "pace_s": 0.005}) as (supervisor, _), AsyncExitStack() as stack:
        *paused, running = await opened(stack, supervisor, 4, max_tokens=300, window=2)
        for stream in paused:
            await until_buffered(stream, 2)
        assert await running.text() == words(299, 1)
        for stream in paused:
            stream.cancel()
            assert (await stream.released()).usage.computed_tokens == 3


# --- a storm of cancels --------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [True, False], ids=["steps that can be cut", "steps that can't"])
async def test_a_storm_of_cancels_of_a_fifth_changes_no_token_of_four(cut: bool) -> None:
    options = {
        "slots": 5, "pace_s": 0.001, "open_s": 0.001, "prefill_tokens_per_s": 4000, "slice_s": 0.002,
        "abort": "node" if cut else "none",
    }  # fmt: skip
    long = "word " * 40
    stages: list[Stage | None] = []
    async with scripted(options, escalation=PATIENT) as (supervisor, told), AsyncExitStack() as stack:
        streams = await opened(stack, supervisor, 4, max_tokens=500, window=16)
        texts: list[list[str]] = [[], [], [], []]

        async def storm() -> None:
            for number in range(60):
                async with supervisor.stream(long, max_tokens=50, window=4) as fifth:
                    await moment(number % 5, fifth)
                    fifth.cancel()
                    report = await fifth.released()
                    assert report.end_reason is EndReason.CANCELLED
                    stages.append(report.stage)

        async def moment(which: int, fifth: Stream) -> None:
            """Come to the moment of the cancel: submitted, being prepared, reading, decoding, or paused."""
            if which == 1:
                await anyio.lowlevel.checkpoint()
            elif which == 2:
                await until(lambda: fifth.report.timeline.started_ns is not None)
            elif which == 3:
                await take(fifth, 3)
            elif which == 4:
                await until_buffered(fifth, 4)

        async with anyio.create_task_group() as tasks:
            for stream, text in zip(streams, texts, strict=True):
                tasks.start_soon(read_into, stream, text)
            tasks.start_soon(storm)
        assert ["".join(text) for text in texts] == [words(499, 1)] * 4
        assert stages == [Stage.IN_BAND] * 60
        for stream in streams:
            assert (await stream.released()).usage.computed_tokens == 500
        assert told.of(WorkerExited) == []
        await until(lambda: holds_nothing(supervisor))
        await next_is_exact(supervisor)


async def test_what_takes_long_to_prepare_is_no_hang() -> None:
    # The steps are measured by then, so that a step may take 0.3 s, and the loop stands still for longer.
    liveness = Liveness(hang_after_s=0.3, step_factor=1, unmeasured_s=30, dump_s=0.1)
    async with scripted({"open_s": 1.0}, liveness=liveness, on_crash="resume") as (supervisor, _):
        for _ in range(2):
            answer = await supervisor.generate("x", max_tokens=3)
            assert answer.text == words(3)
            assert not answer.report.resumes
