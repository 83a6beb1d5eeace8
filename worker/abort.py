"""Abort without harm: who is cancelled, what runs now, and how the one stops the other.

One lock guards {in_step, members, cancelled}. It is never held over I/O or a step, so a cancel takes effect
at once from any thread: the control reader's, the urgent thread's, or the work loop's own. The work loop
alone begins and ends steps, opens requests and forgets ids.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")

EARLY_CANCELS = 1024
"""How many cancels of ids that were never submitted are remembered. Ids are never reused, so all that a
forgotten one costs is a cancel that overtook its submit by more than this many others."""


class AttemptCancelled(BaseException):
    """The attempt whose code ran in `Abort.stoppable` was cancelled.

    Not an `Exception`, so that an engine that turns failures of a template into an invalid request can't
    turn a cancel into one.
    """


class _Stop(BaseException):
    """Thrown into the work loop's thread; never leaves `Abort.stoppable`."""


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
        self._stoppable_id: int | None = None
        self._stoppable_thread = 0
        self._throwing = False
        self._stops_sent = 0

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
            self._throw_stop(attempt_id)
            return now_ns if earlier_ns is None else earlier_ns

    def stop_all(self) -> None:
        """Cut the running step or region short and let no other begin: the worker is shutting down."""
        with self._lock:
            self._stopping = True
            if self._in_step:
                self._interrupt()
            self._throw_stop(self._stoppable_id)

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

    def stoppable(self, attempt_id: int, function: Callable[[], T]) -> T:
        """Run Python code that a cancel ends by an asynchronous exception, and return its result.

        For code that a model file or a caller controls, such as a template's endless loop. Can't stop a
        single long call into C. Raises `AttemptCancelled` if the attempt is cancelled before it is done.
        """
        # A stop is thrown at most twice (see `_throw_stop`), and can arrive at any bytecode until the region
        # is closed: so two handlers around the body are enough to never let one out of here.
        results: list[T] = []
        try:
            try:
                try:
                    self._open_region(attempt_id)
                    results.append(function())
                finally:
                    self._close_region()
            except _Stop:
                # Race "stopped while leaving": the body's own closing may have been cut; close again.
                self._close_region()
        except _Stop:
            # Race "stopped again while leaving": the second and last one.
            self._close_region()
        with self._lock:
            # Race "the stop was swallowed" by a finaliser or the code itself: the cancel still counts.
            if self._unwanted(attempt_id):
                raise AttemptCancelled(f"attempt {attempt_id} was cancelled while its Python code ran")
        return results[0]

    # --- the region's ends and the parts that need the lock ------------------------------------------

    def _open_region(self, attempt_id: int) -> None:
        with self._lock:
            if self._unwanted(attempt_id):
                raise AttemptCancelled(f"attempt {attempt_id} was cancelled before its Python code ran")
            self._stoppable_thread = threading.get_ident()
            self._stops_sent = 0
            self._stoppable_id = attempt_id

    def _close_region(self) -> None:
        # Race "stopped while taking the lock": a stop that arrives between taking a lock and entering its
        # `with` block would leave it locked for ever. So closing takes none: each line can be cut anywhere
        # and run again. A canceller raises `_throwing` before it looks at `_stoppable_id`, and we look at
        # `_throwing` after clearing that: one of us sees the other.
        self._stoppable_id = None
        while self._throwing:
            time.sleep(0)
        # Race "thrown but not arrived": take it back, or it would hit whatever runs next. (CPython up to 3.13
        # delivers at the next call or jump, which is inside our handlers; that isn't promised.)
        _set_async_exception(threading.get_ident(), None)

    def _throw_stop(self, attempt_id: int | None) -> None:
        self._throwing = True
        # The second throw is for a first one that a finaliser swallowed ("Exception ignored in …"): it comes
        # with the second stage of the cancel ladder.
        if attempt_id is not None and attempt_id == self._stoppable_id and self._stops_sent < 2:
            self._stops_sent += 1
            _set_async_exception(self._stoppable_thread, _Stop)
        self._throwing = False

    def _unwanted(self, attempt_id: int) -> bool:
        return self._stopping or self._live.get(attempt_id) is not None

    def _interrupt(self) -> None:
        if self._engine is not None:
            self._engine.interrupt()

    def _clear_interrupt(self) -> None:
        if self._engine is not None:
            self._engine.clear_interrupt()


def _set_async_exception(thread: int, exception: type[BaseException] | None) -> None:
    # A null pointer takes back what has not been raised yet.
    value = None if exception is None else ctypes.py_object(exception)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), value)
