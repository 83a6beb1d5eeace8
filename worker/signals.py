"""The second stage of a cancel: SIGUSR1 and the urgent pipe, served by a thread of their own.

Works while the control reader is blocked or jammed and while a step runs, as long as native code lets other
threads have the interpreter. The signal is blocked in every thread, so it never runs a handler and never
interrupts a system call: it waits until this thread asks for it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from infervisor.worker.exits import start_thread

URGENT_SIGNAL = signal.SIGUSR1
ID_BYTES = 8


def block_urgent_signal() -> None:
    """Set the signal mask of the calling thread, and so of every thread that it starts later.

    Sets rather than adds: a mask inherited from the parent must not keep SIGTERM from ending the worker.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, {URGENT_SIGNAL})


class UrgentPipe:
    """Ids from a non-blocking pipe, 8 bytes big-endian each, however the reads are cut."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._rest = b""

    def drain(self) -> list[int]:
        """Return every whole id that has arrived; keep the beginning of an unfinished one."""
        data = self._rest
        while True:
            try:
                piece = os.read(self._fd, 65536)
            except BlockingIOError:
                break
            if not piece:  # the parent is gone: the control reader sees to that
                break
            data += piece
        whole = len(data) - len(data) % ID_BYTES
        self._rest = data[whole:]
        return [int.from_bytes(data[at : at + ID_BYTES], "big") for at in range(0, whole, ID_BYTES)]


def start_urgent_thread(fd: int, cancel: Callable[[int], None]) -> None:
    """Start the thread that waits for the signal and cancels what the urgent pipe names.

    `block_urgent_signal` must have run before any thread was started.
    """
    pipe = UrgentPipe(fd)

    def serve() -> None:
        while True:
            # Race "signal before this thread waits": it stays pending for the process. Race "two signals
            # become one": every one drains the whole pipe.
            signal.sigwait({URGENT_SIGNAL})
            for attempt_id in pipe.drain():
                cancel(attempt_id)

    start_thread("urgent", serve)
