"""What one worker takes of the machine, from its spawn until all of it has come back.

Owns the watches over its memory and its release, and its control group if it has one. They decide; this carries
out. Runs in the loop's thread, but for exact looks at large workers, which take too long for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio.to_thread

from infervisor.supervisor.cgroup import OomWatch, WorkerGroup, make_group
from infervisor.supervisor.memory import MemoryWatch, Verdict
from infervisor.supervisor.process import Sample, WorkerProcess
from infervisor.supervisor.release import ReleaseWatch, WorkerRelease
from infervisor.supervisor.settings import MemoryLimits
from infervisor.supervisor.timers import Timers

IN_LOOP_BYTES = 256 << 20
"""An exact look at more than this takes more than 10 ms, and so is left to a thread."""


class Resources:
    """One worker's. limits: None for no limits. alert_after_ns: how long giving all back may take.

    on_released: called once, when nothing of it is left or it is no use to wait longer. on_late: called once, with
    seconds and what is left, when it is going or gone for longer than that.
    """

    def __init__(
        self,
        process: WorkerProcess,
        limits: MemoryLimits | None,
        alert_after_ns: int,
        timers: Timers,
        *,
        on_released: Callable[[WorkerRelease], None],
        on_late: Callable[[float, tuple[int, ...]], None],
    ) -> None:
        self.sample: Sample | None = None
        self.without_group: str | None = None
        """Why it has no control group of its own though one was asked for."""
        self._process = process
        self._on_released = on_released
        self._on_late = on_late
        self._alert_after_ns = alert_after_ns
        self._has_limits = limits is not None
        self._memory = MemoryWatch(limits)
        self._oom = OomWatch(process.pid)
        self._group: WorkerGroup | None = None
        self._release: ReleaseWatch | None = None
        self._release_alarm = timers.alarm(self._look_at_release)
        if limits is not None and limits.cgroup and limits.hard_bytes is not None:
            made = make_group(process.pid, limits.hard_bytes)
            if isinstance(made, WorkerGroup):
                self._group = made
                self._oom.entered(made.group)
            else:
                self.without_group = made

    # --- while it lives --------------------------------------------------------------------------

    async def look(self, ready_ns: int | None) -> Verdict | None:
        """Look at its memory, exactly now and then. Returns what is to be done about it."""
        now = time.monotonic_ns()
        seen = self._process.sample(now)
        if seen is None:
            return None
        self._oom.look()
        if not self._memory.is_full_due(now, rss_bytes=seen.rss_bytes, ready_ns=ready_ns):
            self.sample = seen
            return None

        def look_exactly() -> Sample | None:
            return self._process.sample(now, full=True)

        if seen.rss_bytes <= IN_LOOP_BYTES:
            exact = look_exactly()
        else:
            exact = await anyio.to_thread.run_sync(look_exactly, abandon_on_cancel=True)
        if exact is None or self._release is not None:
            # Race "it went while a thread looked": what it has is on its way back already.
            return None
        self.sample = exact
        return self._memory.take(exact.used_bytes, now, ready_ns=ready_ns, cost_ns=exact.cost_ns)

    def note_fresh(self, ready_ns: int) -> None:
        """Look at once how much it takes when it has just become ready, where a limit is to be compared with
        that."""
        if self._has_limits:
            exact = self._process.sample(ready_ns, full=True)
            if exact is not None:
                self.sample = exact
                self._memory.take(exact.used_bytes, ready_ns, ready_ns=ready_ns, cost_ns=exact.cost_ns)

    @property
    def fresh_bytes(self) -> int:
        """What it took when it was ready, 0 if that isn't known."""
        return self._memory.grown.fresh_bytes or 0

    # --- when it goes ----------------------------------------------------------------------------

    def begin_release(self, now: int) -> None:
        """It was told to go, or its exit was seen. Idempotent."""
        if self._release is None:
            last = self._process.last_full
            self._release = ReleaseWatch(
                now,
                pss_bytes=None if last is None else last.pss_bytes,
                uss_bytes=None if last is None else last.uss_bytes,
                limit_ns=self._alert_after_ns,
            )
            self._release_alarm.aim(now + self._alert_after_ns + 1)

    def was_oom(self) -> bool:
        """Whether the kernel has killed for memory where it was, since the last look."""
        return self._oom.was_oom()

    def _look_at_release(self) -> None:
        self.look_at_release(is_collected=self._process.status is not None)

    def look_at_release(self, *, is_collected: bool = True) -> None:
        """See what is left of it; again later while there is something."""
        assert self._release is not None
        now = time.monotonic_ns()
        left = self._process.left_over() if is_collected else (self._process.pid,)
        if is_collected and self._group is not None and not self._group.remove():
            left = tuple(sorted({*left, *self._group.members()}))
            self._group.kill()
        release = self._release.look(now, left, self._process.open_descriptors)
        late_s = self._release.late_s(now)
        if late_s is not None:
            self._on_late(late_s, left)
        if self._release.next_look_ns is None and is_collected:
            self._release_alarm.retire()
            self._on_released(release)
        elif is_collected or late_s is None:
            self._release_alarm.aim(self._release.next_look_ns)
