"""How many threads to compute with while other processes want the cores, too.

Threads wait for each other, so one that shares its processor holds up all: with one of two cores taken, two threads
are slower than one. Hence never more threads than processors that nobody else uses. What counts is what others got
in the last half second: all but this process, its parent and its siblings included. Up to half a processor is
tolerated, so that a light reader costs nothing. Siblings aren't counted twice: one that stays within its share
leaves free what this worker's share needs; if others take that, each sibling gives up its part of the excess.

`choose` is pure. `CoreWatch` runs in the work loop's thread, between steps.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

LOOK_S = 0.5
STALE_S = 5.0
"""After a longer pause between steps, the last count says nothing of now."""
TOLERATED = 0.5
"""Processors' worth of others' work that costs no thread."""
READMITTED = 0.35
"""The same for a thread that comes back: less, so that a load in between changes nothing."""
QUIET_LOOKS = 3
"""So many looks in a row must find room before a thread comes back; one look is enough to take it away."""
_NICE = 1
_USER_SYSTEM_IRQ_SOFTIRQ_STEAL = (0, 2, 5, 6, 7)


@dataclass(frozen=True, slots=True)
class Sample:
    """Counts since the machine started, of the processors that this process may use.

    busy_s: what they did for whoever has at least this process's priority, the hypervisor's other guests included.
    own_s: what this process had of it.
    """

    processors: int
    busy_s: float
    own_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """How many threads now. quiet_looks: how often in a row there was room for one more."""

    threads: int
    quiet_looks: int = 0


def choose(last: Choice, most: int, processors: int, others: float) -> Choice:
    """Return how many threads to use, at most `most`, while others keep `others` processors busy."""
    free = processors - others
    if last.threads > free + TOLERATED:
        return Choice(min(last.threads, max(1, math.floor(free + TOLERATED))))
    if last.threads >= most or last.threads + 1 > free + READMITTED:
        return Choice(last.threads)
    if last.quiet_looks + 1 < QUIET_LOOKS:
        return Choice(last.threads, last.quiet_looks + 1)
    return Choice(min(most, math.floor(free + READMITTED)))


def read_sample(path: str = "/proc/stat") -> Sample | None:
    """Return the counts now, or None where the kernel doesn't tell (not Linux, or a container that hides them)."""
    try:
        allowed = os.sched_getaffinity(0)
        # Whoever is nicer than this process yields to it. A nice process competes with nice ones.
        columns: tuple[int, ...] = _USER_SYSTEM_IRQ_SOFTIRQ_STEAL
        if os.getpriority(os.PRIO_PROCESS, 0) > 0:
            columns = (*columns, _NICE)
        ticks, found = 0, 0
        with open(path, "rb") as file:
            for line in file:
                name, *counts = line.split()
                if not name.startswith(b"cpu"):
                    break
                if name != b"cpu" and int(name[3:]) in allowed:
                    ticks += sum(int(counts[column]) for column in columns)
                    found += 1
        busy_s = ticks / os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError, IndexError):
        return None
    return Sample(found, busy_s, time.process_time()) if found else None


class CoreWatch:
    """Looks twice a second at most and says when to change the number of threads.

    most: threads to use when nobody else is there, at least 1. read: the counters.
    """

    def __init__(self, most: int, read: Callable[[], Sample | None] = read_sample) -> None:
        self._most = most
        self._read = read
        self._choice = Choice(most)
        self._last: Sample | None = None
        self._last_s = 0.0
        # One thread can't become less.
        self._due_s = -math.inf if most > 1 else math.inf

    @property
    def threads(self) -> int:
        """The number chosen last."""
        return self._choice.threads

    def wanted(self, now_s: float) -> int | None:
        """Return the new number of threads, or None if it stays. now_s: a monotonic clock. Call between steps."""
        if now_s < self._due_s:
            return None
        sample = self._read()
        if sample is None:
            self._due_s = math.inf
            return None
        last, elapsed_s = self._last, now_s - self._last_s
        self._last, self._last_s, self._due_s = sample, now_s, now_s + LOOK_S
        if last is None or elapsed_s > STALE_S or last.processors != sample.processors:
            return None
        others = (sample.busy_s - last.busy_s - (sample.own_s - last.own_s)) / elapsed_s
        before = self._choice.threads
        self._choice = choose(self._choice, self._most, sample.processors, max(0.0, others))
        return self._choice.threads if self._choice.threads != before else None
