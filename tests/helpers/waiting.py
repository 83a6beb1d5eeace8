"""Bounded waits for what no event tells: a condition in this process, or the end of another one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import anyio
import psutil

PATIENCE_S = 20.0


async def until(condition: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Return once `condition()` is true. Raises TimeoutError."""
    with anyio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await anyio.sleep(0.005)


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that waits to be collected has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_gone(pid: int, within_s: float) -> None:
    """Return once a process has ended. Fails if it lives longer."""
    deadline = time.monotonic() + within_s
    while not is_gone(pid):
        assert time.monotonic() < deadline, f"process {pid} still lives after {within_s} s"
        time.sleep(0.01)


def only_worker() -> int:
    """Return the pid of the one child that this process has."""
    (child,) = psutil.Process().children()
    return child.pid


def wait_collectable(pid: int, within_s: float = PATIENCE_S) -> None:
    """Block until the end of a child can be seen, without collecting it.

    Later than `is_gone`: a process of several threads can look like a zombie while the last of them is ending.
    """
    deadline = time.monotonic() + within_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        assert time.monotonic() < deadline, f"process {pid} goes on"
        time.sleep(0.005)
