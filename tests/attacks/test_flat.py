"""Deaths, streams that are left and starts that are cut, by the hundred: nothing grows.

What is counted is what a leak would be made of: descriptors, threads, children (zombies are children), tasks,
objects of ours, resident memory.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import psutil
import pytest
import trio

from infervisor import EndReason, RestartPolicy, Stream, Supervisor, WorkerDied
from infervisor.supervisor.attempt import Attempt
from infervisor.supervisor.events import (
    BreakerOpened,
    RequestReleased,
    WorkerBecameReady,
    WorkerExited,
    WorkerSpawned,
)
from infervisor.supervisor.link import Link
from infervisor.supervisor.process import WorkerProcess
from infervisor.supervisor.request import Request
from infervisor.supervisor.timers import MIN_TIDY
from infervisor.supervisor.worker import Worker
from tests.helpers.inside import PATIENT, dispatcher_of, holds_nothing, until, words, worker_of
from tests.helpers.leaks import no_leftovers
from tests.helpers.models import LOOP, build_model
from tests.helpers.supervised import QUICK_GRACES, Told, scripted

pytestmark = pytest.mark.anyio

AT_ONCE = RestartPolicy(
    max_restarts=100_000, max_failed_starts=100_000, backoff_initial_s=0, backoff_max_s=0, jitter=0
)
OURS = (Attempt, Link, Request, Stream, Supervisor, Worker, WorkerProcess)
GROWTH_BYTES = 4 << 20
"""What resident memory may grow by between two looks: a hundredth of it would be a leak if it were for each round,
and it is more than what the allocator and the interpreter's caches do by themselves."""


@pytest.fixture(autouse=True)
def leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check children, descriptors and threads around each test, in a process that is as if it were small.

    With all tests loaded it has hundreds of megabytes. A worker that was just forked looks as large, so that a
    thread looks at it and stays; and garbage of ours waits until that is a quarter of the rest.
    """
    monkeypatch.setattr("infervisor.supervisor.resources.IN_LOOP_BYTES", 1 << 40)
    gc.collect()
    gc.freeze()
    try:
        with no_leftovers():
            yield
    finally:
        gc.unfreeze()


def holdings() -> Counter[str]:
    """Return what this process holds: descriptors, threads, children, tasks, and objects of ours by class."""
    gc.collect()
    process = psutil.Process()
    held = Counter(type(found).__name__ for found in gc.get_objects() if isinstance(found, OURS))
    held["descriptors"] = process.num_fds()
    held["threads"] = process.num_threads()
    held["children"] = len(process.children(recursive=True))
    held["tasks"] = _tasks()
    return held


def _tasks() -> int:
    if "trio" in sys.modules and trio.lowlevel.in_trio_run():
        return trio.lowlevel.current_statistics().tasks_living
    return len(asyncio.all_tasks())


def rss_bytes() -> int:
    """Return the resident memory of this process."""
    return psutil.Process().memory_info().rss


async def has_not_grown(before: Counter[str]) -> None:
    """Wait until nothing more is held than that. Fails with the difference."""
    with suppress(TimeoutError):
        await until(lambda: not holdings() - before, within_s=5)
    assert not holdings() - before


# --- deaths --------------------------------------------------------------------------------------------


async def die(supervisor: Supervisor, told: Told, moment: int, expected: str) -> None:
    """Kill the worker in one of four moments, see it replaced, and get an exact answer of the next one."""
    pid = worker_of(supervisor).pid
    became_ready = len(told.of(WorkerBecameReady))
    if moment == 0:
        os.kill(pid, signal.SIGKILL)
    elif moment == 1:
        async with supervisor.stream("c", window=2) as stream:
            await anext(stream)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(WorkerDied):
                await stream.text()
    elif moment == 2:
        async with supervisor.stream("c") as stream:
            await anext(stream)
            stream.kill()
    else:
        spawned = len(told.of(WorkerSpawned))
        supervisor.restart_worker()
        loads = await told.wait_for(WorkerSpawned, count=spawned + 1)
        os.kill(loads.pid, signal.SIGKILL)
    await told.wait_for(WorkerBecameReady, count=became_ready + 1)
    answer = await supervisor.generate("c", max_tokens=3)
    assert answer.text == expected
    assert answer.report.worker_pid != pid


async def die_often(
    supervisor: Supervisor, told: Told, times: int, expected: str, processes: int = 1
) -> None:
    """Let many workers die; what is held is the same after the first eight as after all of them.

    processes: how many each worker is, with those that it has started.
    """
    for number in range(8):
        await die(supervisor, told, number % 4, expected)
    before, before_bytes = holdings(), rss_bytes()
    assert (before["children"], before["Worker"]) == (processes, 1)
    orphans: list[psutil.Process] = []
    for number in range(8, times):
        orphans += psutil.Process(worker_of(supervisor).pid).children(recursive=True)
        await die(supervisor, told, number % 4, expected)
    await has_not_grown(before)
    # What a dead worker had started isn't ours any more, and wouldn't be counted.
    assert len(orphans) == (processes - 1) * (times - 8)
    await until(lambda: not any(orphan.is_running() for orphan in orphans))
    assert rss_bytes() - before_bytes < GROWTH_BYTES
    # A replacement that was killed while it loaded is a death of its own.
    assert len(told.of(WorkerExited)) == times + times // 4
    assert len(told.of(BreakerOpened)) == 0


async def test_a_hundred_deaths_leave_nothing(anyio_backend: str) -> None:
    times = 60 if anyio_backend == "asyncio" else 40
    async with scripted({"pace_s": 0.002}, restart=AT_ONCE) as (supervisor, told):
        await die_often(supervisor, told, times, words(3))


async def test_deaths_of_llama_workers_leave_nothing(tmp_path: Path) -> None:
    told = Told()
    model = build_model(tmp_path / "loop.gguf", LOOP)
    async with Supervisor(
        model, options={"threads": 1}, restart=AT_ONCE, on_event=told, on_crash="fail"
    ) as supervisor:
        # Beside the engine stands the process that tries grammars and renders templates.
        await die_often(supervisor, told, 12, "abc", processes=2)


# --- streams that are left -----------------------------------------------------------------------------


async def leave_early(supervisor: Supervisor, how: str, tokens: int) -> None:
    """Read some chunks of an endless answer and leave it."""
    if how == "dropped":
        stream = supervisor.stream("c", window=4)
        for _ in range(max(1, tokens)):
            await anext(stream)
    elif how == "never entered":
        supervisor.stream("c")
    elif how == "cut off":
        with anyio.CancelScope() as scope:
            async with supervisor.stream("c", window=4) as stream:
                async for chunk in stream:
                    if chunk.index >= tokens:
                        scope.cancel()
        assert scope.cancelled_caught
    elif how == "cut off while it waits":
        with anyio.move_on_after(tokens / 1000):
            async with supervisor.stream("c", window=4) as stream:
                await stream.released()
    elif how == "failed":
        with pytest.raises(KeyError):  # noqa: PT012 - it goes through the stream's end
            async with supervisor.stream("c", window=4) as stream:
                async for chunk in stream:
                    if chunk.index >= tokens:
                        raise KeyError("the host's own")
    else:
        async with supervisor.stream("c", window=4) as stream:
            async for chunk in stream:
                if chunk.index >= tokens:
                    if how == "broken off":
                        break
                    stream.cancel()


WAYS = ("dropped", "never entered", "cut off", "cut off while it waits", "failed", "broken off", "cancelled")


async def leave_often(supervisor: Supervisor, told: Told, times: int) -> int:
    """Leave many streams, four at a time, each in a way of its own; return how many had been entered."""
    choose = random.Random(5)

    async def reader(times: int) -> None:
        for _ in range(times):
            await leave_early(supervisor, choose.choice(WAYS), choose.randrange(12))

    async def leave(times: int) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(reader, times // 4)
        await until(lambda: holds_nothing(supervisor))

    await leave(80)
    there = psutil.Process(worker_of(supervisor).pid)
    before, before_bytes = holdings(), rss_bytes()
    before_there = (there.num_fds(), there.num_threads(), there.memory_info().rss)
    await leave(times)
    await has_not_grown(before)
    assert before["Request"] == before["Stream"] == before["Attempt"] == 0
    assert rss_bytes() - before_bytes < GROWTH_BYTES
    assert (there.num_fds(), there.num_threads()) == before_there[:2]
    assert there.memory_info().rss - before_there[2] < GROWTH_BYTES
    assert len(dispatcher_of(supervisor).timers._heap) < 2 * MIN_TIDY
    assert len(told.of(WorkerSpawned)) == 1
    reports = [event.report for event in told.of(RequestReleased)]
    assert {report.end_reason for report in reports} == {EndReason.CANCELLED}
    return len(reports)


async def test_a_thousand_streams_that_were_left_early_leave_nothing() -> None:
    async with scripted({"slots": 4}, escalation=PATIENT) as (supervisor, told):
        assert await leave_often(supervisor, told, 1200) >= 1000
        assert (await supervisor.generate("next", max_tokens=5)).text == words(5)


async def test_streams_of_llama_that_were_left_early_leave_nothing(tmp_path: Path) -> None:
    told = Told()
    model = build_model(tmp_path / "loop.gguf", LOOP, context_tokens=4096)
    options = {"threads": 1, "slots": 4}
    async with Supervisor(model, options=options, escalation=PATIENT, on_event=told) as supervisor:
        assert await leave_often(supervisor, told, 300) >= 250
        assert (await supervisor.generate("c", max_tokens=5)).text == "abcab"


# --- starts that are cut -------------------------------------------------------------------------------


def starting(number: int) -> Supervisor:
    """Return a supervisor whose worker is soon ready, or every other time never."""
    options = {"load_s": 60} if number % 2 else {}
    return Supervisor(engine="scripted", options=options, graces=QUICK_GRACES)


async def test_starts_that_are_cancelled_at_any_moment_leave_nothing() -> None:
    before: Counter[str] | None = None
    before_bytes = 0
    for number in range(-5, 51):
        with anyio.move_on_after(max(0, number) * 0.001):
            async with starting(number):
                pass
        assert psutil.Process().children() == []
        if number == 0:
            before, before_bytes = holdings(), rss_bytes()
    assert before is not None
    await has_not_grown(before)
    assert rss_bytes() - before_bytes < GROWTH_BYTES


def test_starts_that_are_cancelled_natively_at_any_moment_leave_nothing() -> None:
    async def guest(number: int) -> None:
        async with starting(number):
            await asyncio.sleep(60)

    async def main() -> None:
        before: Counter[str] | None = None
        for number in range(-2, 26):
            task = asyncio.create_task(guest(number))
            await asyncio.sleep(max(0, number) * 0.002)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, 20)
            assert psutil.Process().children() == []
            if number == 0:
                before = holdings()
        assert before is not None
        await has_not_grown(before)

    asyncio.run(main())
