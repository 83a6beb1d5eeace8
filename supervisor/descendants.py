"""Which processes a worker has started, and which of them live. Only looks: sends no signal.

Runs in the loop's thread, or in the thread that takes an exact sample.
"""

from __future__ import annotations

import contextlib
import os

import psutil


def members_of(group: int, session: int, *, is_collected: bool) -> tuple[int, ...]:
    """Return what lives in a worker's process group but its leader, the worker.

    session: the worker's. is_collected: whether the leader has been collected. Zombies don't count: they hold no
    memory.
    """
    try:
        # Signal 0 is never delivered: it only asks whether there is anybody.
        os.killpg(group, 0)
    except ProcessLookupError:
        return ()
    except PermissionError:
        pass
    members: list[int] = []
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) != group or os.getsid(pid) != session:
                continue
        except OSError:
            continue
        if pid != group:
            if is_alive(pid):
                members.append(pid)
        elif is_collected:
            # Race "the pid is a stranger's already": a number is only given away when no process has it as its
            # group any more, so this whole group is the stranger's.
            return ()
    return tuple(members)


def is_alive(pid: int) -> bool:
    """Whether it is there and no zombie."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def descendants_of(process: psutil.Process) -> list[psutil.Process]:
    """Return its children and theirs; where the kernel lists them, without looking at all processes."""
    try:
        pids = _listed(process.pid)
    except OSError:
        return process.children(recursive=True)
    found: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found.append(psutil.Process(pid))
    return found


def _listed(pid: int) -> set[int]:
    """Return all descendants by the kernel's lists, one for each thread. Raises OSError where there are none."""
    found: set[int] = set()
    unseen = [pid]
    while unseen:
        parent = unseen.pop()
        for thread in _threads_of(parent):
            folder = f"/proc/{parent}/task/{thread}"
            try:
                with open(f"{folder}/children", encoding="ascii") as file:
                    new = {int(child) for child in file.read().split()} - found
            except (FileNotFoundError, ProcessLookupError):
                if os.path.exists(folder):
                    raise
                # Race "it ends while it is looked at": what has ended has no children any more.
                continue
            found |= new
            unseen += new
    return found


def _threads_of(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        if not os.path.exists("/proc/self/task"):
            raise
        return []
