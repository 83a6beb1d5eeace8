"""The worker must not outlive its parent.

Two nets: the control pipe's end of file, which the reader thread sees everywhere, and on Linux the
parent-death signal, which works even while a thread holds the interpreter's lock. The signal follows the
*thread* that spawned the worker, which is why the supervisor spawns in its loop's thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def die_with_parent(parent_pid: int) -> bool:
    """Ask for SIGKILL when the parent dies; return whether the parent is still the one that was named.

    Called after exec, because exec of a set-user-id program clears the setting and fork never inherits it.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            error = ctypes.get_errno()
            print(f"worker: no parent-death signal: {os.strerror(error)}", file=sys.stderr)
    # Race "the parent died before prctl": then no signal will ever come, but we already have a new parent.
    return os.getppid() == parent_pid
