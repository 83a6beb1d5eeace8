"""Proof that a test left nothing: no child process, no descriptor, no thread."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

SETTLE_S = 5.0


def _descriptors() -> dict[int, str]:
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    return found


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@contextmanager
def no_leftovers() -> Iterator[None]:
    """Fail if children, descriptors or threads outlive the block; they get a moment to end."""
    gc.collect()
    children, descriptors, threads = _children(), _descriptors(), set(threading.enumerate())
    yield
    deadline = time.monotonic() + SETTLE_S
    while True:
        gc.collect()
        new_children = _children() - children
        new_descriptors = {fd: to for fd, to in _descriptors().items() if fd not in descriptors}
        # Pool threads of the event loop idle on for the next call; they are not ours.
        new_threads = {
            thread
            for thread in set(threading.enumerate()) - threads
            if "AnyIO" not in thread.name
            and "Trio thread" not in thread.name
            and "asyncio_" not in thread.name
        }
        if not (new_children or new_descriptors or new_threads):
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    assert not new_children, f"children left: {new_children}"
    assert not new_descriptors, f"descriptors left: {new_descriptors}"
    assert not new_threads, f"threads left: {new_threads}"
