"""Several workers: who serves, who stands by, and how they are replaced without a lost token."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from infervisor import EndReason, MemoryLimits, RestartPolicy, Supervisor, WorkerDied
from infervisor.protocol.errors import ConfigurationError
from infervisor.protocol.machines.process import DeathCause
from infervisor.supervisor import memory, pool
from infervisor.supervisor.events import (
    MemoryLimitReached,
    RequestResumed,
    WorkerBecameReady,
    WorkerExited,
    WorkerPromoted,
    WorkerReleased,
    WorkerSpawned,
)
from tests.helpers.inside import dispatcher_of
from tests.helpers.supervised import Told, scripted
from tests.helpers.waiting import is_gone, until

pytestmark = pytest.mark.anyio


def words(count: int) -> str:
    """Return what the scripted engine says."""
    return "".join(f"w{number} " for number in range(count))


def roles(supervisor: Supervisor) -> dict[str, list[int]]:
    """Return the pids of workers by what they are for."""
    found: dict[str, list[int]] = {}
    for worker in supervisor.status().workers:
        found.setdefault(worker.role, []).append(worker.pid)
    return found


async def all_ready(supervisor: Supervisor, told: Told, count: int) -> None:
    """Return once so many workers have become ready."""
    await told.wait_for(WorkerBecameReady, count=count)
    assert len(supervisor.status().workers) == count


async def test_a_standby_loads_after_the_first_and_takes_over_at_once() -> None:
    async with scripted({"pace_s": 0.005}, on_crash="resume", standby=1) as (supervisor, told):
        # The first one loads alone.
        assert [type(e) for e in told.events if isinstance(e, (WorkerSpawned, WorkerBecameReady))][:2] == [
            WorkerSpawned,
            WorkerBecameReady,
        ]
        await all_ready(supervisor, told, 2)
        (serving,), (spare,) = roles(supervisor)["serving"], roles(supervisor)["standby"]
        async with supervisor.stream("hello", max_tokens=40, window=4) as stream:
            text = (await anext(stream)).text
            assert stream.report.worker_pid == serving
            os.kill(serving, signal.SIGKILL)
            text += await stream.text()
        assert text == words(40)
        assert stream.report.worker_pid == spare
        assert [event.pid for event in told.of(WorkerPromoted)] == [spare]
        await all_ready_again(supervisor, told)
        assert roles(supervisor)["serving"] == [spare]


async def all_ready_again(supervisor: Supervisor, told: Told) -> None:
    """Return once a third worker stands by."""
    await told.wait_for(WorkerBecameReady, count=3)
    assert len(roles(supervisor)["standby"]) == 1


async def test_an_idle_standby_that_dies_is_nobodys_trouble() -> None:
    async with scripted({"pace_s": 0.005}, on_crash="fail", standby=1) as (supervisor, told):
        await all_ready(supervisor, told, 2)
        (serving,), (spare,) = roles(supervisor)["serving"], roles(supervisor)["standby"]
        async with supervisor.stream("hello", max_tokens=40) as stream:
            os.kill(spare, signal.SIGKILL)
            assert await stream.text() == words(40)
        assert stream.report.worker_pid == serving
        await told.wait_for(WorkerBecameReady, count=3)


async def test_workers_share_the_requests() -> None:
    async with scripted({"pace_s": 0.01}, workers=2) as (supervisor, told):
        await all_ready(supervisor, told, 2)
        pids: list[int | None] = []

        async def ask() -> None:
            answer = await supervisor.generate("hello", max_tokens=20)
            assert answer.text == words(20)
            pids.append(answer.report.worker_pid)

        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(ask)
        assert set(pids) == set(roles(supervisor)["serving"])
        assert len(set(pids)) == 2


async def test_when_one_of_two_dies_its_request_goes_on_in_the_other() -> None:
    restart = RestartPolicy(backoff_initial_s=600, backoff_max_s=600, period_s=3600)
    options = {"pace_s": 0.005, "slots": 2}
    async with scripted(options, on_crash="resume", workers=2, restart=restart) as (supervisor, told):
        await all_ready(supervisor, told, 2)
        async with (
            supervisor.stream("hello", max_tokens=60, window=4) as one,
            supervisor.stream("hello", max_tokens=60, window=4) as two,
        ):
            await anext(one), await anext(two)
            assert one.report.worker_pid != two.report.worker_pid
            os.kill(one.report.worker_pid or 0, signal.SIGKILL)
            assert await one.text() == words(60)[3:]
            assert await two.text() == words(60)[3:]
            assert one.report.worker_pid == two.report.worker_pid


@pytest.mark.parametrize("standby", [0, 1])
async def test_recycling_replaces_all_without_a_gap_or_a_lost_token(standby: int) -> None:
    async with scripted({"pace_s": 0.005}, on_crash="fail", standby=standby) as (supervisor, told):
        await all_ready(supervisor, told, 1 + standby)
        old = {worker.pid for worker in supervisor.status().workers}
        answers: list[str] = []
        done = anyio.Event()

        async def keep_asking() -> None:
            while not done.is_set():
                answers.append((await supervisor.generate("hello", max_tokens=20)).text)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep_asking)
            async with supervisor.stream("hello", max_tokens=100, window=8) as stream:
                await anext(stream)
                async with anyio.create_task_group() as recycling:
                    recycling.start_soon(supervisor.recycle)
                    assert await stream.text() == words(100)[3:]
            assert stream.report.resumes == ()
            done.set()
        assert set(answers) <= {words(20)}
        now = {worker.pid for worker in supervisor.status().workers}
        assert not now & old
        assert len(now) >= 1
        assert all(is_gone(pid) for pid in old)
        assert supervisor.status().restarts == ({"recycled": 2} if standby else {})
        assert [event.cause for event in told.of(WorkerExited)] == [DeathCause.RECYCLED] * (1 + standby)
        # A place more was there for a while, if nobody stood by, and no longer.
        assert len(dispatcher_of(supervisor).pool.slots) == 1 + standby


async def test_what_takes_longer_than_the_grace_goes_on_in_the_next_one() -> None:
    async with scripted({"pace_s": 0.005}, on_crash="resume") as (supervisor, told):
        async with supervisor.stream("hello", max_tokens=400, window=4) as stream:
            await anext(stream)

            async def read() -> None:
                assert await stream.text() == words(400)[3:]

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read)
                await supervisor.recycle(grace_s=0.1)
        (resume,) = stream.report.resumes
        assert resume.cause is DeathCause.RECYCLED
        (exited,) = told.of(WorkerExited)
        assert exited.cause is DeathCause.RECYCLED
        await told.wait_for(RequestResumed)


async def test_after_so_many_requests_a_worker_is_replaced() -> None:
    async with scripted(max_requests=3) as (supervisor, told):
        pids = []
        for _ in range(8):
            answer = await supervisor.generate("hello", max_tokens=2)
            pids.append(answer.report.worker_pid)
        await told.wait_for(WorkerExited, lambda event: event.cause is DeathCause.RECYCLED)
        first = pids[0]
        # Until its successor is ready the old one goes on serving.
        assert pids.count(first) >= 3
        await until(lambda: is_gone(first or 0))
        assert (await supervisor.generate("hello", max_tokens=2)).report.worker_pid != first


async def test_a_successor_that_cannot_be_had_leaves_the_old_worker_in_place(tmp_path: Path) -> None:
    # An interpreter that starts a worker only once.
    flag = tmp_path / "flag"
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\n[ -e {flag} ] && exit 1\ntouch {flag}\nexec {sys.executable} "$@"\n')
    interpreter.chmod(0o700)
    restart = RestartPolicy(max_failed_starts=0, cooldown_s=600)
    async with scripted(python=interpreter, restart=restart) as (supervisor, _):
        (pid,) = roles(supervisor)["serving"]
        with pytest.raises(WorkerDied, match="exit code 1"):
            await supervisor.recycle()
        assert roles(supervisor) == {"serving": [pid]}
        assert (await supervisor.generate("hello", max_tokens=2)).report.worker_pid == pid
        assert len(dispatcher_of(supervisor).pool.slots) == 1


async def test_each_worker_that_is_gone_tells_what_came_back_of_it() -> None:
    async with scripted(workers=2, standby=1) as (supervisor, told):
        await all_ready(supervisor, told, 3)
        # What status() shows is the latest look; the exact ones are rare, and not all in the same second.
        await until(lambda: all(w.process.last_full for w in dispatcher_of(supervisor).pool.workers))
        pids = {worker.pid for worker in supervisor.status().workers}
    releases = {event.pid: event.release for event in told.of(WorkerReleased)}
    assert set(releases) == pids
    for release in releases.values():
        assert release.is_complete
        assert release.pss_bytes is not None
        assert release.uss_bytes is not None
        assert release.pss_bytes >= release.uss_bytes > 1_000_000
        assert 0 <= release.seconds < 20


async def test_closing_while_workers_are_replaced_leaves_nothing() -> None:
    async with scripted({"load_s": 0.5}, workers=2, standby=1) as (supervisor, told):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.recycle)
            await told.wait_for(WorkerSpawned, count=4)
            await supervisor.stop()
    spawned = {event.pid for event in told.of(WorkerSpawned)}
    assert spawned == {event.pid for event in told.of(WorkerExited)}


async def test_a_stream_ends_once_however_many_workers_come_and_go() -> None:
    restart = RestartPolicy(max_restarts=1000, backoff_initial_s=0.01, backoff_max_s=0.02)
    async with scripted(
        {"pace_s": 0.002, "slots": 2},
        on_crash="resume",
        max_resumes=1000,
        workers=2,
        standby=1,
        restart=restart,
    ) as (supervisor, _):
        texts: list[tuple[str, EndReason | None]] = []

        async def ask() -> None:
            answer = await supervisor.generate("hello", max_tokens=150, window=8)
            texts.append((answer.text, answer.report.end_reason))

        async with anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(ask)
            for round_ in range(12):
                await anyio.sleep(0.05)
                serving = roles(supervisor).get("serving", [])
                if serving:
                    os.kill(serving[round_ % len(serving)], signal.SIGKILL)
        assert texts == [(words(150), EndReason.LENGTH)] * 6


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"workers": 0}, "workers"), ({"standby": -1}, "standby"), ({"max_requests": 0}, "max_requests")],
)
async def test_impossible_numbers_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{named} must be a whole number"):
        Supervisor(engine="scripted", **settings)


async def test_a_worker_that_outgrows_the_soft_limit_is_replaced_without_a_lost_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Replaced at once, where otherwise each worker has half a minute.
    monkeypatch.setattr(memory, "SETTLE_NS", 0)
    leak = {
        "at": "decode",
        "kind": "leak",
        "after": 2,
        "bytes": 80_000_000,
        "once_file": str(tmp_path / "once"),
    }
    limits = MemoryLimits(soft_bytes=64 << 20)
    options = {"pace_s": 0.01, "faults": [leak]}
    async with scripted(options, on_crash="fail", memory=limits) as (supervisor, told):
        first = supervisor.status().worker_pid
        # What it takes when it is fresh has been seen.
        await until(lambda: any(w.sample and w.sample.pss_bytes for w in supervisor.status().workers))
        async with supervisor.stream("hello", max_tokens=400, window=8) as stream:
            text = (await anext(stream)).text
            text += await stream.text()
        assert text == words(400)
        assert stream.report.resumes == ()
        reached = await told.wait_for(MemoryLimitReached)
        assert (reached.pid, reached.used_bytes > limits.soft_bytes) == (first, True)
        assert "soft_bytes" in reached.message
        exited = await told.wait_for(WorkerExited)
        assert (exited.pid, exited.cause) == (first, DeathCause.RECYCLED)
        await supervisor.wait_ready()
        assert supervisor.status().worker_pid != first


async def test_a_replacement_waits_for_those_who_go_on_elsewhere() -> None:
    restart = RestartPolicy(backoff_initial_s=0, backoff_max_s=0)
    # Without a snapshot the prompt is read again, which takes a while.
    options = {"pace_s": 0.005, "prefill_s": 0.6}
    async with scripted(options, on_crash="resume", standby=1, restart=restart, snapshots=None) as (
        supervisor,
        told,
    ):
        await all_ready(supervisor, told, 2)
        async with supervisor.stream("a b c", max_tokens=40, window=4) as stream:
            await anext(stream)
            os.kill(stream.report.worker_pid or 0, signal.SIGKILL)
            await stream.text()
        await told.wait_for(WorkerSpawned, count=3)
    order = [type(event) for event in told.events if isinstance(event, (RequestResumed, WorkerSpawned))]
    assert order == [WorkerSpawned, WorkerSpawned, RequestResumed, WorkerSpawned]


async def test_a_replacement_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "HOLD_NS", 100_000_000)
    options = {"pace_s": 0.005, "prefill_s": 600}
    restart = RestartPolicy(backoff_initial_s=0, backoff_max_s=0)
    async with scripted(options, on_crash="resume", standby=1, restart=restart) as (supervisor, told):
        await all_ready(supervisor, told, 2)
        async with supervisor.stream("a b c", window=4) as stream:
            await until(lambda: stream.report.timeline.started_ns)
            os.kill(stream.report.worker_pid or 0, signal.SIGKILL)
            await told.wait_for(WorkerSpawned, count=3)
            assert told.of(RequestResumed) == []
