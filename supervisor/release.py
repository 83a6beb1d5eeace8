"""Whether a worker that is gone has given everything back: its memory, its processes, the parent's descriptors.

Pure: the clock and what was found are passed in. A `ReleaseWatch` begins when it is decided that a worker goes, or
when its exit is seen, and ends when nothing is left or nobody wants to wait longer. Runs in the loop's thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from infervisor.protocol.timeline import NS_PER_S

DEFAULT_LIMIT_NS = 5 * NS_PER_S
FIRST_LOOK_NS = NS_PER_S // 50
LONGEST_PAUSE_NS = NS_PER_S // 2
PATIENCE_NS = 60 * NS_PER_S
"""After this long, what is left counts as staying."""


@dataclass(frozen=True, slots=True)
class WorkerRelease:
    """What came back from a worker, and when.

    pss_bytes, uss_bytes: what it had at the last exact look; None if there was none. The kernel takes a process's
    pages back before its exit can be collected. Shared memory of snapshots isn't the worker's and isn't counted.
    seconds: from the decision to end it, or the sight of its exit, to this moment. left: processes that it started
    and that still live. descriptors: of the parent's, still open.
    """

    pss_bytes: int | None
    uss_bytes: int | None
    seconds: float
    left: tuple[int, ...] = ()
    descriptors: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left of it."""
        return not self.left and not self.descriptors


class ReleaseWatch:
    """Follows what is left of one worker. `look` first when it is collected, then whenever `next_look_ns` says."""

    def __init__(
        self,
        begin_ns: int,
        *,
        pss_bytes: int | None = None,
        uss_bytes: int | None = None,
        limit_ns: int = DEFAULT_LIMIT_NS,
    ) -> None:
        self.next_look_ns: int | None = begin_ns
        """When to look again; None once nothing is left, or it is no use."""
        self._begin_ns = begin_ns
        self._pss_bytes = pss_bytes
        self._uss_bytes = uss_bytes
        self._limit_ns = limit_ns
        self._pause_ns = FIRST_LOOK_NS
        self._was_told_late = False
        self._is_complete = False

    def look(self, now_ns: int, left: tuple[int, ...], descriptors: int = 0) -> WorkerRelease:
        """Take what was found, and return how far the release is."""
        waited_ns = now_ns - self._begin_ns
        release = WorkerRelease(self._pss_bytes, self._uss_bytes, waited_ns / NS_PER_S, left, descriptors)
        self._is_complete = release.is_complete
        if release.is_complete or waited_ns >= PATIENCE_NS:
            self.next_look_ns = None
        else:
            self.next_look_ns = now_ns + self._pause_ns
            self._pause_ns = min(2 * self._pause_ns, LONGEST_PAUSE_NS)
        return release

    def late_s(self, now_ns: int) -> float | None:
        """Return for how many seconds it has been waited, once, when that is longer than the limit allows."""
        if self._is_complete or self._was_told_late or now_ns - self._begin_ns <= self._limit_ns:
            return None
        self._was_told_late = True
        return (now_ns - self._begin_ns) / NS_PER_S
