"""Deaths of a worker in every state: told by name, replaced, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from infervisor import (
    EndReason,
    RestartPolicy,
    Stage,
    StopGraces,
    Stream,
    Supervisor,
    Unavailable,
    WorkerDied,
)
from infervisor.protocol.machines.process import DeathCause
from infervisor.supervisor.events import (
    BreakerOpened,
    LoadProgress,
    ModelFileChanged,
    RestartScheduled,
    WorkerBecameReady,
    WorkerExited,
    WorkerSpawned,
)
from tests.helpers.supervised import answers, scripted
from tests.helpers.waiting import is_gone, until, wait_collectable

pytestmark = pytest.mark.anyio

SIGNALS = [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGKILL, signal.SIGTERM]
MANY = RestartPolicy(max_restarts=100, max_failed_starts=100, backoff_initial_s=0.01, backoff_max_s=0.05)
SAYS_X: dict[str, Any] = {"at": "open", "kind": "flood_stderr", "bytes": 80}
"""One line of 79 times x on standard error, at every request."""
LONG = "word " * 3000
"""A prompt that takes minutes at the rate of `BUSY`."""
BUSY: dict[str, Any] = {"prefill_tokens_per_s": 20, "pace_s": 0.002, "faults": [SAYS_X]}


@asynccontextmanager
async def request_in(state: str, supervisor: Supervisor) -> AsyncIterator[Stream]:
    """Yield a stream that its worker holds in this state."""
    prompt = LONG if state == "prefill" else "hello"
    async with supervisor.stream(prompt, window=2 if state == "paused" else 64) as stream:
        if state == "prefill":
            await until(lambda: stream.report.timeline.started_ns is not None)
        else:
            assert (await anext(stream)).text == "w0 "
        if state == "paused":
            await until(lambda: stream.report.timeline.tokens == 3)
        yield stream


def told_as(number: signal.Signals) -> set[str]:
    """Return what a death by this signal from outside may be told as.

    It comes at any bytecode; faulthandler then reads the stacks of threads that run on, and may fall over them.
    """
    names = {number} | (
        {signal.SIGSEGV} if number in (signal.SIGABRT, signal.SIGBUS, signal.SIGILL) else set()
    )
    return {f"{name.name}(-{int(name)})" for name in names}


@pytest.mark.parametrize(
    "state",
    [
        pytest.param("prefill", marks=pytest.mark.produces("attempt: prefill × ProcessGone → released")),
        pytest.param("decode", marks=pytest.mark.produces("attempt: decode × ProcessGone → released")),
        "paused",
    ],
)
@pytest.mark.produces(
    "request: running × Lost → ended",
    "process: ready × Exited → exited",
    "end: worker_crashed",
)
async def test_a_worker_that_is_killed_in_a_request_is_named_and_replaced(state: str) -> None:
    parent = os.getpid()
    async with scripted(BUSY, restart=MANY) as (supervisor, told):
        for number in SIGNALS:
            pid = supervisor.status().worker_pid
            assert pid is not None
            async with request_in(state, supervisor) as stream:
                os.kill(pid, number)
                with pytest.raises(WorkerDied) as caught:
                    await stream.text()
            error = caught.value
            status = f"{error.signal_name}({-signal.Signals[str(error.signal_name)]})"
            assert status in told_as(number)
            assert error.exit_code is None
            assert status in str(error)
            assert "x" * 79 in error.output_tail
            assert error.report.error.detail == error.output_tail
            assert error.report.end_reason is EndReason.WORKER_CRASHED
            assert stream.report.is_released
            assert error.report.worker_pid == pid
            assert await answers(supervisor) != pid
            assert is_gone(pid)
            exited = told.of(WorkerExited)[-1]
            assert (exited.pid, exited.cause) == (pid, DeathCause.CRASHED)
            assert exited.requests == (error.report.request_id,)
            assert exited.status == status
        assert supervisor.status().restarts == {"crashed": len(SIGNALS)}
    assert os.getpid() == parent


@pytest.mark.produces("slot: running × WorkerDied → backoff", "slot: backoff × BackoffOver → starting")
async def test_a_worker_that_is_killed_while_idle_is_replaced_before_anybody_asks() -> None:
    async with scripted(restart=MANY) as (supervisor, told):
        for count, number in enumerate(SIGNALS, 1):
            pid = supervisor.status().worker_pid
            assert pid is not None
            os.kill(pid, number)
            exited = await told.wait_for(WorkerExited, count=count)
            assert (exited.pid, exited.requests) == (pid, ())
            assert exited.status in told_as(number)
            ready = await told.wait_for(WorkerBecameReady, count=count + 1)
            assert await answers(supervisor) == ready.pid != pid


async def test_a_request_that_waits_survives_workers_that_are_killed_while_loading() -> None:
    async with scripted({"load_s": 0.3}, restart=MANY, wait_until_ready=False) as (supervisor, told):
        async with supervisor.stream("hello", max_tokens=3) as stream:
            for count, number in enumerate(SIGNALS, 1):
                spawned = await told.wait_for(WorkerSpawned, count=count)
                pid = spawned.pid
                await until(lambda: (pid, "load") in {(e.pid, e.phase) for e in told.of(LoadProgress)})  # noqa: B023
                os.kill(pid, number)
                exited = await told.wait_for(WorkerExited, count=count)
                assert exited.status in told_as(number)
                assert "while loading the model" in exited.message
            assert await stream.text() == "w0 w1 w2 "
        assert supervisor.status().restarts == {"crashed": len(SIGNALS)}


@pytest.mark.parametrize("phase", ["open", "prefill", "decode", "release"])
async def test_a_worker_that_exits_by_itself_is_named_by_its_code(phase: str, tmp_path: Path) -> None:
    once = str(tmp_path / "once")
    fault = {"at": phase, "kind": "exit", "once_file": once, "after": 1 if phase == "decode" else 0}
    async with scripted({"faults": [SAYS_X, fault]}) as (supervisor, told):
        pid = supervisor.status().worker_pid
        # A natural end that was sent before the death is a natural end.
        if phase == "release":
            answer = await supervisor.generate("hello", max_tokens=3)
            assert (answer.text, answer.report.end_reason) == ("w0 w1 w2 ", EndReason.LENGTH)
            assert answer.report.is_released
        else:
            with pytest.raises(WorkerDied, match=r"while serving: exit code 3") as caught:
                await supervisor.generate("hello", max_tokens=3)
            assert (caught.value.exit_code, caught.value.signal_name) == (3, None)
            assert "x" * 79 in caught.value.output_tail.splitlines()
        exited = await told.wait_for(WorkerExited)
        assert (exited.pid, exited.status) == (pid, "exit code 3")
        assert exited.seconds < 1
        assert await answers(supervisor) != pid
        assert told.of(RestartScheduled)[0].restarts == 1


async def test_a_request_that_waits_is_not_given_to_a_worker_that_is_dead(tmp_path: Path) -> None:
    bomb = {"at": "decode", "prompt_contains": "bomb"}
    faults = [
        {**bomb, "after": 2, "kind": "hang", "seconds": 1.5, "once_file": str(tmp_path / "hang")},
        {**bomb, "after": 20, "kind": "exit", "once_file": str(tmp_path / "exit")},
    ]
    async with scripted({"slots": 2, "faults": faults}) as (supervisor, told):
        pid = supervisor.status().worker_pid
        assert pid is not None
        async with (
            supervisor.stream("bomb") as bomb_stream,
            supervisor.stream("short", max_tokens=4) as short,
            supervisor.stream("waits", max_tokens=4) as waits,
        ):
            await until(lambda: (tmp_path / "hang").exists())
            assert supervisor.status().queue_depth == 1
            # Blocked, this loop sees the end of the short answer, the free place and the death all at once.
            wait_collectable(pid)
            assert await short.text() == "w0 w1 w2 w3 "
            assert await waits.text() == "w0 w1 w2 w3 "
            with pytest.raises(WorkerDied):
                await bomb_stream.text()
        assert waits.report.worker_pid != pid == short.report.worker_pid
        assert told.of(WorkerExited)[0].requests == (bomb_stream.report.request_id,)


async def test_a_kill_from_outside_in_the_tick_of_a_cancel_raises_nothing() -> None:
    async with scripted({"pace_s": 0.005}, restart=MANY) as (supervisor, _):
        for _ in range(5):
            async with supervisor.stream("hello") as stream:
                await anext(stream)
                pid = supervisor.status().worker_pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                stream.cancel()
                report = await stream.released()
            assert report.end_reason is EndReason.CANCELLED
            assert report.is_released
            await until(lambda: supervisor.status().worker == "ready")


# --- what is counted and told --------------------------------------------------------------------------


@pytest.mark.produces("slot: running × WorkerDied → starting")
async def test_own_kills_and_replacements_use_up_no_restarts() -> None:
    restart = RestartPolicy(max_restarts=0, max_failed_starts=0)
    async with scripted({"pace_s": 0.005}, restart=restart) as (supervisor, told):
        for _ in range(3):
            async with supervisor.stream("hello") as stream:
                await anext(stream)
                stream.kill()
            assert stream.report.stage is Stage.KILL
        await supervisor.wait_ready()
        supervisor.restart_worker()
        await told.wait_for(WorkerBecameReady, count=5)
        assert supervisor.status().restarts == {"cancel_kill": 3, "stopped": 1}
        assert not told.of(RestartScheduled)
        assert not told.of(BreakerOpened)
        causes = [event.cause for event in told.of(WorkerExited)]
        assert causes == [*[DeathCause.CANCEL_KILL] * 3, DeathCause.STOPPED]


async def test_a_worker_is_replaced_once_its_requests_have_ended_however_long_they_take() -> None:
    graces = StopGraces(drain_s=0.1, exit_s=0.5, terminate_s=0.5)
    async with scripted({"pace_s": 0.01}, graces=graces) as (supervisor, told):
        async with supervisor.stream("hello", max_tokens=100) as running:
            await anext(running)
            supervisor.restart_worker()
            async with supervisor.stream("hello", max_tokens=3) as later:
                assert (await running.text()).endswith(" w99 ")
                assert await later.text() == "w0 w1 w2 "
        assert running.report.worker_pid != later.report.worker_pid
        assert [event.cause for event in told.of(WorkerExited)] == [DeathCause.STOPPED]


@pytest.mark.produces(
    "slot: running × WorkerWanted → running",
    "slot: running × WorkerDied → open",
    "slot: open × WorkerWanted → open",
)
async def test_too_many_crashes_within_the_period_open_the_breaker() -> None:
    restart = RestartPolicy(max_restarts=2, backoff_initial_s=0.01)
    async with scripted({"faults": [{"at": "decode", "kind": "exit"}]}, restart=restart) as (
        supervisor,
        told,
    ):
        for count in range(3):
            with pytest.raises(WorkerDied):
                await supervisor.generate("hello")
            if count < 2:
                await told.wait_for(WorkerBecameReady, count=count + 2)
        with pytest.raises(Unavailable, match="exit code 3"):
            await supervisor.generate("hello")
        assert supervisor.status().restarts == {"crashed": 2}


@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError])
async def test_an_event_handler_that_raises_harms_nothing(error: type[BaseException]) -> None:
    def on_event(event: object) -> None:
        raise error(f"no room for {event}")

    async with Supervisor(engine="scripted", on_event=on_event) as supervisor:
        pid = await answers(supervisor)
        assert await answers(supervisor) == pid


async def test_memory_and_processor_time_of_the_worker_are_sampled() -> None:
    async with scripted() as (supervisor, _):
        await until(lambda: supervisor.status().sample is not None)
        status = supervisor.status()
        assert status.sample is not None
        assert status.sample.rss_bytes > 1_000_000
        assert status.sample.threads == 3
        assert 0 < status.sample.cpu_s < 60
        assert status.peak_rss_bytes >= status.sample.rss_bytes


async def test_a_model_file_that_is_overwritten_is_told_and_warned_of(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"weights")
    async with scripted({**BUSY, "slots": 2}, model=model) as (supervisor, told):
        async with supervisor.stream(LONG) as running:
            model.write_bytes(b"other weights")
            changed = await told.wait_for(ModelFileChanged)
            assert changed.path == str(model)
            assert "7 bytes when loaded, 13 now" in changed.change
            async with supervisor.stream(LONG) as later:
                await until(lambda: later.report.timeline.started_ns is not None)
        for stream in (running, later):
            assert len(stream.report.warnings) == 1
            assert "model file changed" in stream.report.warnings[0]
        supervisor.restart_worker()
        await told.wait_for(WorkerBecameReady, count=2)
        async with supervisor.stream(LONG) as afterwards:
            await until(lambda: afterwards.report.timeline.started_ns is not None)
        assert afterwards.report.warnings == ()
        assert len(told.of(ModelFileChanged)) == 1


async def test_a_model_file_that_is_unlinked_or_replaced_is_no_change(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"weights")
    async with scripted(model=model) as (supervisor, told):
        other = tmp_path / "other"
        other.write_bytes(b"quite other weights")
        other.replace(model)
        await until(lambda: supervisor.status().sample is not None)
        looked = supervisor.status().sample
        model.unlink()
        await until(lambda: supervisor.status().sample is not looked)
        assert (await supervisor.generate("hello", max_tokens=3)).report.warnings == ()
        assert told.of(ModelFileChanged) == []
