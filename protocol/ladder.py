"""The cancel ladder as data: an in-band message, then a signal, then a kill.

Each rung has a grace: how long the rung before it may take. A grace is a floor or a multiple of the longest
step that the worker has shown, whichever is longer, since a step in native code can't be hurried and a kill
costs a reload. The clock starts at the caller's cancel.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace


class Stage(enum.StrEnum):
    """The rungs, lowest first. The report says which one did it."""

    IN_BAND = "in_band"
    SIGNAL = "signal"
    KILL = "kill"


@dataclass(frozen=True, slots=True)
class Rung:
    """A stage and the grace before it: max(floor_ns, longest step × step_factor)."""

    stage: Stage
    floor_ns: int = 0
    step_factor: float = 0.0

    def grace_ns(self, longest_step_ns: int) -> int:
        """Return how long to wait before this rung, given the longest step seen."""
        return max(self.floor_ns, int(longest_step_ns * self.step_factor))


@dataclass(frozen=True, slots=True)
class Ladder:
    """Where a cancel stands. `stage` is the last rung taken; `since_ns` from when the next grace counts."""

    rungs: Sequence[Rung]
    since_ns: int
    taken: int = 0

    @property
    def stage(self) -> Stage | None:
        """The last rung taken, or None before the first."""
        return self.rungs[self.taken - 1].stage if self.taken else None

    def due_ns(self, longest_step_ns: int) -> int | None:
        """Return when the next rung is due, or None at the top."""
        if self.taken == len(self.rungs):
            return None
        return self.since_ns + self.rungs[self.taken].grace_ns(longest_step_ns)

    def climb(self, now: int, longest_step_ns: int) -> tuple[Ladder, Stage | None]:
        """Return the ladder one rung higher and the stage to carry out, if its grace is over at `now`.

        A call that comes late doesn't skip rungs: each gets its own grace from when the one before was taken;
        only the second one's grace counts from the cancel, as the first one's does.
        """
        due = self.due_ns(longest_step_ns)
        if due is None or due > now:
            return self, None
        return replace(self, taken=self.taken + 1, since_ns=now if self.taken else self.since_ns), (
            self.rungs[self.taken].stage
        )

    def top(self, now: int) -> tuple[Ladder, Stage | None]:
        """Go straight to the last rung: the caller won't wait."""
        if self.taken == len(self.rungs):
            return self, None
        return replace(self, taken=len(self.rungs), since_ns=now), self.rungs[-1].stage
