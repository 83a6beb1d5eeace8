"""A natural end that was written just before the worker died counts: whole text, reason stop, released, next."""

from __future__ import annotations

import fcntl
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infervisor import EndReason, RestartPolicy, Supervisor
from infervisor.protocol.machines.process import DeathCause
from infervisor.supervisor.events import RequestReleased, WorkerExited
from infervisor.supervisor.process import FRAMES_PIPE_BYTES
from infervisor.supervisor.report import Report
from tests.helpers.inside import holds_nothing, worker_of
from tests.helpers.leaks import no_leftovers
from tests.helpers.lying_worker import lying
from tests.helpers.supervised import Told, scripted
from tests.helpers.waiting import wait_collectable

pytestmark = pytest.mark.anyio

DEATHS = 25
"""Of each kind of worker and on each back end: 100 in all."""
AT_ONCE = RestartPolicy(max_restarts=10_000, max_failed_starts=10_000, backoff_initial_s=0, backoff_max_s=0)
TEXT = "to be, or not to be"
WAYS: tuple[dict[str, Any], ...] = (
    {"kind": "signal", "number": int(signal.SIGKILL)},
    {"kind": "exit", "code": 7},
    {"kind": "segfault"},
)

SPEAKS_AND_DIES = """
import ctypes, os, random, signal, time
luck = random.Random(os.getpid())
ready()
id, prompt = hear("submit")[:2]
say("started", now(), id, 0, 0, 1)
say("tokens", now(), id, 0, [[1, "to be, ", None], [2, "or ", None]])
usage = {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 2, "computed_tokens": 3}
say("ended", now(), id, "stop", "not to be", usage, None)
if "and says so" in prompt:
    say("released", now(), id, None, now())
until = time.monotonic() + luck.choice((0, luck.uniform(0, 0.0005), luck.uniform(0, 0.005)))
while time.monotonic() < until:
    pass
luck.choice((
    lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: os._exit(7), lambda: ctypes.string_at(0),
))()
"""
"""The delays begin at nothing: the death is seen before, with and after the last words."""


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """Check children, descriptors and threads around each test."""
    with no_leftovers():
        yield


def check_whole(report: Report) -> None:
    """It ended by itself and is free; nobody cancelled it, nothing failed."""
    assert report.end_reason is EndReason.STOP
    assert report.error is None
    assert report.stage is None
    assert report.is_released


def check_collected(report: Report, exited: WorkerExited, *, held: bool) -> None:
    """This worker died, and released the request by that if the request was still in it."""
    assert exited.pid == report.worker_pid
    assert exited.cause is DeathCause.CRASHED
    assert exited.requests == ((report.request_id,) if held else ())
    if held:
        assert report.timeline.ended_ns is not None
        assert report.timeline.released_ns is not None
        assert report.timeline.ended_ns <= report.timeline.released_ns


def block_until_dead(supervisor: Supervisor) -> None:
    """Keep this loop busy until the worker is dead: it then sees the last words and the death at once."""
    wait_collectable(worker_of(supervisor).pid)


async def test_a_worker_that_dies_between_the_end_and_the_release_has_finished_its_answer() -> None:
    # The real worker: `ended` is in the pipe when the engine is asked to release, and there it dies.
    luck = random.Random(5)
    faults: list[dict[str, Any]] = []
    for number in range(DEATHS):
        only = {"at": "release", "prompt_contains": f"<{number}>"}
        seconds = luck.choice((0.0, luck.uniform(0, 0.0005), luck.uniform(0, 0.005)))
        if seconds:
            faults.append({**only, "kind": "hang", "seconds": seconds})
        faults.append({**only, **WAYS[number % len(WAYS)]})
    async with scripted({"text": TEXT, "faults": faults}, restart=AT_ONCE) as (supervisor, told):
        for number in range(DEATHS):
            await supervisor.wait_ready()
            async with supervisor.stream(f"<{number}>", window=luck.choice((1, 2, 32))) as stream:
                if stream.report.window == 32 and luck.random() < 0.7:
                    block_until_dead(supervisor)
                assert await stream.text() == TEXT
                report = await stream.released()
            check_whole(report)
            exited = await told.wait_for(WorkerExited, count=number + 1)
            check_collected(report, exited, held=True)
        assert len({event.pid for event in told.of(WorkerExited)}) == DEATHS
        after = await supervisor.generate("no death")
        assert after.text == TEXT
        assert len(told.of(WorkerExited)) == DEATHS
        released = [event.report.request_id for event in told.of(RequestReleased)]
        assert len(released) == len(set(released)) == DEATHS + 1
        assert holds_nothing(supervisor)


async def test_last_words_count_however_soon_the_death_comes_after_them(tmp_path: Path) -> None:
    told, luck = Told(), random.Random(6)
    async with Supervisor(
        engine="lies", python=lying(tmp_path, SPEAKS_AND_DIES), restart=AT_ONCE, on_event=told
    ) as supervisor:
        for number in range(DEATHS):
            says_so = number % 2 == 0
            await supervisor.wait_ready()
            async with supervisor.stream("speak, and says so" if says_so else "speak") as stream:
                if luck.random() < 0.5:
                    block_until_dead(supervisor)
                assert await stream.text() == TEXT
                report = await stream.released()
            check_whole(report)
            exited = await told.wait_for(WorkerExited, count=number + 1)
            check_collected(report, exited, held=not says_so)
        released = [event.report.request_id for event in told.of(RequestReleased)]
        assert len(released) == len(set(released)) == DEATHS


def holds_all(supervisor: Supervisor) -> bool:
    """Whether the frames pipe is as large as it is asked to be; the system may refuse that to one who has many."""
    fd = worker_of(supervisor).process.frames
    return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) >= FRAMES_PIPE_BYTES


async def test_thousands_of_last_words_count_when_the_death_is_seen_with_them() -> None:
    # Far more frames than one turn of the loop applies: what it leaves is read when the worker is collected.
    tokens = 20_000
    options = {"tokens": ["x"] * tokens, "faults": [{"at": "release", "kind": "exit", "code": 7}]}
    async with scripted(options, restart=AT_ONCE) as (supervisor, told):
        for number in range(4):
            await supervisor.wait_ready()
            async with supervisor.stream("a", window=tokens + 5) as stream:
                if number % 2 and holds_all(supervisor):
                    block_until_dead(supervisor)
                assert await stream.text() == "x" * tokens
                report = await stream.released()
            check_whole(report)
            await told.wait_for(WorkerExited, count=number + 1)
