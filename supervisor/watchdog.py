"""Whether a worker moves while it owes a step. Liveness is its work loop's progress, not an answering thread.

Owns the stamp of the last movement and the longest step of each phase. Told what moves by the worker, it asks
`owed` which phases of steps are due, and calls `on_hung` when the worker stands still for too long and
`on_dead` when it then doesn't move while its stacks are written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from infervisor.protocol.messages import Beat
from infervisor.protocol.timeline import NS_PER_S
from infervisor.supervisor.settings import Liveness, to_ns
from infervisor.supervisor.timers import Timers

STEP_PHASES = ("prefill", "decode")
MAX_STEP_NS = 15 * NS_PER_S
"""What a step can count for at most: one that was stretched by a suspended machine must not stretch all graces."""


class Watchdog:
    """The watch over one worker. `owed` returns the phase of every step that the worker owes now."""

    def __init__(
        self,
        settings: Liveness,
        timers: Timers,
        owed: Callable[[], Sequence[str]],
        on_hung: Callable[[float], None],
        on_dead: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._owed = owed
        self._on_hung = on_hung
        self._on_dead = on_dead
        self._alarm = timers.alarm(self._check)
        self._dump_alarm = timers.alarm(self._dump_over)
        self._moved_ns = time.monotonic_ns()
        self._hung_ns = 0
        self.steps = -1
        """The worker's own count, as it last told it."""
        self._longest_ns: dict[str, int] = {}

    @property
    def longest_step_ns(self) -> int:
        """The longest step of any phase seen so far, in ns."""
        return max(self._longest_ns.values(), default=0)

    def moved(self, now: int) -> None:
        """It did something that only a working loop does."""
        self._moved_ns = now

    def beat(self, message: Beat, now: int) -> None:
        """It told its step counter and the longest steps."""
        if message.steps != self.steps:
            self.steps = message.steps
            self._moved_ns = now
        for phase, ns in message.longest_ns.items():
            if phase in STEP_PHASES:
                self._longest_ns[phase] = max(min(ns, MAX_STEP_NS), self._longest_ns.get(phase, 0))

    def watch(self) -> None:
        """Look at what is owed, and ring when the worker has stood still too long for it."""
        owed = self._owed()
        if owed:
            # What is only being prepared needs no step, and isn't measured. It says how long to wait where nothing
            # else does; where a step is owed, the loop must move whatever is prepared beside it.
            phases = [phase for phase in owed if phase in STEP_PHASES] or owed
            limit_ns = max(self._settings.limit_ns(self._longest_ns.get(phase)) for phase in phases)
            self._alarm.aim(self._moved_ns + limit_ns)
        else:
            self._alarm.aim(None)

    def stop(self) -> None:
        """Watch no more, and let go of the worker: an armed time may lie far ahead."""
        self._alarm.retire()
        self._dump_alarm.retire()

    def _check(self) -> None:
        now = time.monotonic_ns()
        self.watch()
        if self._alarm.due_ns is None or self._alarm.due_ns > now:
            return
        self._alarm.aim(None)
        self._hung_ns = now
        self._on_hung((now - self._moved_ns) / NS_PER_S)
        self._dump_alarm.aim(now + to_ns(self._settings.dump_s))

    def _dump_over(self) -> None:
        # Race "it moves in the last moment": a step that was only slow, on a busy machine, costs no reload.
        if self._moved_ns > self._hung_ns:
            self.watch()
        else:
            self._on_dead()
