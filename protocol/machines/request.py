"""A request as its caller sees it: queued → running → ended. The first reason wins; nothing follows it.

A request whose worker is gone may go back to the queue, with what it has said so far, and run on in the next one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from infervisor.protocol.endings import EndReason
from infervisor.protocol.machines.table import Row, Table


class RequestPhase(enum.StrEnum):
    """Phases of a request."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class RequestState:
    """Where a request stands. reason is set exactly in the phase ended."""

    phase: RequestPhase = RequestPhase.QUEUED
    reason: EndReason | None = None


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted:
    """The request went to a worker."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The worker says that the attempt ended by itself: naturally, refused, or with an engine error."""

    reason: EndReason


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Its worker is gone, and it goes on in the next one."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Nobody wants the rest: the caller cancelled, a client left, or a budget ran out."""

    reason: EndReason


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker is gone, can't be had, or the supervisor is closing."""

    reason: EndReason


# --- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dequeue:
    """Take it out of the queue: nothing was computed, so this is its release too."""


@dataclass(frozen=True, slots=True)
class BeginCancel:
    """Start the cancel ladder for the running attempt."""


@dataclass(frozen=True, slots=True)
class TellEnd:
    """Tell the reader. keep_buffer: tokens that arrived before are still read."""

    reason: EndReason
    keep_buffer: bool


def _submit(state: RequestState, event: Submitted, now: int) -> tuple[RequestState, tuple[object, ...]]:
    return replace(state, phase=RequestPhase.RUNNING), ()


def _end(state: RequestState, reason: EndReason) -> RequestState:
    return replace(state, phase=RequestPhase.ENDED, reason=reason)


def _finish(state: RequestState, event: Finished, now: int) -> tuple[RequestState, tuple[object, ...]]:
    return _end(state, event.reason), (TellEnd(event.reason, keep_buffer=True),)


def _interrupt(state: RequestState, event: Interrupted, now: int) -> tuple[RequestState, tuple[object, ...]]:
    return replace(state, phase=RequestPhase.QUEUED), ()


def _keeps_buffer(event: Abandoned | Lost) -> bool:
    # Who cancels wants no more text; who missed a deadline, or lost a worker, may use what had arrived.
    return event.reason not in (EndReason.CANCELLED, EndReason.CLIENT_DISCONNECTED)


def _abandon_queued(
    state: RequestState, event: Abandoned | Lost, now: int
) -> tuple[RequestState, tuple[object, ...]]:
    return _end(state, event.reason), (Dequeue(), TellEnd(event.reason, _keeps_buffer(event)))


def _abandon_running(
    state: RequestState, event: Abandoned, now: int
) -> tuple[RequestState, tuple[object, ...]]:
    return _end(state, event.reason), (BeginCancel(), TellEnd(event.reason, _keeps_buffer(event)))


def _lose_running(state: RequestState, event: Lost, now: int) -> tuple[RequestState, tuple[object, ...]]:
    return _end(state, event.reason), (TellEnd(event.reason, keep_buffer=True),)


def _too_late(state: RequestState, event: object, now: int) -> tuple[RequestState, tuple[object, ...]]:
    return state, ()


_Q, _R, _E = RequestPhase.QUEUED, RequestPhase.RUNNING, RequestPhase.ENDED

REQUEST: Table[RequestState] = Table(
    "request",
    {
        (_Q, Submitted): Row((_R,), _submit),
        (_Q, Abandoned): Row((_E,), _abandon_queued),
        (_Q, Lost): Row((_E,), _abandon_queued),
        (_R, Finished): Row((_E,), _finish),
        (_R, Interrupted): Row((_Q,), _interrupt),
        (_R, Abandoned): Row((_E,), _abandon_running),
        (_R, Lost): Row((_E,), _lose_running),
        (_E, Abandoned): Row((_E,), _too_late),
        (_E, Lost): Row((_E,), _too_late),
    },
)
