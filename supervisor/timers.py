"""One task that wakes whoever is due. The monotonic clock decides; the event loop only sleeps.

If a wake-up comes much too late, the parent itself was stalled (a blocked loop, a stopped process): then
`on_stall` runs first, so that nothing is judged by a clock that ran while nobody could act. It is told for how
long that may have been, in ns.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable

import anyio

from infervisor.protocol.timeline import NS_PER_S

MIN_TIDY = 1024
STALL_NS = 100_000_000
"""A timer that comes this late means that the parent was stalled."""


class Alarm:
    """A callback at a time. Aiming it earlier is at once effective; later is checked when it rings."""

    __slots__ = ("_action", "_armed_ns", "_timers", "due_ns")

    def __init__(self, timers: Timers, action: Callable[[], None]) -> None:
        self._timers = timers
        self._action = action
        self._armed_ns: int | None = None
        self.due_ns: int | None = None

    def aim(self, due_ns: int | None) -> None:
        """Ring at `due_ns`, or not at all."""
        self.due_ns = due_ns
        if due_ns is not None and (self._armed_ns is None or due_ns < self._armed_ns):
            self._armed_ns = due_ns
            self._timers.push(due_ns, self)

    def retire(self) -> None:
        """Never ring again, and let go of the action: an armed time may lie hours ahead."""
        self.due_ns = self._armed_ns = None
        self._action = _nothing

    def waits_for(self, armed_ns: int) -> bool:
        """Whether the entry of this armed time is the one that it would ring by."""
        return self._armed_ns == armed_ns

    def ring(self, armed_ns: int) -> None:
        """Called by the timers when an armed time has come."""
        if armed_ns != self._armed_ns:
            return  # it was aimed earlier meanwhile and has rung
        self._armed_ns = None
        if self.due_ns is None:
            return
        if self.due_ns > armed_ns:
            # Aimed later meanwhile. Even if that has come, too: what is due before it rings before it.
            self.aim(self.due_ns)
            return
        self.due_ns = None
        self._action()


def _nothing() -> None:
    """What a retired alarm does."""


class Timers:
    """All alarms of one supervisor."""

    def __init__(self, on_stall: Callable[[int], None]) -> None:
        self._on_stall = on_stall
        self._heap: list[tuple[int, int, Alarm]] = []
        self._order = itertools.count()
        self._tidy_at = MIN_TIDY
        self._changed = anyio.Event()

    def alarm(self, action: Callable[[], None]) -> Alarm:
        """Return an alarm that isn't aimed yet."""
        return Alarm(self, action)

    def push(self, due_ns: int, alarm: Alarm) -> None:
        """Arm `alarm`; used by the alarm itself."""
        earliest = not self._heap or due_ns < self._heap[0][0]
        heapq.heappush(self._heap, (due_ns, next(self._order), alarm))
        if len(self._heap) > self._tidy_at:
            # Entries that will do nothing, of retired or re-aimed alarms, may lie hours ahead.
            self._heap = [entry for entry in self._heap if entry[2].waits_for(entry[0])]
            heapq.heapify(self._heap)
            self._tidy_at = max(MIN_TIDY, 2 * len(self._heap))
        if earliest:
            self._changed.set()

    async def run(self) -> None:
        """Ring alarms until cancelled."""
        while True:
            self._changed = anyio.Event()
            due_ns = self._heap[0][0] if self._heap else None
            if due_ns is None:
                await self._changed.wait()
                continue
            asleep_ns = now = time.monotonic_ns()
            if due_ns > now:
                with anyio.move_on_after((due_ns - now) / NS_PER_S):
                    await self._changed.wait()
                now = time.monotonic_ns()
                # Race "an alarm was aimed just before the standstill": it isn't the one that this slept for.
                due_ns = self._heap[0][0]
            late_ns = now - due_ns
            if late_ns > STALL_NS:
                # It began some time between going to sleep and the alarm. Doubt counts for the stall, but not for
                # more than it lasted for sure: a loop that is blocked again and again must not stop all clocks.
                self._on_stall(late_ns + min(late_ns, max(0, due_ns - asleep_ns)))
            self._ring_due(now)

    def _ring_due(self, now: int) -> None:
        while self._heap and self._heap[0][0] <= now:
            due_ns, _, alarm = heapq.heappop(self._heap)
            alarm.ring(due_ns)
