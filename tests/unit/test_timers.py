"""Alarms: they ring when due, in order, once; a late wake-up is told first."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from infervisor.protocol.timeline import NS_PER_S
from infervisor.supervisor.timers import STALL_NS, Timers

pytestmark = pytest.mark.anyio

MS = 1_000_000


class Rung:
    """What rang, in order, with a way to wait for it."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._news = anyio.Event()

    def note(self, name: str) -> Callable[[], None]:
        def ring() -> None:
            self.names.append(name)
            self._news.set()

        return ring

    async def wait(self, count: int) -> list[str]:
        with anyio.fail_after(20):
            while len(self.names) < count:
                self._news = anyio.Event()
                await self._news.wait()
        return self.names


@asynccontextmanager
async def running(
    on_stall: Callable[[int], None] = lambda late_ns: None,
) -> AsyncIterator[tuple[Timers, Rung]]:
    timers = Timers(on_stall)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(timers.run)
        yield timers, Rung()
        tasks.cancel_scope.cancel()


async def test_alarms_ring_in_the_order_of_their_times_and_once() -> None:
    async with running() as (timers, rung):
        now = time.monotonic_ns()
        for name, ms in (("c", 60), ("a", 20), ("b", 40), ("z", 80)):
            timers.alarm(rung.note(name)).aim(now + ms * MS)
        assert await rung.wait(4) == ["a", "b", "c", "z"]
        assert time.monotonic_ns() - now >= 80 * MS


async def test_an_alarm_that_is_aimed_again_rings_at_the_last_time_only() -> None:
    async with running() as (timers, rung):
        now = time.monotonic_ns()
        moved, dropped, earlier = (timers.alarm(rung.note(name)) for name in ("moved", "dropped", "earlier"))
        moved.aim(now + 20 * MS)
        moved.aim(now + 120 * MS)
        dropped.aim(now + 20 * MS)
        dropped.aim(None)
        earlier.aim(now + 300 * NS_PER_S)
        earlier.aim(now + 60 * MS)
        timers.alarm(rung.note("last")).aim(now + 200 * MS)
        assert await rung.wait(3) == ["earlier", "moved", "last"]


async def test_an_alarm_may_aim_itself_anew_and_be_retired() -> None:
    async with running() as (timers, rung):

        def again() -> None:
            rung.note("tick")()
            if len(rung.names) == 3:
                alarm.retire()
            alarm.aim(time.monotonic_ns() + 5 * MS)

        alarm = timers.alarm(again)
        alarm.aim(time.monotonic_ns())
        await rung.wait(3)
        timers.alarm(rung.note("end")).aim(time.monotonic_ns() + 50 * MS)
        assert await rung.wait(4) == ["tick"] * 3 + ["end"]


async def test_an_alarm_aimed_earlier_while_the_task_sleeps_rings_in_time() -> None:
    async with running() as (timers, rung):
        timers.alarm(rung.note("far")).aim(time.monotonic_ns() + 3600 * NS_PER_S)
        await anyio.wait_all_tasks_blocked()
        timers.alarm(rung.note("near")).aim(time.monotonic_ns() + 10 * MS)
        assert await rung.wait(1) == ["near"]


async def test_a_stall_of_the_parent_is_told_before_anything_rings() -> None:
    seen: list[str] = []
    lateness: list[int] = []

    def on_stall(late_ns: int) -> None:
        lateness.append(late_ns)
        seen.append("stall")
        forgiven.aim(time.monotonic_ns() + 20 * MS)

    def ring_forgiven() -> None:
        seen.append("forgiven")
        rang.set()

    rang = anyio.Event()
    async with running(on_stall) as (timers, _):
        now = time.monotonic_ns()
        forgiven = timers.alarm(ring_forgiven)
        forgiven.aim(now + 20 * MS)
        timers.alarm(lambda: seen.append("other")).aim(now + 30 * MS)
        await anyio.wait_all_tasks_blocked()
        time.sleep(0.4)  # noqa: ASYNC251 - the stall that is meant
        with anyio.fail_after(20):
            await rang.wait()
    assert seen == ["stall", "other", "forgiven"]
    assert lateness[0] > STALL_NS


async def test_a_stall_is_told_of_an_alarm_too_that_was_aimed_just_before_it() -> None:
    seen: list[str] = []
    rang = anyio.Event()
    async with running(lambda late_ns: seen.append("stall")) as (timers, rung):
        timers.alarm(rung.note("far")).aim(time.monotonic_ns() + 3600 * NS_PER_S)
        await anyio.wait_all_tasks_blocked()
        timers.alarm(rang.set).aim(time.monotonic_ns() + 20 * MS)
        time.sleep(0.4)  # noqa: ASYNC251 - the stall that is meant
        with anyio.fail_after(20):
            await rang.wait()
    assert seen == ["stall"]


async def test_being_on_time_is_no_stall() -> None:
    stalls: list[int] = []
    async with running(stalls.append) as (timers, rung):
        timers.alarm(rung.note("a")).aim(time.monotonic_ns() + 30 * MS)
        await rung.wait(1)
    # A busy machine may itself be late; then at least so much.
    assert all(late_ns > STALL_NS for late_ns in stalls)


async def test_entries_of_retired_alarms_dont_pile_up_and_the_others_still_ring() -> None:
    async with running() as (timers, rung):
        far_ns = time.monotonic_ns() + 3600 * NS_PER_S
        idle = timers.alarm(rung.note("idle"))
        idle.aim(far_ns)
        idle.aim(None)
        for _ in range(5000):
            alarm = timers.alarm(rung.note("never"))
            alarm.aim(far_ns)
            alarm.retire()
        assert len(timers._heap) < 2500
        idle.aim(time.monotonic_ns() + MS)
        assert await rung.wait(1) == ["idle"]
