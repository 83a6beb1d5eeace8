"""Thousands of cancels around the borders of steps: each request ends once, and what follows is exact.

The worker is the real one, with one check more: it ends itself if a flag that was set for a cancelled request
ever cuts a step of others.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from infervisor import EndReason, Report, Stage, StopGraces, Stream, Supervisor
from infervisor.supervisor.events import (
    CancelEscalated,
    RequestReleased,
    WorkerExited,
    WorkerLogged,
    WorkerSpawned,
)
from tests.helpers.checked_worker import checked
from tests.helpers.inside import PATIENT, holds_nothing, words
from tests.helpers.leaks import no_leftovers
from tests.helpers.models import LOOP, build_model
from tests.helpers.supervised import QUICK_RESTART, Told

pytestmark = pytest.mark.anyio

WINDOWS = (1, 2, 8, 64)
PATIENCE_S = 120.0
"""A lock-up ends here; on an idle machine a storm takes two or three seconds."""


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """Check children, descriptors and threads around each test."""
    with no_leftovers():
        yield


@dataclass
class Storm:
    """Cancels requests of one worker at chosen moments, and checks every text.

    says: the first n tokens of any answer, as text. step_s: about how long a step takes, to aim with.
    """

    supervisor: Supervisor
    says: Callable[[int], str]
    step_s: float
    luck: random.Random
    prompt: str
    asked: dict[str, Any] = field(default_factory=dict[str, Any])
    reports: list[Report] = field(default_factory=list[Report])

    async def cancel(self, stream: Stream, moment: str) -> int:
        """Cancel at this moment; return how many tokens were read before."""
        if moment == "at the submit":
            stream.cancel()
            return 0
        if moment == "while the prompt is read":
            # What the worker says first comes when it has the prompt in a slot, and reading has begun.
            await self.until_started(stream)
            self.spin()
            stream.cancel()
            return 0
        if moment == "at the natural end":
            # All tokens but the last one, or but the last two, are read: it is on its way.
            taken = await self.read(stream, self.luck.choice((1, 2)))
            stream.cancel()
            return taken
        taken = await self.read(stream, self.luck.choice((1, 1, 2, 3)))
        if moment == "as a token arrives":
            stream.cancel()
        elif moment == "twice":
            stream.cancel()
            self.spin()
            stream.cancel(EndReason.CLIENT_DISCONNECTED)
        elif moment == "after a spin":
            self.spin()
            stream.cancel()
        elif moment == "after a sleep":
            await anyio.sleep(self.luck.uniform(0, 2 * self.step_s))
            stream.cancel()
        elif moment == "from a thread":

            def act() -> None:
                self.spin()
                stream.cancel()

            await anyio.to_thread.run_sync(act)
        else:
            raise AssertionError(moment)
        return taken

    def spin(self) -> None:
        """Let up to two steps go by, more finely than any sleep could."""
        until = time.perf_counter() + self.luck.uniform(0, 2 * self.step_s)
        while time.perf_counter() < until:
            pass

    async def until_started(self, stream: Stream) -> None:
        while stream.report.timeline.started_ns is None and stream.end_reason is None:
            await anyio.lowlevel.checkpoint()

    async def read(self, stream: Stream, count: int) -> int:
        """Read so many tokens, which must be exact; return how many there were."""
        texts: list[str] = []
        async for chunk in stream:
            texts.append(chunk.text)
            if len(texts) == count:
                break
        assert "".join(texts) == self.says(len(texts))
        return len(texts)

    async def cancelled(self, moment: str) -> None:
        """One request that is cancelled at this moment, and often one that already waits behind it."""
        window = self.luck.choice(WINDOWS)
        max_tokens = 3 if moment == "at the natural end" else None
        async with self.supervisor.stream(
            self.prompt, window=window, max_tokens=max_tokens, **self.asked
        ) as stream:
            taken = await self.cancel(stream, moment)
            if self.luck.random() < 0.2:
                await self.exact()
            report = await stream.released()
        self.reports.append(report)
        assert report.is_released
        usage = report.usage
        if report.end_reason is EndReason.LENGTH:
            assert moment == "at the natural end"
            assert usage.computed_tokens == 3
        else:
            assert report.end_reason is EndReason.CANCELLED
            assert report.stage is (None if report.timeline.submitted_ns is None else Stage.IN_BAND)
        if report.timeline.started_ns is not None:
            assert taken <= usage.computed_tokens == usage.completion_tokens <= taken + window

    async def exact(self, tokens: int = 4, window: int = 4) -> None:
        """One request that nobody cancels."""
        answer = await self.supervisor.generate("next", max_tokens=tokens, window=window, **self.asked)
        self.reports.append(answer.report)
        assert answer.text == self.says(tokens)
        assert answer.report.end_reason is EndReason.LENGTH
        assert answer.report.usage.completion_tokens == answer.report.usage.computed_tokens == tokens

    async def salvo(self, size: int) -> None:
        """Several requests that run side by side and are cancelled one right after the other, in any order."""
        async with AsyncExitStack() as streams:
            running = [
                await streams.enter_async_context(
                    self.supervisor.stream(self.prompt, window=64, **self.asked)
                )
                for _ in range(size)
            ]
            for stream in running:
                await self.read(stream, 1)
            self.luck.shuffle(running)
            for stream in running:
                self.spin()
                stream.cancel()
            for stream in running:
                report = await stream.released()
                self.reports.append(report)
                assert (report.end_reason, report.stage) == (EndReason.CANCELLED, Stage.IN_BAND)
                assert 1 <= report.usage.computed_tokens <= 65

    async def rage(self, moments: list[str]) -> None:
        """Cancel at all of these moments, with exact requests in between."""
        for moment in moments:
            await self.cancelled(moment)
            if self.luck.random() < 0.35:
                await self.exact()


MOMENTS = (
    "at the submit", "while the prompt is read", "at the natural end", "as a token arrives", "twice",
    "after a spin", "after a sleep", "from a thread",
)  # fmt: skip


async def let_rage(storm: Storm, cancels: int, slots: int) -> None:
    """Cancel so often in all: in one task, or in all slots but one, where a neighbour's long answers stay exact."""
    moments = [MOMENTS[number % len(MOMENTS)] for number in range(cancels)]
    storm.luck.shuffle(moments)
    with anyio.fail_after(PATIENCE_S):
        if slots == 1:
            await storm.rage(moments)
        else:
            over = anyio.Event()

            async def neighbour() -> None:
                while not over.is_set():
                    await storm.exact(40, window=2)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(neighbour)
                async with anyio.create_task_group() as raging:
                    for number in range(1, slots):
                        raging.start_soon(storm.rage, moments[number - 1 :: slots - 1])
                over.set()
        await storm.exact(60)


def check_all(storm: Storm, told: Told, cancels: int) -> None:
    """Each request was told once, by one worker that nobody had to end."""
    released = Counter(event.report.request_id for event in told.of(RequestReleased))
    assert set(released.values()) == {1}
    assert released.keys() == {report.request_id for report in storm.reports}
    assert len(told.of(WorkerSpawned)) == 1
    (pid,) = {report.worker_pid for report in storm.reports} - {None}
    (exited,) = told.of(WorkerExited)
    assert (exited.pid, exited.status) == (pid, "exit code 0"), exited.output_tail
    assert told.of(CancelEscalated) == []
    reasons = Counter(report.end_reason for report in storm.reports)
    # Only at the natural end may a cancel be too late.
    assert cancels * (len(MOMENTS) - 1) // len(MOMENTS) <= reasons[EndReason.CANCELLED] <= cancels


def cut_steps(told: Told) -> int:
    """Return how many steps the worker says were cut, by those who were in them."""
    (line,) = [event.text for event in told.of(WorkerLogged) if event.text.startswith("cut steps: ")]
    return int(line.rsplit(" ", 1)[1])


@asynccontextmanager
async def worker(
    directory: Path, engine: str, model: Path | None, options: dict[str, Any]
) -> AsyncIterator[tuple[Supervisor, Told]]:
    """Yield a supervisor of a checked worker; afterwards it has told everything."""
    told = Told()
    async with Supervisor(
        model,
        engine=engine,
        options=options,
        python=checked(directory),
        escalation=PATIENT,
        restart=QUICK_RESTART,
        graces=StopGraces(exit_s=20),  # it must be able to say its last line
        on_event=told,
    ) as supervisor:
        yield supervisor, told
        assert holds_nothing(supervisor)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("pace_s", [0.0, 0.0001])
async def test_four_thousand_cancels_around_the_steps_of_the_scripted_engine_on_each_back_end(
    pace_s: float, slots: int, tmp_path: Path
) -> None:
    # Without pace nearly every cancel falls between two steps, and with it into one.
    cancels = 4000 // 4
    options = {
        "pace_s": pace_s,
        "slots": slots,
        "step_tokens": slots,  # a step of one token, or of three
        "prefill_s": 2 * pace_s,
        "slice_s": pace_s or 1,
    }
    async with worker(tmp_path, "scripted", None, options) as (supervisor, told):
        step_s = pace_s + 0.00005
        storm = Storm(supervisor, words, step_s, random.Random(f"{pace_s} {slots}"), "a b c d")
        await let_rage(storm, cancels, slots)
    check_all(storm, told, cancels)
    if pace_s:
        assert cut_steps(told) > cancels // 10, "the cancels missed the steps"


async def test_a_thousand_cancels_on_each_back_end_while_the_worker_releases_others(tmp_path: Path) -> None:
    slots, salvos = 4, 250
    async with worker(tmp_path, "scripted", None, {"pace_s": 0.0001, "slots": slots}) as (supervisor, told):
        # Closer together than a step: the next one comes while the worker says the end of the one before.
        storm = Storm(supervisor, words, 0.00005, random.Random(4), "a b c d")
        with anyio.fail_after(PATIENCE_S):
            for _ in range(salvos):
                await storm.salvo(slots)
                await storm.exact()
    check_all(storm, told, salvos * slots)


@pytest.mark.parametrize("slots", [1, 3])
async def test_two_hundred_and_fifty_cancels_around_the_steps_of_llama_cpp_on_each_back_end(
    slots: int, tmp_path: Path
) -> None:
    cancels = 250 // 2
    model = build_model(tmp_path / "loop.gguf", LOOP, context_tokens=512)
    options = {"threads": 1, "batch_tokens": 8, "ubatch": 8, "slots": slots, "n_ctx": 512 * slots}
    async with worker(tmp_path, "llama", model, options) as (supervisor, told):
        storm = Storm(
            supervisor, lambda n: ("abc" * n)[:n], 0.0005, random.Random(slots), "a" * 40 + "c",
            {"temperature": 0},
        )  # fmt: skip
        await let_rage(storm, cancels, slots)
    check_all(storm, told, cancels)
    assert cut_steps(told) > 0, "the cancels missed the steps"
