"""A supervisor as a guest: in threads, beside another one, in odd hosts, under jumping and standing clocks."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from infervisor import (
    EndReason,
    Liveness,
    Stream,
    Supervisor,
    UsageError,
    WorkerDied,
)
from infervisor.protocol.machines.process import DeathCause
from infervisor.supervisor import process as process_module
from infervisor.supervisor.events import WorkerBecameReady, WorkerExited
from tests.helpers.host_process import complaints, host
from tests.helpers.inside import words
from tests.helpers.supervised import answers, scripted

pytestmark = pytest.mark.anyio

ENDLESS = {"pace_s": 0.005}


# --- odd hosts -----------------------------------------------------------------------------------------


def test_a_whole_life_in_the_loop_of_another_thread(anyio_backend: str) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGTERM)}
    pids: list[int] = []

    async def life() -> None:
        async with scripted() as (supervisor, told):
            pids.append(await answers(supervisor))
            os.kill(pids[0], signal.SIGKILL)
            await told.wait_for(WorkerExited)
            pids.append(await answers(supervisor))

    thread = threading.Thread(target=anyio.run, args=(life,), kwargs={"backend": anyio_backend})
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert len(set(pids)) == 2
    assert {number: signal.getsignal(number) for number in before} == before


def test_workers_come_and_go_under_asyncio_itself_without_anyios_runner() -> None:
    async def life() -> None:
        async with scripted({"pace_s": 0.005}, on_crash="resume", standby=1) as (supervisor, told):
            # Started by the frame that says that the first one is ready.
            await told.wait_for(WorkerBecameReady, count=2)
            async with supervisor.stream("hello", max_tokens=40, window=4) as stream:
                first = await anext(stream)
                os.kill(stream.report.worker_pid or 0, signal.SIGKILL)
                assert first.text + await stream.text() == words(40)
            await supervisor.recycle()
            await answers(supervisor)

    asyncio.run(life())


async def test_the_hosts_signal_handlers_stay_as_they_are() -> None:
    def mine(number: int, frame: object) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGUSR2, mine)
    try:
        handlers = {n: signal.getsignal(n) for n in signal.valid_signals()}
        async with scripted() as (supervisor, _):
            await answers(supervisor)
            assert {n: signal.getsignal(n) for n in signal.valid_signals()} == handlers
        assert {n: signal.getsignal(n) for n in signal.valid_signals()} == handlers
    finally:
        signal.signal(signal.SIGUSR2, before)


async def test_another_thread_may_look_and_cancel_but_not_ask() -> None:
    async with scripted(ENDLESS) as (supervisor, _), supervisor.stream("hello") as stream:
        await anext(stream)
        found: list[object] = []

        def visit() -> None:
            found.append(supervisor.status().in_flight)
            for use in (lambda: supervisor.stream("hello"), supervisor.restart_worker):
                try:
                    use()
                except UsageError as error:
                    found.append(error.code)
            stream.cancel()

        visitor = threading.Thread(target=visit)
        visitor.start()
        visitor.join(20)
        assert found == [1, "usage", "usage"]
        assert (await stream.released()).end_reason is EndReason.CANCELLED


async def test_two_supervisors_in_one_loop_do_not_meet() -> None:
    async with scripted(ENDLESS) as (one, one_told), scripted(ENDLESS) as (two, two_told):
        async with one.stream("hello", max_tokens=20) as first, two.stream("hello", max_tokens=20) as second:
            pid = one.status().worker_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(WorkerDied):
                await first.text()
            assert (await second.text()).endswith("w19 ")
        await answers(one)
        assert len(one_told.of(WorkerExited)) == 1
        assert two_told.of(WorkerExited) == []


async def test_a_host_that_ignores_sigchld_and_so_never_sees_a_status() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        async with scripted() as (supervisor, told):
            pid = await answers(supervisor)
            os.kill(pid, signal.SIGKILL)
            exited = await told.wait_for(WorkerExited)
            assert (exited.cause, exited.status) == (DeathCause.CRASHED, "exit status unknown")
            assert await answers(supervisor) != pid
    finally:
        signal.signal(signal.SIGCHLD, before)


async def test_without_pidfd_a_thread_waits_for_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "_open_pidfd", lambda pid: None)
    async with scripted() as (supervisor, told):
        pid = await answers(supervisor)
        os.kill(pid, signal.SIGKILL)
        assert (await told.wait_for(WorkerExited)).status == "SIGKILL(-9)"
        assert await answers(supervisor) != pid


async def test_a_forked_child_cannot_use_or_harm_its_parents_supervisor() -> None:
    async with scripted(ENDLESS) as (supervisor, told):
        async with supervisor.stream("hello", max_tokens=200) as stream:
            await anext(stream)
            untouched = supervisor.stream("other")
            said, says = os.pipe()
            child = os.fork()
            if child == 0:
                refused = [_is_refused(use) for use in _uses(supervisor, stream, untouched)]
                os.write(says, repr(refused).encode())
                os._exit(0)
            os.close(says)
            assert _last_words(child, said) == repr([True] * 10)
            # Nothing that the child tried has reached the worker.
            assert (await stream.text()).endswith(" w199 ")
        assert told.of(WorkerExited) == []
        await answers(supervisor)


def _last_words(child: int, said: int) -> str:
    with open(said) as answer:
        os.waitpid(child, 0)
        return answer.read()


def _uses(supervisor: Supervisor, stream: Stream, untouched: Stream) -> list[Callable[[], object]]:
    def step(coroutine: Any) -> Callable[[], object]:
        return lambda: coroutine.send(None)

    return [
        lambda: supervisor.stream("hello"),
        supervisor.status,
        supervisor.restart_worker,
        stream.cancel,
        stream.kill,
        step(supervisor.stop()),
        step(supervisor.wait_ready()),
        step(supervisor.__aexit__(None, None, None)),
        step(stream.__aexit__(None, None, None)),
        step(untouched.__anext__()),
    ]


def _is_refused(use: Callable[[], object]) -> bool:
    try:
        use()
    except UsageError:
        return True
    except BaseException:
        return False
    return False


CLOSED = """
import os, sys
for fd in (0, 1, 2):
    os.close(fd)
import anyio
from infervisor import Supervisor

async def main():
    async with Supervisor(engine="scripted") as supervisor:
        first = await supervisor.generate("hello", max_tokens=3)
        os.kill(first.report.worker_pid, 9)
        while supervisor.status().worker_pid in (first.report.worker_pid, None):
            await anyio.sleep(0.005)
        second = await supervisor.generate("hello", max_tokens=3)
        return f"{first} {second}"

said = anyio.run(main, backend=sys.argv[1])
with open(sys.argv[2], "w") as file:
    file.write(said)
"""


async def test_a_host_with_closed_standard_streams(anyio_backend: str, tmp_path: Any) -> None:
    with host(CLOSED, anyio_backend, str(tmp_path / "said"), flags=()) as program:
        code, _, _ = program.finish()
    assert code == 0
    assert (tmp_path / "said").read_text() == "w0 w1 w2  w0 w1 w2 "


STRAY = """
import gc, os, sys
import anyio
from infervisor import InfervisorError, Supervisor

async def main():
    options = {"pace_s": 0.002, "faults": [{"at": "decode", "kind": "exit", "prompt_contains": "bomb"}]}
    async with Supervisor(engine="scripted", options=options, on_crash="fail") as supervisor:
        async with supervisor.stream("hello") as stream:
            async for chunk in stream:
                break
        async for chunk in supervisor.stream("dropped"):
            break
        gc.collect()
        supervisor.stream("never entered")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.generate, "hello")
            await anyio.sleep(0.05)
            tasks.cancel_scope.cancel()
        try:
            await supervisor.generate("bomb")
        except InfervisorError as error:
            print(type(error).__name__)
        print(await supervisor.generate("hello", max_tokens=3))

anyio.run(main, backend=sys.argv[1], backend_options={"debug": True} if sys.argv[1] == "asyncio" else {})
gc.collect()
"""


async def test_nothing_strays_in_debug_mode_with_warnings_as_errors(anyio_backend: str) -> None:
    with host(STRAY, anyio_backend) as program:
        code, said, errors = program.finish()
    assert (code, said, complaints(errors)) == (0, "WorkerDied\nw0 w1 w2 \n", [])


# --- clocks and stalls ---------------------------------------------------------------------------------


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
async def test_a_jump_of_the_wall_clock_changes_nothing(
    jump_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = time.time
    async with scripted(ENDLESS, liveness=Liveness(hang_after_s=5, unmeasured_s=5)) as (supervisor, told):
        async with supervisor.stream("hello", max_tokens=100) as stream:
            await anext(stream)
            monkeypatch.setattr(time, "time", lambda: wall() + jump_s)
            assert (await stream.text()).endswith(" w99 ")
        await answers(supervisor)
        total_s = stream.report.timeline.total_s
        assert total_s is not None
        assert 0 < total_s < 60
        assert told.of(WorkerExited) == []
