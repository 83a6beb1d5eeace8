"""Abort without harm: who is cancelled, what runs now, and how the one stops the other.

One lock guards {in_step, members, cancelled}. It is never held over I/O or a step, so a cancel takes effect
at once from any thread: the control reader's, the urgent thread's, or the work loop's own. The work loop
alone begins and ends steps, opens requests and forgets ids.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

EARLY_CANCELS = 1024
"""How many cancels of ids that were never submitted are remembered. Ids are never reused, so all that a
forgotten one costs is a cancel that overtook its submit by more than this many others."""


class Interruptible(Protocol):
    """The part of an engine that a cancel needs."""

    def interrupt(self) -> None:
        """Make the running step return soon."""
        ...

    def clear_interrupt(self) -> None:
        """Forget an interrupt."""
        ...


class Abort:
    """The cancels of one worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engine: Interruptible | None = None
        self._in_step = False
        self._members: Sequence[int] = ()
        self._live: dict[int, int | None] = {}
        """Attempts here, with the time at which their cancel was noticed."""
        self._early: OrderedDict[int, int] = OrderedDict()
        """Cancels of ids that aren't live: ahead of their submit, or too late."""
        self._stopping = False
        self.any_cancelled = False
        """Whether an attempt that is here may be cancelled: spares asking for each before every step."""

    def attach(self, engine: Interruptible) -> None:
        """Name the engine whose steps a cancel interrupts. Before the first step."""
        self._engine = engine

    # --- from any thread ---------------------------------------------------------------------------

    def admit(self, attempt_id: int) -> bool:
        """Count an attempt as here from now on. Returns False, and changes nothing, for one that is."""
        with self._lock:
            if attempt_id in self._live:
                return False
            # Race "the cancel overtook its submit" (urgent pipe, or cancels jumping the parent's queue):
            # it was remembered, and applies now.
            noticed_ns = self._live[attempt_id] = self._early.pop(attempt_id, None)
            if noticed_ns is not None:
                self.any_cancelled = True
            return True

    def cancel(self, attempt_id: int) -> int:
        """Cancel an attempt; return when its first cancel was noticed (`time.monotonic_ns`). Idempotent."""
        now_ns = time.monotonic_ns()
        with self._lock:
            if attempt_id not in self._live:
                noticed_ns = self._early.setdefault(attempt_id, now_ns)
                if len(self._early) > EARLY_CANCELS:
                    self._early.popitem(last=False)
                return noticed_ns
            earlier_ns = self._live[attempt_id]
            if earlier_ns is None:
                self._live[attempt_id] = now_ns
                self.any_cancelled = True
            # Race "cancelled between two steps": nothing to interrupt; `begin_step` leaves it out.
            # Race "another's step": members that nobody cancelled must not lose their step.
            if self._in_step and attempt_id in self._members:
                self._interrupt()
            return now_ns if earlier_ns is None else earlier_ns

    def stop_all(self) -> None:
        """Cut the running step short and let no other begin: the worker is shutting down."""
        with self._lock:
            self._stopping = True
            if self._in_step:
                self._interrupt()

    # --- from the work loop's thread ---------------------------------------------------------------

    def noticed_ns(self, attempt_id: int) -> int | None:
        """Return when the attempt's cancel was noticed, or None if it isn't cancelled."""
        with self._lock:
            return self._live.get(attempt_id)

    def forget(self, attempt_id: int) -> int | None:
        """Count the attempt as gone; return when its cancel was noticed, or None."""
        with self._lock:
            noticed_ns = self._live.pop(attempt_id, None)
            if noticed_ns is not None:
                self.any_cancelled = any(ns is not None for ns in self._live.values())
            return noticed_ns

    def begin_step(self, attempt_ids: Sequence[int]) -> Sequence[int]:
        """Publish the members of a step; return those still wanted, which alone may be in it.

        Always followed by `end_step`, even when nobody is left.
        """
        with self._lock:
            # Race "interrupt after the last node": set for a step that had finished by then. Forget it
            # before anyone can set it for this one.
            self._clear_interrupt()
            wanted = list(attempt_ids)
            if self.any_cancelled or self._stopping:
                wanted = [i for i in attempt_ids if self._live.get(i) is None and not self._stopping]
            self._members = wanted
            self._in_step = True
            return wanted

    def end_step(self) -> None:
        """Unpublish the members: from here on no cancel touches the engine."""
        with self._lock:
            self._in_step = False
            self._members = ()
            self._clear_interrupt()

    def _interrupt(self) -> None:
        if self._engine is not None:
            self._engine.interrupt()

    def _clear_interrupt(self) -> None:
        if self._engine is not None:
            self._engine.clear_interrupt()
