"""A request's budgets as clocks that run, stand still and start over. Pure: the time is passed in.

queue: waiting while a worker is ready. startup: waiting while none is, started over by load progress.
first_token: from submit. stall: between tokens, only while the worker may compute. consumer: while the buffer
lies untouched. total: wall time from queued.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from infervisor.protocol.endings import EndReason


class Budget(enum.StrEnum):
    """The budgets of a request."""

    QUEUE = "queue"
    STARTUP = "startup"
    FIRST_TOKEN = "first_token"
    STALL = "stall"
    TOTAL = "total"
    CONSUMER = "consumer"


TIMEOUT_OF: Mapping[Budget, EndReason] = {budget: EndReason(f"{budget}_timeout") for budget in Budget}


@dataclass(slots=True)
class _Clock:
    budget_ns: int
    used_ns: int = 0
    since_ns: int | None = None

    def due_ns(self) -> int | None:
        return None if self.since_ns is None else self.since_ns + self.budget_ns - self.used_ns


@dataclass(slots=True)
class Clocks:
    """The clocks of one request. Budgets that are None have no clock."""

    _clocks: dict[Budget, _Clock] = field(default_factory=dict[Budget, _Clock])

    @classmethod
    def of(cls, budgets_ns: Iterable[tuple[Budget, int | None]]) -> Clocks:
        """Return standing clocks for the budgets given in nanoseconds."""
        return cls({budget: _Clock(ns) for budget, ns in budgets_ns if ns is not None})

    def run(self, budget: Budget, now: int) -> int | None:
        """Let the clock run on from where it stands; a running one runs on. Return when it is used up."""
        clock = self._clocks.get(budget)
        if clock is None:
            return None
        if clock.since_ns is None:
            clock.since_ns = now
        return clock.due_ns()

    def hold(self, budget: Budget, now: int) -> None:
        """Let the clock stand still; what it used stays used."""
        clock = self._clocks.get(budget)
        if clock is not None and clock.since_ns is not None:
            clock.used_ns += now - clock.since_ns
            clock.since_ns = None

    def restart(self, budget: Budget, now: int) -> int | None:
        """Give the whole budget again and let the clock run. Return when it is used up."""
        clock = self._clocks.get(budget)
        if clock is None:
            return None
        clock.used_ns = 0
        clock.since_ns = now
        return now + clock.budget_ns

    def stop(self, budget: Budget) -> None:
        """Give the whole budget again and let the clock stand."""
        clock = self._clocks.get(budget)
        if clock is not None:
            clock.used_ns = 0
            clock.since_ns = None

    def postpone(self, budget: Budget, ns: int, now: int) -> None:
        """Forgive a running clock `ns`: time in which nobody could have done anything.

        Never more than what it has run since it was last started: that may have been in the meantime.
        """
        clock = self._clocks.get(budget)
        if clock is not None and clock.since_ns is not None:
            clock.since_ns = min(clock.since_ns + ns, now)

    def budget_ns(self, budget: Budget) -> int | None:
        """Return the whole budget, or None if there is none."""
        clock = self._clocks.get(budget)
        return None if clock is None else clock.budget_ns

    def next_due(self) -> tuple[int, Budget] | None:
        """Return when the next running clock is used up, and which; None if nothing runs."""
        due = [(at, budget) for budget, clock in self._clocks.items() if (at := clock.due_ns()) is not None]
        return min(due, default=None)

    def expired(self, now: int) -> Budget | None:
        """Return the budget that was used up first at `now`, or None."""
        due = self.next_due()
        return due[1] if due is not None and due[0] <= now else None
