"""Many requests that are left, cancelled and killed in a row and at once: nothing is left, nothing is mixed up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import anyio
import anyio.lowlevel
import anyio.to_thread
import psutil
import pytest

from infervisor import EndReason, Stage, Stream
from infervisor.supervisor.events import RequestReleased, WorkerSpawned
from tests.helpers.inside import PATIENT, holds_nothing, until, words, worker_of
from tests.helpers.supervised import scripted

pytestmark = pytest.mark.anyio


async def test_fifty_submits_and_cancels_of_large_prompts_leave_every_answer_exact() -> None:
    size = 200_000
    options = {"mode": "echo", "slots": 4}
    async with scripted(options, max_queue=64, escalation=PATIENT) as (supervisor, told):
        wrong: list[str] = []

        async def one(number: int) -> None:
            # One huge word and a small one: the answer names its request.
            prompt = f"{'x' * size} end{number}"
            async with supervisor.stream(prompt, window=8) as stream:
                if number % 2:
                    if number % 4 == 1:
                        stream.cancel()
                    else:
                        await anyio.lowlevel.checkpoint()
                        stream.cancel()
                    await stream.released()
                elif await stream.text() != prompt:
                    wrong.append(f"answer {number}")

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for number in range(50):
                    tasks.start_soon(one, number)
        assert wrong == []
        assert holds_nothing(supervisor)
        assert len(told.of(WorkerSpawned)) == 1
        reasons = Counter(event.report.end_reason for event in told.of(RequestReleased))
        # A cancel that comes a moment later may find that the answer is whole.
        assert reasons[EndReason.CANCELLED] >= 13
        assert reasons[EndReason.CANCELLED] + reasons[EndReason.STOP] == 50
        assert (await supervisor.generate("all of this again")).text == "all of this again"


@pytest.mark.parametrize("moment", ["queued", "running"])
async def test_killing_a_stream_goes_straight_to_the_last_rung(moment: str) -> None:
    async with scripted({"pace_s": 0.01}, escalation=PATIENT) as (supervisor, told):
        pid = worker_of(supervisor).pid
        async with supervisor.stream("first") as first:
            await first.__anext__()
            async with supervisor.stream("second", max_tokens=3) as second:
                victim: Stream = first if moment == "running" else second
                act: Callable[[], None] = victim.kill
                await anyio.to_thread.run_sync(act)
                report = await victim.released()
                assert report.end_reason is EndReason.CANCELLED
                if moment == "running":
                    assert report.stage is Stage.KILL
                    # The in-band cancel may have freed it a moment before the kill did.
                    await until(lambda: not psutil.pid_exists(pid))
                    assert await second.text() == words(3)
                    assert supervisor.status().worker_pid != pid
                else:
                    assert report.stage is None
                    assert worker_of(supervisor).pid == pid
                    assert first.end_reason is None
        assert len(told.of(WorkerSpawned)) == (2 if moment == "running" else 1)
