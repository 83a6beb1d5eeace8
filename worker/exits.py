"""How the worker process ends: the one table of exit codes, and the exit that nothing can hold up.

The numbers are those of BSD's <sysexits.h>, so that they can't be mistaken for an interpreter's 1 or 2 or
for a shell's 128 + signal.
"""

from __future__ import annotations

import enum
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn


class Exit(enum.IntEnum):
    """What the worker's exit code says."""

    ASKED_FOR = 0
    """Shutdown was asked for, or the parent is gone: nothing went wrong here."""
    BAD_ARGUMENTS = 64
    """The command line is not one that a supervisor writes; nothing was started."""
    LOAD_FAILED = 69
    """The engine refused or failed to load; a `failed` frame said why."""
    INTERNAL_ERROR = 70
    """A defect of the worker or its engine; the traceback is on standard error."""
    BROKEN_CONTROL = 76
    """The parent broke the rules of the control pipe; the rule is on standard error."""


def leave(code: Exit, message: str | None = None) -> NoReturn:
    """End the process now, from any thread, whatever other threads and native code are doing.

    With a `message`, standard output is flushed and the message goes to standard error first. Without one
    nothing is written, since nobody may be reading any more. Interpreter shutdown is skipped on purpose: it
    waits for threads and runs exit handlers of libraries that may hang.
    """
    if message is not None:
        for stream, text in ((sys.stdout, ""), (sys.stderr, message and message.rstrip("\n") + "\n")):
            try:
                stream.write(text)
                stream.flush()
            except (OSError, ValueError, AttributeError):
                continue
    os._exit(code)


def start_thread(name: str, target: Callable[[], None]) -> None:
    """Start a daemon thread. A defect in it ends the process: a worker gone half deaf is worse than none."""

    def run() -> None:
        try:
            target()
        except BaseException:
            leave(Exit.INTERNAL_ERROR, f"worker: thread {name} failed\n{traceback.format_exc()}")

    threading.Thread(target=run, name=name, daemon=True).start()
