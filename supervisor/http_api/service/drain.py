"""How the service ends: which signal means what, and when. Pure; the clock is passed in.

serving → draining (new requests are refused, running ones may finish within the grace) → cancelling (what is left
is ended as shutting_down, with a terminal for each stream) → the end. A second signal skips the grace, a third one
everything. `service` carries it out.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, replace


class Phase(enum.StrEnum):
    """How far the end has come."""

    SERVING = "serving"
    DRAINING = "draining"
    CANCELLING = "cancelling"


class Act(enum.Enum):
    """What is to be done now."""

    RECYCLE = enum.auto()
    """Replace all workers, without a gap."""
    BEGIN_DRAIN = enum.auto()
    """Refuse new requests, and wait for those that run until `until_ns`."""
    CANCEL = enum.auto()
    """End what is left."""
    LEAVE = enum.auto()
    """End this process at once."""


@dataclass(frozen=True, slots=True)
class Ending:
    """State: the phase, how often somebody asked for the end, and when the grace is over."""

    phase: Phase = Phase.SERVING
    asked: int = 0
    until_ns: int | None = None


ENDS = frozenset({signal.SIGTERM, signal.SIGINT})


def on_signal(state: Ending, number: int, now_ns: int, grace_ns: int) -> tuple[Ending, Act | None]:
    """Return the next state and what to do."""
    if number == signal.SIGHUP:
        # During the end it would start workers that nobody needs.
        return state, Act.RECYCLE if state.phase is Phase.SERVING else None
    if number not in ENDS:
        return state, None
    asked = state.asked + 1
    if asked >= 3:
        return replace(state, asked=asked), Act.LEAVE
    if state.phase is Phase.SERVING and grace_ns > 0:
        return Ending(Phase.DRAINING, asked, now_ns + grace_ns), Act.BEGIN_DRAIN
    if state.phase is Phase.CANCELLING:
        return replace(state, asked=asked), None
    return Ending(Phase.CANCELLING, asked), Act.CANCEL


def on_idle(state: Ending) -> tuple[Ending, Act | None]:
    """Return what follows when no request is left: there is nothing to wait for."""
    if state.phase is not Phase.DRAINING:
        return state, None
    return Ending(Phase.CANCELLING, state.asked), Act.CANCEL


def on_failure(state: Ending) -> tuple[Ending, Act | None]:
    """Return what follows when the service can't begin to serve: nothing runs that could be waited for."""
    if state.phase is Phase.CANCELLING:
        return state, None
    return Ending(Phase.CANCELLING, state.asked), Act.CANCEL


def on_time(state: Ending, now_ns: int) -> tuple[Ending, Act | None]:
    """Return what follows from the time alone."""
    if state.phase is not Phase.DRAINING or state.until_ns is None or now_ns < state.until_ns:
        return state, None
    return Ending(Phase.CANCELLING, state.asked), Act.CANCEL
