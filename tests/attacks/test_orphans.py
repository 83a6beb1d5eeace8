"""A worker never outlives its supervisor's process, whatever it is doing then, and outlives every mere thread.

The parent-death signal of Linux follows the thread that spawned: the last tests show that this thread is never one
that comes and goes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.from_thread
import psutil
import pytest

from infervisor import Escalation, StopGraces, Stream, Supervisor
from infervisor.protocol.machines.process import ProcessPhase
from infervisor.supervisor.events import LoadProgress, WorkerBecameReady, WorkerExited
from tests.helpers.host_process import host
from tests.helpers.inside import until, until_buffered, worker_of
from tests.helpers.leaks import no_leftovers
from tests.helpers.models import smollm2_path
from tests.helpers.supervised import Told, answers, scripted
from tests.helpers.waiting import is_gone

LOADING_S = 90.0
"""For a parent with a worker in each state, some of which keep all cores busy."""
GONE_S = 2.0
"""How long a worker may live on after its parent."""
NEVER_S = 600.0
PATIENT = Escalation(signal_after_s=NEVER_S, kill_after_s=NEVER_S, alert_after_s=NEVER_S)


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """Check children, descriptors and threads around each test."""
    with no_leftovers():
        yield


# --- in the host: one worker in each state ---------------------------------------------------------------


def fault(at: str, kind: str) -> dict[str, Any]:
    """Return options with one fault."""
    return {"pace_s": 0.005, "faults": [{"at": at, "kind": kind, "after": 1 if at == "decode" else 0}]}


SLOW: Mapping[str, Any] = {"pace_s": 0.005, "prefill_tokens_per_s": 20}
SCRIPTED: Mapping[str, Mapping[str, Any]] = {
    "idle": SLOW,
    "importing": fault("import", "hang"),
    "loading": fault("load", "hang"),
    "warming up": fault("warm_up", "hang"),
    "warming up with the lock": fault("warm_up", "hang_gil"),
    "preparing": fault("prepare", "hang"),
    "prefilling": SLOW,
    "decoding": SLOW,
    "paused": SLOW,
    "draining": fault("decode", "ignore_cancel"),
    "deaf": fault("decode", "block_reader"),
    "hanging": fault("decode", "hang"),
    "hanging with the lock": fault("decode", "hang_gil"),
    "releasing": fault("release", "hang_gil"),
    "spawned": SLOW,
}
"""State → options. What is only spawned comes last, when everything else stands."""
FOR_LONG = (
    "{% if 'at length' in messages[0].content %}"
    + "{% for i in range(99999) %}" * 2
    + "{% endfor %}" * 2
    + "{% endif %}"
)
LLAMA: Mapping[str, Mapping[str, Any]] = {
    **{state: {"threads": 1} for state in ("idle", "paused", "decoding", "prefilling", "loading")},
    "preparing": {"threads": 1, "chat_template": FOR_LONG},
}
"""Each with a process beside it that renders templates; the last one's does."""


async def reach(state: str, supervisor: Supervisor, told: Told, tasks: anyio.abc.TaskGroup) -> Stream | None:
    """Bring a worker into a state, in which it stays; return the stream that keeps it there."""
    worker = worker_of(supervisor)
    if state == "spawned":
        return None
    if state in ("importing", "loading") or state.startswith("warming"):
        if worker.settings.load.engine == "llama":
            await told.wait_for(LoadProgress, lambda event: event.phase == "load")
        else:
            await until(lambda: "scripted fault: " in worker.link.output.tail())
        return None
    await supervisor.wait_ready()
    if state == "idle":
        return None
    asked: dict[str, Any] = {"prompt": "word " * 1000 if state == "prefilling" else "c"}
    if state == "preparing" and worker.settings.load.engine == "llama":
        asked = {"messages": [{"role": "user", "content": "at length"}]}
    stream = supervisor.stream(**asked, window=2 if state == "paused" else 2000, max_tokens=3000)
    await stream.__aenter__()
    if "messages" in asked:
        # The process that renders has started another one, in which the template runs.
        await until(lambda: len(psutil.Process(worker.pid).children(recursive=True)) == 2)
    elif state == "preparing":
        await until(lambda: "at prepare" in worker.link.output.tail())
    elif state == "prefilling":
        await until(lambda: stream.report.timeline.started_ns is not None)
    elif state == "paused":
        await until_buffered(stream, 2)
    elif state == "decoding":
        await until_buffered(stream, 1)
    elif state == "releasing":
        await until_buffered(stream, 1)
        stream.cancel()
        await until(lambda: "at release" in worker.link.output.tail())
    else:
        await until(lambda: "at decode" in worker.link.output.tail())
    if state == "draining":
        tasks.start_soon(supervisor.stop)
        await until(lambda: worker.state.phase is ProcessPhase.DRAINING)
    return stream


async def be_parent(states: Mapping[str, Mapping[str, Any]], model: str | None) -> None:
    """Bring one worker into each state, say so with their pids, and wait for the end."""
    held: list[object] = []
    pids: dict[str, int] = {}
    async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
        for state, options in states.items():
            told = Told()
            supervisor = Supervisor(
                model, engine="llama" if model else "scripted", options=options, on_event=told,
                wait_until_ready=False, escalation=PATIENT, graces=StopGraces(NEVER_S, NEVER_S, NEVER_S),
            )  # fmt: skip
            await stack.enter_async_context(supervisor)
            held.append((supervisor, await reach(state, supervisor, told, tasks)))
            pids[state] = worker_of(supervisor).pid
        # A child of the host that was forked has all of its descriptors: the pipes don't end with the host.
        child = os.fork()
        if child == 0:
            time.sleep(NEVER_S)  # noqa: ASYNC251
            os._exit(0)
        print(json.dumps({**pids, "the forked child": child}), flush=True)
        await anyio.sleep_forever()


def main() -> None:
    """Be the parent that the arguments describe."""
    backend, *model = sys.argv[1:]
    anyio.run(be_parent, LLAMA if model else SCRIPTED, model[0] if model else None, backend=backend)


# --- the parent dies -------------------------------------------------------------------------------------

PROGRAM = "from tests.attacks import test_orphans; test_orphans.main()"


def outlive(*arguments: str, least: int) -> set[str]:
    """Kill a parent and return the states of the workers, and of what they started, that lived on for too long.

    least: how many processes there must be before.
    """
    with host(PROGRAM, *arguments, flags=()) as parent:
        pids = json.loads(parent.line(LOADING_S))
        # With its start time, so that a stranger with the same pid isn't taken for it.
        workers = {state: psutil.Process(pid) for state, pid in pids.items()}
        child = workers.pop("the forked child")
        for state, worker in list(workers.items()):
            for number, started in enumerate(worker.children(recursive=True), 1):
                workers[f"{state}, process {number}"] = started
        try:
            assert len(workers) >= least
            assert all(runs(worker) for worker in workers.values())
            parent.signal(signal.SIGKILL)
            deadline = time.monotonic() + GONE_S
            while (left := {state for state, worker in workers.items() if runs(worker)}) and (
                time.monotonic() < deadline
            ):
                time.sleep(0.005)
            assert runs(child), "it held the pipes open all the time"
            return left
        finally:
            for process in (child, *workers.values()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def runs(process: psutil.Process) -> bool:
    """Whether it is this process and hasn't ended; one that waits to be collected has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_no_worker_outlives_a_parent_that_is_killed_whatever_it_is_doing(anyio_backend: str) -> None:
    assert outlive(anyio_backend, least=len(SCRIPTED)) == set()


@pytest.mark.real_model
def test_no_llama_worker_outlives_a_parent_that_is_killed_whatever_it_is_doing(anyio_backend: str) -> None:
    # Each but the one that loads has its sandbox, and one of those a job.
    assert outlive(anyio_backend, str(smollm2_path()), least=2 * len(LLAMA)) == set()


# --- a thread ends ---------------------------------------------------------------------------------------


class Thread(threading.Thread):
    """A thread whose end can be waited for as the kernel sees it."""

    def finish(self) -> None:
        """Wait until it is gone."""
        self.join(20)
        assert not self.is_alive()
        deadline = time.monotonic() + 20
        while Path(f"/proc/self/task/{self.native_id}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)


@pytest.fixture
def spawned_in(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with the thread of every spawn: one of a pool would end long after the test."""
    threads: list[int] = []

    class Spawned(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            threads.append(threading.get_native_id())
            super().__init__(*arguments, **settings)

    monkeypatch.setattr(subprocess, "Popen", Spawned)
    return threads


def test_a_worker_lives_on_when_the_thread_that_entered_its_supervisor_through_a_portal_ends(
    anyio_backend: str, spawned_in: list[int]
) -> None:
    told = Told()
    supervisor = Supervisor(engine="scripted", on_event=told)
    with anyio.from_thread.start_blocking_portal(anyio_backend) as portal, contextlib.ExitStack() as stack:
        thread = Thread(target=lambda: stack.enter_context(portal.wrap_async_context_manager(supervisor)))
        thread.start()
        thread.finish()
        (pid,) = {portal.call(answers, supervisor) for _ in range(5)}
        # Likewise for a worker that takes the place of another.
        os.kill(pid, signal.SIGKILL)
        portal.call(told.wait_for, WorkerBecameReady, lambda event: event.pid != pid)
        for _ in range(3):
            thread = Thread(target=lambda: portal.call(answers, supervisor))
            thread.start()
            thread.finish()
        assert portal.call(answers, supervisor) == told.of(WorkerBecameReady)[1].pid
        assert len(told.of(WorkerExited)) == 1
        assert spawned_in == [portal.call(threading.get_native_id)] * 2


@pytest.mark.anyio
@pytest.mark.parametrize("act", ["kill", "drop"])
async def test_a_worker_lives_on_when_the_thread_that_made_it_necessary_ends(
    act: str, spawned_in: list[int]
) -> None:
    ignores = {"at": "decode", "after": 2, "kind": "ignore_cancel", "prompt_contains": "deaf"}
    quick = Escalation(signal_after_s=0, signal_step_factor=0, kill_after_s=0, kill_step_factor=0)
    async with scripted({"faults": [ignores]}, escalation=quick) as (supervisor, told):
        first = worker_of(supervisor).pid
        held = [supervisor.stream("deaf")]
        await anext(held[0])
        # The end of the stream in another thread costs the worker its life, and another one is started.
        thread = Thread(target=held[0].kill if act == "kill" else held.clear)
        thread.start()
        second = (await told.wait_for(WorkerBecameReady, count=2)).pid
        thread.finish()
        for _ in range(5):
            assert await answers(supervisor) == second
        assert [event.pid for event in told.of(WorkerExited)] == [first]
        assert is_gone(first)
        assert spawned_in == [threading.get_native_id()] * 2
