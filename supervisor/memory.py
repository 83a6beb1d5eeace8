"""What a worker's memory figures mean, and what follows from them: nothing, a replacement in time, or a kill.

Pure: figures and the clock are passed in. One `MemoryWatch` belongs to each worker; whoever samples it asks when
the next exact look is due, and carries out what is decided. Runs in the loop's thread.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from infervisor.protocol.timeline import NS_PER_S
from infervisor.supervisor.settings import MemoryLimits

FULL_PERIOD_NS = 5 * NS_PER_S
LIMITED_PERIOD_NS = NS_PER_S
FULL_COST_FACTOR = 100
"""An exact look walks all pages, some 50 ms for each GB: so rarely that it costs at most 1 % of a core."""
SETTLE_NS = 30 * NS_PER_S
"""How old a worker must be before it is replaced for its size: a replacement costs a load each time."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a process, without shared memory that outlives it.

    pss: its private pages and its share of those that it has in common with others, such as a mapped model.
    uss: its private pages alone. None where the platform can't tell.
    """

    pss: int | None
    uss: int | None


def parse_rollup(text: str) -> Footprint:
    """Return what /proc/PID/smaps_rollup says. Raises ValueError for anything else.

    Pages of shared memory are taken out, because a snapshot belongs to the parent and stays when the worker goes.
    """
    sizes: dict[str, int] = {}
    for line in text.splitlines()[1:]:
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) * 1024
    if "Pss" not in sizes:
        raise ValueError("there is no Pss in it")
    shared = sizes.get("Pss_Shmem", 0)
    private = sum(sizes.get(name, 0) for name in ("Private_Clean", "Private_Dirty", "Private_Hugetlb"))
    # A shared page that nobody else has mapped counts as private; that is what the parent's memory looks like.
    return Footprint(pss=sizes["Pss"] - shared, uss=max(0, private - shared))


class Verdict(enum.StrEnum):
    """What to do with a worker because of its memory."""

    RECYCLE = "recycle"
    """Replace it once a new one is ready."""
    KILL = "kill"
    TOO_SMALL = "too_small"
    """Tell that the soft limit is below what a fresh worker takes, so that a replacement would be pointless."""


@dataclass(frozen=True, slots=True)
class Grown:
    """What is known of one worker. used_bytes: last exact figure. fresh_bytes: the first one after ready."""

    ready_ns: int | None = None
    used_bytes: int | None = None
    fresh_bytes: int | None = None


def verdict(grown: Grown, limits: MemoryLimits, now_ns: int) -> Verdict | None:
    """Return what to do with a worker that has just been looked at."""
    if grown.used_bytes is None:
        return None
    if limits.hard_bytes is not None and grown.used_bytes > limits.hard_bytes:
        return Verdict.KILL
    if limits.soft_bytes is None or grown.ready_ns is None or grown.fresh_bytes is None:
        return None
    if grown.used_bytes <= limits.soft_bytes:
        return None
    if grown.fresh_bytes > limits.soft_bytes:
        return Verdict.TOO_SMALL
    # Race "above the limit as soon as it is used": the next worker would be, too, and workers would be replaced
    # all the time. So each has its time, and what it costs is bounded.
    return Verdict.RECYCLE if now_ns - grown.ready_ns >= SETTLE_NS else None


class MemoryWatch:
    """Follows one worker's memory. `limits`: None only paces the exact looks."""

    def __init__(self, limits: MemoryLimits | None) -> None:
        self.grown = Grown()
        self._limits = limits
        self._taken_ns: int | None = None
        self._cost_ns = 0
        self._asked_ns: dict[Verdict, int] = {}

    def is_full_due(self, now_ns: int, *, rss_bytes: int, ready_ns: int | None) -> bool:
        """Whether to take an exact look now. rss_bytes: from a cheap look, which no exact figure exceeds."""
        if self._taken_ns is None or (ready_ns is not None and self.grown.fresh_bytes is None):
            return True
        lowest = None if self._limits is None else self._limits.lowest_bytes
        period = FULL_PERIOD_NS if lowest is None or rss_bytes <= lowest else LIMITED_PERIOD_NS
        return now_ns - self._taken_ns >= max(period, FULL_COST_FACTOR * self._cost_ns)

    def take(self, used_bytes: int, now_ns: int, *, ready_ns: int | None, cost_ns: int = 0) -> Verdict | None:
        """Take an exact figure: PSS, or RSS where there is none. Returns what to do.

        ready_ns: when the worker became ready, or None. cost_ns: how long the look took. A replacement is asked
        for again after a while, in case it failed; that a limit is too small is said once.
        """
        fresh = self.grown.fresh_bytes
        if fresh is None and ready_ns is not None:
            fresh = used_bytes
        self.grown = Grown(ready_ns, used_bytes, fresh)
        self._taken_ns, self._cost_ns = now_ns, cost_ns
        if self._limits is None:
            return None
        decided = verdict(self.grown, self._limits, now_ns)
        if decided is None:
            return None
        asked_ns = self._asked_ns.setdefault(decided, now_ns)
        if asked_ns != now_ns:
            if decided is Verdict.TOO_SMALL or now_ns - asked_ns < SETTLE_NS:
                return None
            self._asked_ns[decided] = now_ns
        return decided


def too_small_message(limits: MemoryLimits, fresh_bytes: int) -> str:
    """Return what is said once of a soft limit that no worker can keep."""
    return (
        f"memory.soft_bytes={limits.soft_bytes} is less than a fresh worker takes ({fresh_bytes} bytes), so that "
        "replacing it would help nothing: make it larger, or lower n_ctx or slots"
    )


def recycle_message(limits: MemoryLimits, used_bytes: int) -> str:
    """Return why a worker is replaced for its memory."""
    return (
        f"the worker takes {used_bytes} bytes of memory, more than memory.soft_bytes={limits.soft_bytes}, "
        "and is replaced without a lost stream"
    )


def kill_message(limits: MemoryLimits, used_bytes: int) -> str:
    """Return why a worker was killed for its memory."""
    return (
        f"the worker took {used_bytes} bytes of memory, more than memory.hard_bytes={limits.hard_bytes}, "
        "and was killed: make the limit larger, or lower n_ctx or slots"
    )
