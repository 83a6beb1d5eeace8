"""Looks inside a supervisor that tests need: what it holds, and a bounded wait for a condition."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import anyio
import psutil

from infervisor import Escalation, Stream, Supervisor
from infervisor.protocol.messages import Message
from infervisor.supervisor.dispatcher import Dispatcher
from infervisor.supervisor.request import Request
from infervisor.supervisor.worker import Worker

POLL_S = 0.005
PATIENT = Escalation(signal_after_s=20, kill_after_s=20, alert_after_s=20)
"""For tests of the first rung: a busy machine must not look like a worker that doesn't obey."""


async def until(condition: Callable[[], bool], within_s: float = 20) -> None:
    """Return once `condition` holds; fail if it doesn't within the time."""
    with anyio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110 (what is looked at rings no bell)
            await anyio.sleep(POLL_S)


def dispatcher_of(supervisor: Supervisor) -> Dispatcher:
    """Return the owner of its requests."""
    dispatcher = supervisor._dispatcher
    assert dispatcher is not None
    return dispatcher


def worker_of(supervisor: Supervisor) -> Worker:
    """Return the worker that is there now."""
    worker = dispatcher_of(supervisor).pool.first
    assert worker is not None
    return worker


def request_of(stream: Stream) -> Request:
    """Return the request behind a stream."""
    return stream._request


def holds_nothing(supervisor: Supervisor) -> bool:
    """Whether no request or attempt is listed anywhere."""
    dispatcher = dispatcher_of(supervisor)
    worker = dispatcher.pool.first
    return not (
        dispatcher.requests
        or dispatcher.attempts
        or dispatcher.queue
        or (worker is not None and worker.attempts)
    )


async def until_buffered(stream: Stream, tokens: int) -> None:
    """Wait until so many tokens have arrived that nobody took."""
    await until(lambda: request_of(stream).window.buffered >= tokens)


async def read_into(stream: Stream, texts: list[str]) -> None:
    """Read a stream to its end; what came before an error is in `texts`."""
    async for chunk in stream:
        texts.append(chunk.text)


def record_sent(supervisor: Supervisor) -> list[Message]:
    """Return a list that grows with every message that is sent to the worker that is there now."""
    link = worker_of(supervisor).link
    sent: list[Message] = []
    send = link.send

    def record(message: Message) -> int:
        sent.append(message)
        return send(message)

    link.send = record  # type: ignore[method-assign]
    return sent


async def freeze(pid: int) -> None:
    """Stop a process and wait until each of its threads stands still: the signal takes its time."""
    os.kill(pid, signal.SIGSTOP)

    def stands_still() -> bool:
        threads = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in threads)

    await until(stands_still)


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def words(count: int, start: int = 0) -> str:
    """Return what the scripted engine counts."""
    return "".join(f"w{i} " for i in range(start, start + count))


async def next_is_exact(supervisor: Supervisor) -> None:
    """The worker is free and unharmed: it answers the next request as ever."""
    with anyio.fail_after(20):
        assert (await supervisor.generate("next", max_tokens=5)).text == words(5)
