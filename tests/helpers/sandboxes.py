"""Sandboxes for tests: made for a table model, closed and looked after; and a look at their processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from infervisor.worker.engines.llama.sandbox import Rendered, Sandbox
from infervisor.worker.engines.llama.sandbox_job import Limits
from tests.helpers.leaks import no_leftovers
from tests.helpers.models import CHATML, ENDLESS
from tests.helpers.waiting import PATIENCE_S

ORIGIN = "the model's chat template"
SPELLINGS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
USER = {"role": "user", "content": "hi"}
LONG = "{% if messages[0].content == 'endless' %}" + ENDLESS + "{% endif %}" + CHATML
ENDLESS_MESSAGE = {"role": "user", "content": "endless"}
"""With the template LONG, a job that only its limits end."""
GOOD = 'root ::= "a" [b-c]*'
SHORT = Limits(cpu_s=1)

Make = Callable[..., Sandbox]


@contextlib.contextmanager
def sandboxes(model: Path) -> Iterator[Make]:
    """Yield what makes sandboxes; they must leave nothing behind."""
    with no_leftovers(), contextlib.ExitStack() as stack:

        def made(template: str | None = CHATML, limits: Limits = SHORT, path: Path = model) -> Sandbox:
            sandbox = Sandbox(str(path), template, ORIGIN, "<s>", "</s>", SPELLINGS, limits)
            stack.callback(sandbox.close)
            return sandbox

        yield made


def text_of(sandbox: Sandbox, *messages: dict[str, Any]) -> str:
    """Return the rendered text with the caller's own words in it."""
    rendered = sandbox.render(messages or [USER], None, None)
    return rendered.literals.restore(rendered.text)


def process_of(sandbox: Sandbox) -> psutil.Process:
    """Return the sandbox process, which has answered already, once no job of it is left."""
    assert sandbox.pid is not None
    process = psutil.Process(sandbox.pid)
    deadline = time.monotonic() + PATIENCE_S
    while process.children():
        assert time.monotonic() < deadline, "a job goes on"
        time.sleep(0.002)
    return process


def child_of(process: psutil.Process, other_than: int | None = None) -> psutil.Process:
    """Return the process of the one job that runs."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = [child for child in process.children() if child.pid != other_than]
        if found:
            return found[0]
        assert time.monotonic() < deadline, "no job began"
        time.sleep(0.002)


def wait_collected(pid: int) -> None:
    """Return once nothing of a process can be seen, not even a zombie."""
    deadline = time.monotonic() + PATIENCE_S
    while psutil.pid_exists(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.002)


@contextlib.contextmanager
def running(sandbox: Sandbox) -> Iterator[Future[Rendered]]:
    """Let a job run that only its limits end."""
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(sandbox.render, [ENDLESS_MESSAGE], None, None)
