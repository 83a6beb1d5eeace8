"""What the first process of a container owes: it takes signals for the service, and collects every orphan.

The kernel gives process 1 no signal that it has no handler for, and makes it the parent of all processes whose own
parent is gone. So the service runs in a child, and the first process does nothing else. Runs before anything is
started: no thread, no event loop. Elsewhere than in process 1 it does nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import NoReturn

FORWARDED = frozenset(
    {
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGCONT,
    }
)


def stand_in_for_init() -> None:
    """Return in a child if this is process 1, and stay behind for signals and orphans; otherwise return at once."""
    if os.getpid() == 1:
        _fork()


def _fork() -> None:
    # Blocked, not handled: a blocked signal waits, so that none gets lost between fork and wait, whatever comes.
    taken = FORWARDED | {signal.SIGCHLD}
    # Ignored by whoever started us, ends of children would not be told.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, taken)
    first = os.getpid()
    child = os.fork()
    if child:
        _watch_over(child, taken)
    # A session of its own: a Ctrl-C at the container's terminal reaches the first process alone, which passes it
    # on. Otherwise it would come twice, and that means something else.
    os.setsid()
    if os.environ.get("WATCHDOG_PID") == str(first):
        os.environ["WATCHDOG_PID"] = str(os.getpid())
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch_over(child: int, taken: frozenset[signal.Signals]) -> NoReturn:
    while True:
        number = signal.sigwait(taken)
        if number != signal.SIGCHLD:
            # Not collected yet, so the number can't belong to anybody else.
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
            continue
        status = _collect(child)
        if status is not None:
            # Nothing to flush, nobody to tell: what is left in the container ends with this process.
            os._exit(exit_code(status))


def _collect(child: int) -> int | None:
    """Collect all that has ended, and return the child's status if it has."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = status


def exit_code(status: int) -> int:
    """Return the exit code of a status as a shell has it: 128 + the number of the signal that ended the process."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
