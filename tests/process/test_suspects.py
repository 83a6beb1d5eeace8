"""A request that kills its workers: it is found out, alone, and those who were with it lose nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest

from infervisor import EndReason, Liveness, ModelLoadError, Poisoned, RestartPolicy, Supervisor, Unavailable
from infervisor.protocol.machines.process import DeathCause
from infervisor.supervisor.events import BreakerOpened, WorkerExited, WorkerSpawned
from tests.helpers.inside import request_of, until, words, worker_of
from tests.helpers.supervised import QUICK_LIVENESS, Told, answers, scripted

pytestmark = pytest.mark.anyio

PATIENT = RestartPolicy(max_restarts=50, backoff_initial_s=0.01, backoff_max_s=0.05)


def killer(kind: str = "segfault", after: int = 2, **parts: Any) -> dict[str, Any]:
    """Return a fault that only one prompt brings about, each time."""
    return {"at": "decode", "kind": kind, "after": after, "prompt_contains": "poison", **parts}


@pytest.mark.produces("end: poisoned")
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("segfault", "SIGSEGV(-11)"),
        ("exit", "exit code 3"),
        ("garbage", "protocol error"),
        ("hang", "unresponsive"),
    ],
)
async def test_a_request_whose_worker_dies_twice_with_nobody_else_in_it_is_poisoned(
    kind: str, how: str
) -> None:
    liveness = QUICK_LIVENESS if kind == "hang" else Liveness()
    options = {"faults": [killer(kind)]}
    async with scripted(options, on_crash="resume", restart=PATIENT, liveness=liveness) as (supervisor, told):
        with pytest.raises(Poisoned) as caught:
            await supervisor.generate("poison", max_tokens=9)
        assert caught.value.code == "poisoned"
        assert not caught.value.retryable
        assert str(caught.value).startswith(
            f"the request was in 2 workers when they died, alone both times: {how}, {how}; it is not tried again"
        )
        report = caught.value.report
        assert report.end_reason is EndReason.POISONED
        assert len(report.resumes) == 1
        await answers(supervisor)
        assert len(told.of(WorkerExited)) == 2


async def test_those_who_were_with_it_go_on_one_by_one_and_only_the_guilty_one_ends() -> None:
    options = {"slots": 4, "pace_s": 0.005, "faults": [killer(after=10)]}
    texts: dict[str, str] = {}
    async with scripted(options, on_crash="resume", restart=PATIENT) as (supervisor, told):

        async def ask(prompt: str) -> None:
            texts[prompt] = (await supervisor.generate(prompt, max_tokens=60)).text

        async def ask_for_poison() -> None:
            with pytest.raises(Poisoned, match="in 3 workers when they died, alone in 2 of them"):
                await supervisor.generate("poison", max_tokens=60)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for prompt in ("one", "two"):
                    tasks.start_soon(ask, prompt)
                tasks.start_soon(ask_for_poison)
                tasks.start_soon(ask, "three")
        assert texts == dict.fromkeys(("one", "two", "three"), words(60))
        first, *later = told.of(WorkerExited)
        assert len(first.requests) == 4
        assert [len(exited.requests) for exited in later] == [1, 1], "after the first death it was alone"
        assert later[0].requests == later[1].requests


async def test_nobody_joins_a_suspect() -> None:
    options = {"slots": 2, "faults": [killer()]}
    async with scripted(options, on_crash="resume", restart=PATIENT) as (supervisor, told):
        async with supervisor.stream("poison", max_tokens=9) as poison:
            await told.wait_for(WorkerExited)
            # It comes while the next worker is being started, which has places for both.
            newcomer = await supervisor.generate("hello", max_tokens=9)
            with pytest.raises(Poisoned):
                await poison.text()
        assert [exited.requests for exited in told.of(WorkerExited)] == [(poison.report.request_id,)] * 2
        assert (newcomer.text, newcomer.report.resumes) == (words(9), ())


async def test_kills_from_outside_accuse_nobody() -> None:
    async with scripted(on_crash="resume", restart=PATIENT) as (supervisor, told):
        # Nobody reads meanwhile: with this window it can't come to its end between the kills.
        async with supervisor.stream("hello", max_tokens=30, window=2) as stream:
            for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
                await until(lambda: supervisor.status().in_flight == 1)
                pid = worker_of(supervisor).pid
                os.kill(pid, number)
                await told.wait_for(WorkerExited, lambda event, pid=pid: event.pid == pid)  # type: ignore[misc]
            assert not request_of(stream).suspicion.is_suspect
            assert await stream.text() == words(30)
        assert len(stream.report.resumes) == 4


async def test_tokens_acquit_so_that_deaths_far_apart_do_not_poison(tmp_path: Path) -> None:
    # Crashes of chance: each place once, 40 tokens apart.
    faults = [killer(after=40 * n, once_file=str(tmp_path / str(n))) for n in (1, 2, 3, 4)]
    async with scripted({"faults": faults}, on_crash="resume", restart=PATIENT) as (supervisor, told):
        answer = await supervisor.generate("poison", max_tokens=200)
        assert answer.text == words(200)
        assert len(answer.report.resumes) == len(told.of(WorkerExited)) == 4


# --- a breaker that is open for good -------------------------------------------------------------------


@pytest.mark.produces("slot: open × CauseGone → starting", "slot: open × WorkerWanted → open")
async def test_a_model_that_cannot_be_loaded_is_tried_again_when_its_file_has_changed(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"bad weights")
    faults = [{"at": "load", "kind": "load_refused", "once_file": str(tmp_path / "once"), "message": "bad"}]
    told = Told()
    supervisor = Supervisor(
        model, engine="scripted", options={"faults": faults}, on_event=told, wait_until_ready=False,
        restart=RestartPolicy(cooldown_s=0),
    )  # fmt: skip
    async with supervisor:
        opened = await told.wait_for(BreakerOpened)
        assert opened.cooldown_s is None, "time alone heals nothing"
        for _ in range(3):
            with pytest.raises(
                Unavailable, match=r"bad; none is started before the model's file changes"
            ) as caught:
                await supervisor.generate("hello", max_tokens=3)
            assert not caught.value.retryable
        with pytest.raises(ModelLoadError, match="bad"):
            await supervisor.wait_ready()
        assert len(told.of(WorkerSpawned)) == 1
        model.write_bytes(b"good weights, and more of them")
        await told.wait_for(WorkerSpawned, count=2)
        await supervisor.wait_ready()
        await answers(supervisor)
        assert told.of(WorkerExited)[0].cause is DeathCause.LOAD_FAILED
