"""`released` is the truth: seen from outside, the worker computes until that stamp and not after it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from infervisor import EndReason, Stage, Stream, Supervisor, default_model
from infervisor.supervisor.events import RequestReleased, WorkerSpawned
from tests.helpers.inside import PATIENT, cpu_s, until, worker_of
from tests.helpers.leaks import no_leftovers
from tests.helpers.supervised import QUICK_GRACES, QUICK_RESTART, Told

pytestmark = pytest.mark.anyio

NS_PER_S = 1_000_000_000
BURNT_S = 0.25
"""Processor time that each request must have cost before it is cancelled."""
QUIET_S = 0.3
"""How long it is watched after its release: at work it would burn as much, or twice that with two threads."""
TICKS_S = 0.03
"""psutil counts in hundredths, for user and system time each."""
LATE_S = 0.15
"""How much later than its step's end a stamp may be, on a busy machine."""
IDLE_S = 0.02
"""What pipes, a last beat and waiting threads may cost once nothing is computed, by the exact clock."""


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """Check children, descriptors and threads around each test."""
    with no_leftovers():
        yield


def exact_cpu_s(pid: int) -> float:
    """Return the processor time of all threads of a process, as the kernel counts it in nanoseconds."""
    # clock_getcpuclockid(3) makes the number of a process's clock so.
    return time.clock_gettime_ns(~pid << 3 | 2) / NS_PER_S


@asynccontextmanager
async def scripted_at_full_speed() -> AsyncIterator[tuple[Supervisor, Told]]:
    """Yield the scripted engine as it computes without a pause: one prompt token a slice, no pace."""
    told = Told()
    async with Supervisor(
        engine="scripted",
        options={"prefill_tokens_per_s": 1e6, "slice_s": 1e-6},
        escalation=PATIENT,
        restart=QUICK_RESTART,
        graces=QUICK_GRACES,
        on_event=told,
    ) as supervisor:
        yield supervisor, told


@asynccontextmanager
async def smollm() -> AsyncIterator[tuple[Supervisor, Told]]:
    """Yield the embedded default model on two threads."""
    told = Told()
    async with Supervisor(
        default_model(),
        options={"n_ctx": 4096, "threads": 2},
        escalation=PATIENT,
        restart=QUICK_RESTART,
        graces=QUICK_GRACES,
        on_event=told,
    ) as supervisor:
        yield supervisor, told


async def burns_until_released(supervisor: Supervisor, stream: Stream, threads: int) -> None:
    """Let it burn, cancel it, and hold what the worker burns from then on against the stamp of its release."""
    pid = worker_of(supervisor).pid
    before_s, before_ticks_s = exact_cpu_s(pid), cpu_s(pid)
    async with stream:
        await until(lambda: exact_cpu_s(pid) - before_s > BURNT_S)
        assert cpu_s(pid) - before_ticks_s > BURNT_S - TICKS_S, "the two clocks agree that it computes"
        assert stream.end_reason is None
        asked_s, asked_ticks_s = exact_cpu_s(pid), cpu_s(pid)
        stream.cancel()
        report = await stream.released()
        seen_s = exact_cpu_s(pid)
    with anyio.move_on_after(QUIET_S):
        await anyio.sleep_forever()
    after_s, after_ticks_s = exact_cpu_s(pid), cpu_s(pid)

    assert (report.end_reason, report.stage) == (EndReason.CANCELLED, Stage.IN_BAND)
    assert report.timeline.cancel_requested_ns is not None
    assert report.timeline.released_ns is not None
    # From the cancel to the stamp at most so many threads can have computed.
    allowed_s = threads * (report.timeline.released_ns - report.timeline.cancel_requested_ns) / NS_PER_S
    assert after_s - seen_s < IDLE_S
    assert after_s - asked_s < allowed_s + IDLE_S
    assert after_ticks_s - asked_ticks_s < allowed_s + IDLE_S + TICKS_S


async def test_the_scripted_worker_burns_until_the_release_and_not_after_it() -> None:
    async with scripted_at_full_speed() as (supervisor, told):
        # The worker's own Python threads take turns, so together they burn as much as one.
        reading = supervisor.stream("a " * 500_000, window=1)
        await burns_until_released(supervisor, reading, threads=1)
        assert reading.report.usage.computed_tokens == 0, "it was cancelled inside its prefill"
        # Nobody reads: all that it may compute is its window.
        decoding = supervisor.stream("a", window=1 << 20)
        await burns_until_released(supervisor, decoding, threads=1)
        assert 0 < decoding.report.usage.computed_tokens < 1 << 20
        assert (await supervisor.generate("a", max_tokens=3)).text == "w0 w1 w2 "
        assert len(told.of(WorkerSpawned)) == 1
        assert len(told.of(RequestReleased)) == 3


async def test_what_a_deaf_step_burns_after_the_cancel_is_before_the_release() -> None:
    # Long enough for a stamp that is a lie, too early or too late, to stand out.
    faults = [{"at": "decode", "after": 2, "kind": "burn", "seconds": 0.6}]
    told = Told()
    async with Supervisor(
        engine="scripted", options={"faults": faults}, escalation=PATIENT, graces=QUICK_GRACES, on_event=told
    ) as supervisor:
        pid = worker_of(supervisor).pid
        async with supervisor.stream("a", window=8) as stream:
            await until(lambda: "burn at decode" in worker_of(supervisor).link.output.tail())
            asked_s = exact_cpu_s(pid)
            stream.cancel()
            report = await stream.released()
        with anyio.move_on_after(QUIET_S):
            await anyio.sleep_forever()
        burnt_s = exact_cpu_s(pid) - asked_s
        release_s = report.timeline.release_s
        assert release_s is not None
        assert report.stage is Stage.IN_BAND
        assert release_s > BURNT_S, "the cancel came early in the step"
        # It did nothing but compute from the cancel to the stamp; on a busy machine not all the time.
        assert burnt_s < release_s + IDLE_S
        assert report.timeline.cancel_noticed_ns is not None
        assert report.timeline.released_ns is not None
        assert (report.timeline.released_ns - report.timeline.cancel_noticed_ns) / NS_PER_S > BURNT_S
        assert release_s < 0.6 + LATE_S


@pytest.mark.real_model
async def test_llama_cpp_burns_until_the_release_and_not_after_it() -> None:
    short: dict[str, Any] = {"prompt": "The three primary colours are", "temperature": 0, "max_tokens": 8}
    async with smollm() as (supervisor, told):
        expected = await supervisor.generate(**short)
        reading = supervisor.stream(" dog" * 3900)
        await burns_until_released(supervisor, reading, threads=2)
        assert reading.report.usage.computed_tokens == 0, "it was cancelled inside its prefill"
        decoding = supervisor.stream("Once", window=4096, ignore_eos=True)
        await burns_until_released(supervisor, decoding, threads=2)
        assert 0 < decoding.report.usage.computed_tokens < 4000
        assert (await supervisor.generate(**short)).text == expected.text
        assert len(told.of(WorkerSpawned)) == 1
        assert len(told.of(RequestReleased)) == 4
