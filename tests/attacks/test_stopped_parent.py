"""A parent that stands still in mid-stream, stopped or blocked: nothing is killed, nothing lost, no clock lies.

A host program has many streams at once, each with a supervisor of its own, and all hosts stand still at the same
time, so that ten seconds are paid once.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

from infervisor import Deadlines, EndReason, Escalation, Liveness, Stage, Stream, Supervisor
from infervisor.supervisor.events import (
    CancelEscalated,
    LoadProgress,
    WorkerExited,
    WorkerHung,
    WorkerSpawned,
)
from tests.helpers.host_process import complaints, host
from tests.helpers.inside import PATIENT, request_of, until, until_buffered, words, worker_of
from tests.helpers.leaks import no_leftovers
from tests.helpers.models import LOOP, build_model
from tests.helpers.supervised import Told, scripted

STOPPED_S, BLOCKED_S = 10.0, 5.0
TIGHT_S = 3.0
"""All deadlines, limits and graces: a fraction of the time for which the parent stands still."""
SETTINGS: Mapping[str, Any] = {
    "deadlines": Deadlines(queue_s=TIGHT_S, first_token_s=TIGHT_S, stall_s=TIGHT_S, consumer_s=TIGHT_S),
    "liveness": Liveness(hang_after_s=TIGHT_S, step_factor=1, unmeasured_s=TIGHT_S, dump_s=0.2),
    "escalation": Escalation(
        signal_after_s=TIGHT_S, signal_step_factor=0, kill_after_s=TIGHT_S, kill_step_factor=0
    ),
}
AFTERWARDS = 100
"""Chunks that are read after the standstill."""


# --- in the host ---------------------------------------------------------------------------------------


class Scene:
    """One stream of a host, what it shares with the others, and what its supervisor tells."""

    def __init__(self, still_s: float, over: anyio.Event) -> None:
        self.still_s = still_s
        self.over = over
        self.told = Told()
        self.has_begun = anyio.Event()

    def open(self, model: str | None = None, **settings: Any) -> Supervisor:
        """Return a supervisor with tight limits."""
        engine = "scripted" if model is None else "llama"
        return Supervisor(model, engine=engine, on_event=self.told, **{**SETTINGS, **settings})

    async def read(self, stream: Stream, pace_s: float = 0) -> str:
        """Read through the standstill and on, then leave; check that something came before and after it."""
        texts, left = [], AFTERWARDS
        async for chunk in stream:
            texts.append(chunk.text)
            self.has_begun.set()
            if pace_s:
                await anyio.sleep(pace_s)
            left -= self.over.is_set()
            if not left:
                break
        assert left == 0, f"it ended {left} chunks too early: {stream.report.to_line()}"
        assert len(texts) >= AFTERWARDS
        return "".join(texts)

    async def starting(
        self, options: dict[str, Any], far_enough: Callable[[Told], Awaitable[object]]
    ) -> None:
        """Let a second supervisor start through the standstill, and a request wait for it."""
        told = self.told = Told()
        deadlines = Deadlines(startup_s=0.9 * self.still_s, queue_s=TIGHT_S)
        async with (
            self.open(options=options, deadlines=deadlines, wait_until_ready=False) as starts,
            starts.stream("count", max_tokens=5) as stream,
        ):
            await far_enough(told)
            self.has_begun.set()
            assert await stream.text() == words(5)
            assert len(told.of(WorkerSpawned)) == 1
            self.told = Told()


def assert_counts(text: str) -> None:
    """Assert that it is what the scripted engine says from the start, with none missing."""
    assert text == words(text.count("w"))


async def decoding(scene: Scene, supervisor: Supervisor) -> None:
    """The worker decodes at its pace, ahead of the reader, and never waits for credit."""
    async with supervisor.stream("count", window=10_000) as stream:
        assert_counts(await scene.read(stream))


async def paused(scene: Scene, supervisor: Supervisor) -> None:
    """The reader is slow: the worker mostly waits for credit, and something always lies in the buffer."""
    async with supervisor.stream("count", window=4) as stream:
        assert_counts(await scene.read(stream, pace_s=0.02))


async def llama(scene: Scene, supervisor: Supervisor) -> None:
    """llama.cpp decodes for a reader that is slower than it."""
    async with supervisor.stream("c", window=64) as stream:
        text = await scene.read(stream, pace_s=0.005)
        assert text == ("abc" * len(text))[: len(text)]


async def loading(scene: Scene, supervisor: Supervisor) -> None:
    """The model is loaded while the parent stands still."""
    load = {"load_s": 0.8 * scene.still_s, "load_steps": 1}
    await scene.starting(load, lambda told: told.wait_for(LoadProgress, lambda event: event.phase == "load"))


async def spawning(scene: Scene, supervisor: Supervisor) -> None:
    """The worker has just been started, and its first message waits for an answer all the time."""
    await scene.starting({}, lambda told: told.wait_for(WorkerSpawned))


async def cancelled(scene: Scene, supervisor: Supervisor) -> None:
    """A cancel is under way; the worker obeys while the parent stands still, long after each grace."""
    async with supervisor.stream("obeys late") as stream:
        await until(lambda: "at decode" in worker_of(supervisor).link.output.tail())
        stream.cancel()
        scene.has_begun.set()
        report = await stream.released()
    assert (report.end_reason, report.stage) == (EndReason.CANCELLED, Stage.IN_BAND), report.to_line()
    assert report.is_released, report.to_line()


async def flooded(scene: Scene, supervisor: Supervisor) -> None:
    """The worker computes at full speed until the pipe is full, and then stands in the middle of a frame."""
    fcntl.fcntl(worker_of(supervisor).process.frames, fcntl.F_SETPIPE_SZ, 4096)
    async with supervisor.stream("count", window=4000) as stream:
        first = await anext(stream)
        scene.has_begun.set()
        await scene.over.wait()
        # It runs ahead of a reader that takes nothing.
        await until(lambda: stream.report.timeline.tokens > 500)
        assert_counts(first.text + await scene.read(stream))


async def prefilling(scene: Scene, supervisor: Supervisor) -> None:
    """The prompt takes longer than the deadline for the first token, and is read when the parent goes on."""
    async with supervisor.stream("word " * 100, max_tokens=5) as stream:
        await until(lambda: request_of(stream).timeline.started_ns is not None)
        scene.has_begun.set()
        assert await stream.text() == words(5)


Life = Callable[[Scene, Supervisor], Awaitable[None]]
LIVES: tuple[Life, ...] = (decoding, paused, llama, loading, cancelled, flooded, prefilling, spawning)
"""In the order in which they begin: those last whose limits run from then on."""


def options_of(life: Life, still_s: float) -> dict[str, Any]:
    """Return the engine's options for one of them."""
    if life is cancelled:
        fault = {"at": "decode", "after": 3, "kind": "ignore_cancel", "seconds": still_s / 2}
        return {"faults": [{**fault, "prompt_contains": "obeys late"}]}
    if life is prefilling:
        return {"prefill_tokens_per_s": 100 / (0.8 * still_s)}
    return {"threads": 1} if life is llama else {"pace_s": 0.005 if life is decoding else 0}


async def be_host(still_s: float, blocks: bool, model: str) -> dict[str, str]:
    """Begin all lives, stand still, and return what became of each: nothing to complain of is an empty string."""
    over = anyio.Event()
    verdicts = {life.__name__: "never ended" for life in LIVES}

    async def live(life: Life, scene: Scene, supervisor: Supervisor) -> None:
        pid = worker_of(supervisor).pid
        try:
            await life(scene, supervisor)
            said = "c" if life is llama else "next"
            answer = await supervisor.generate(said, max_tokens=3)
            assert answer.text == ("abc" if life is llama else words(3))
            assert answer.report.worker_pid == pid, "another worker"
            wrong = (WorkerExited, WorkerHung, CancelEscalated)
            assert [event for event in scene.told.events if isinstance(event, wrong)] == []
            verdicts[life.__name__] = ""
        except Exception as error:
            verdicts[life.__name__] = repr(error)
            scene.has_begun.set()

    async def notice() -> None:
        while not over.is_set():
            before = time.monotonic()
            await anyio.sleep(0.05)
            if time.monotonic() - before > still_s / 2:
                over.set()

    cast = []
    async with AsyncExitStack() as stack:
        for life in LIVES:
            scene = Scene(still_s, over)
            path = model if life is llama else None
            supervisor = scene.open(path, options=options_of(life, still_s))
            cast.append((life, scene, await stack.enter_async_context(supervisor)))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(notice)
            for life, scene, supervisor in cast:
                tasks.start_soon(live, life, scene, supervisor)
                await scene.has_begun.wait()
            print("all have begun", flush=True)
            if blocks:
                time.sleep(still_s)  # noqa: ASYNC251 - the fault that is meant
    return verdicts


def main() -> None:
    """Be the host that the arguments describe."""
    backend, still_s, blocks, model = sys.argv[1:]
    print(json.dumps(anyio.run(be_host, float(still_s), blocks == "blocks", model, backend=backend)))


# --- the test ------------------------------------------------------------------------------------------

PROGRAM = "from tests.attacks import test_stopped_parent; test_stopped_parent.main()"


def stand_still(backend: str, manner: str, model: Path) -> tuple[int, dict[str, str], list[str]]:
    """Run a host through a standstill; return its exit code, its verdicts and its complaints."""
    still_s = STOPPED_S if manner == "is stopped" else BLOCKED_S
    with host(PROGRAM, backend, str(still_s), manner, str(model)) as program:
        assert program.line() == "all have begun"
        if manner == "is stopped":
            program.signal(signal.SIGSTOP)
            time.sleep(still_s)
            program.signal(signal.SIGCONT)
        code, said, errors = program.finish()
    return code, json.loads(said or "{}"), complaints(errors)


def test_a_parent_that_is_stopped_or_blocked_in_mid_stream_kills_nothing_and_loses_nothing(
    tmp_path: Path,
) -> None:
    model = build_model(tmp_path / "loop.gguf", LOOP, context_tokens=16_384)
    hosts = [(backend, manner) for backend in ("asyncio", "trio") for manner in ("is stopped", "blocks")]
    with no_leftovers(), ThreadPoolExecutor(len(hosts)) as threads:
        found = list(threads.map(lambda manner: stand_still(*manner, model), hosts))
    for (backend, manner), (code, verdicts, complained) in zip(hosts, found, strict=True):
        assert (code, complained) == (0, []), (backend, manner)
        assert verdicts.keys() == {life.__name__ for life in LIVES}
        assert {name: wrong for name, wrong in verdicts.items() if wrong} == {}, (backend, manner)


# --- in this process -----------------------------------------------------------------------------------

TOGETHER_S = 4.0


def only(**budgets: float) -> Deadlines:
    """Return deadlines with these budgets alone."""
    return Deadlines(**{"startup_s": None, "consumer_s": None, **budgets})


def stand_still_together(supervisor: Supervisor, seconds: float) -> None:
    """Stop the worker and block this process, as a paused container does; then let both go on."""
    pid = worker_of(supervisor).pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.anyio
async def test_what_parent_and_worker_stood_still_together_counts_for_no_deadline() -> None:
    options = {"slots": 4, "pace_s": 0.05, "prefill_tokens_per_s": 20}
    # Each far above what its clock counts beside the standstill, and below that.
    limits = only(first_token_s=2.5, stall_s=2.5, consumer_s=3.5)
    with no_leftovers():
        async with scripted(options) as (supervisor, told):
            pid = worker_of(supervisor).pid
            async with (
                supervisor.stream("read", max_tokens=30, deadlines=limits) as read,
                supervisor.stream("unread", window=2, deadlines=limits) as unread,
                supervisor.stream("first", max_tokens=3, deadlines=limits) as first,
            ):
                await until_buffered(read, 1)
                await until_buffered(unread, 2)
                async with supervisor.stream("word " * 10, max_tokens=3, deadlines=limits) as prefilled:
                    await until(lambda: request_of(prefilled).timeline.started_ns is not None)
                    stand_still_together(supervisor, TOGETHER_S)
                    assert await prefilled.text() == words(3)
                    assert await first.text() == words(3)
                    assert await read.text() == words(30)
                    assert unread.end_reason is None
                    assert (await anext(unread)).text == "w0 "
            assert worker_of(supervisor).pid == pid
            assert told.of(WorkerExited) == []


@pytest.mark.anyio
async def test_what_parent_and_worker_stood_still_together_counts_for_no_rung_of_a_ladder() -> None:
    ladder = Escalation(signal_after_s=0, signal_step_factor=0, kill_after_s=1.0, kill_step_factor=0)
    fault = {"at": "decode", "after": 3, "kind": "ignore_cancel", "seconds": 0.5}
    with no_leftovers():
        async with scripted({"faults": [fault]}, escalation=ladder) as (supervisor, told):
            pid = worker_of(supervisor).pid
            async with supervisor.stream("obeys late") as stream:
                await until(lambda: "at decode" in worker_of(supervisor).link.output.tail())
                stream.cancel()
                stand_still_together(supervisor, TOGETHER_S)
                report = await stream.released()
            assert report.stage is Stage.SIGNAL
            assert report.is_released
            assert told.of(WorkerExited) == []
            assert worker_of(supervisor).pid == pid


@pytest.mark.anyio
async def test_a_deadline_that_ends_within_a_short_block_is_judged_by_what_has_arrived() -> None:
    with no_leftovers():
        async with scripted({"pace_s": 0.02}, escalation=PATIENT) as (supervisor, _):
            for _ in range(4):
                async with supervisor.stream("count", deadlines=only(stall_s=0.3)) as stream:
                    await anext(stream)
                    # Shorter than what counts as a standstill beyond the deadline.
                    time.sleep(0.34)  # noqa: ASYNC251
                    assert (await anext(stream)).text == "w1 "
                    assert (await anext(stream)).text == "w2 "
                    assert stream.end_reason is None
