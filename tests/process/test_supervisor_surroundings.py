"""What surrounds a supervisor: the host's variables, its standard streams, and what its loop can't do."""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from infervisor import Supervisor, WorkerDied
from tests.helpers.models import LOOP, build_model
from tests.helpers.supervised import Told, answers, scripted

pytestmark = pytest.mark.anyio

SECRET = "sk-4b1d-not-for-workers"
LEAKS = ("OPENAI_API_KEY", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME", "LD_LIBRARY_PATH", "LD_PRELOAD")


def variables_of(pid: int) -> dict[str, str]:
    """Return the variables that a process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


async def test_neither_secrets_nor_loader_variables_reach_the_worker_or_what_is_told_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in LEAKS:
        monkeypatch.setenv(name, f"/nowhere/{SECRET}")
    monkeypatch.setenv("LANGUAGE", "de")
    faults = [{"at": "decode", "kind": "segfault", "prompt_contains": "crash"}]
    async with scripted({"faults": faults}, env={"MINE": "given", "LANGUAGE": None}) as (supervisor, told):
        there = variables_of(await answers(supervisor))
        with pytest.raises(WorkerDied) as caught:
            await supervisor.generate("crash")
        await answers(supervisor)
    assert there["MINE"] == "given"
    assert not {*LEAKS, "LANGUAGE"} & there.keys()
    assert SECRET not in f"{there} {told.events} {caught.value} {caught.value.output_tail}"


async def test_standard_streams_that_are_no_files_disturb_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build_model(tmp_path / "loop.gguf", LOOP)
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.StringIO())  # as in a notebook: it has no descriptor
    told = Told()
    async with Supervisor(path, options={"threads": 1}, on_event=told) as supervisor:
        # The second time, the library could speak of a prompt that it knows already.
        said = [(await supervisor.generate("c", max_tokens=5)).text for _ in range(3)]
    assert said == ["abcab"] * 3


class LoopWithoutProcesses(asyncio.SelectorEventLoop):
    """A loop that can't start processes, as the selector loop of some systems."""

    async def subprocess_exec(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError

    async def subprocess_shell(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError


def test_a_loop_that_cannot_start_processes_is_enough() -> None:
    async def life() -> None:
        async with scripted() as (supervisor, _):
            await answers(supervisor)

    with asyncio.Runner(loop_factory=LoopWithoutProcesses) as runner:
        runner.run(life())
