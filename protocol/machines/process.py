"""A worker process: spawned → handshake → loading → ready → draining → terminating → killing → exited.

exited can be reached from every phase but the first: a process may die at any moment, and that is seen once its
pipes are attended.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from infervisor.protocol.endings import EndReason
from infervisor.protocol.machines.table import Row, Table


class ProcessPhase(enum.StrEnum):
    """Phases of a worker process."""

    SPAWNED = "spawned"
    HANDSHAKE = "handshake"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    TERMINATING = "terminating"
    KILLING = "killing"
    EXITED = "exited"


class DeathCause(enum.StrEnum):
    """Why a worker had to go; crashed is what remains when it wasn't us."""

    CRASHED = "crashed"
    STOPPED = "stopped"
    """The supervisor closes, or was asked to replace it."""
    CANCEL_KILL = "cancel_kill"
    """The last rung of a cancel ladder."""
    UNRESPONSIVE = "unresponsive"
    DEAF = "deaf"
    """It took a cancel only past the control pipe, which it no longer reads."""
    PROTOCOL_ERROR = "protocol_error"
    STARTUP_TIMEOUT = "startup_timeout"
    LOAD_FAILED = "load_failed"
    MEMORY_LIMIT = "memory_limit"
    """It used more memory than our hard limit allows, and we killed it."""
    OUT_OF_MEMORY = "out_of_memory"
    """The kernel killed it because memory ran out. Found after the exit: to the table it crashed."""
    RECYCLED = "recycled"
    """Replaced in time: it finished what it had and went."""

    @property
    def is_ours(self) -> bool:
        """Whether we ended a healthy worker: nobody is to blame and no restart is counted.

        Deaths for memory are counted: what needs too much may need it again, and that must end in the breaker.
        """
        return self in (DeathCause.STOPPED, DeathCause.CANCEL_KILL, DeathCause.RECYCLED)

    @property
    def end_reason(self) -> EndReason:
        """What requests that were in the worker end with."""
        return _END_REASON_OF[self]


_END_REASON_OF = {
    DeathCause.CRASHED: EndReason.WORKER_CRASHED,
    DeathCause.STOPPED: EndReason.WORKER_KILLED,
    DeathCause.CANCEL_KILL: EndReason.WORKER_KILLED,
    DeathCause.UNRESPONSIVE: EndReason.WORKER_UNRESPONSIVE,
    DeathCause.DEAF: EndReason.WORKER_UNRESPONSIVE,
    DeathCause.PROTOCOL_ERROR: EndReason.PROTOCOL_ERROR,
    DeathCause.STARTUP_TIMEOUT: EndReason.STARTUP_TIMEOUT,
    DeathCause.LOAD_FAILED: EndReason.UNAVAILABLE,
    DeathCause.MEMORY_LIMIT: EndReason.WORKER_KILLED,
    DeathCause.OUT_OF_MEMORY: EndReason.WORKER_CRASHED,
    DeathCause.RECYCLED: EndReason.WORKER_KILLED,
}


class Grace(enum.StrEnum):
    """The graces of stopping, one for each phase that can outlast its welcome."""

    DRAIN = "drain"
    EXIT = "exit"
    TERMINATE = "terminate"


@dataclass(frozen=True, slots=True)
class ProcessState:
    """Where a process stands. cause: the first reason for which we wanted it gone, or None."""

    phase: ProcessPhase = ProcessPhase.SPAWNED
    cause: DeathCause | None = None
    signalled: bool = False


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connected:
    """Its pipes are attended."""


@dataclass(frozen=True, slots=True)
class HelloArrived:
    """It speaks our protocol."""


@dataclass(frozen=True, slots=True)
class ReadyArrived:
    """The model is loaded."""


@dataclass(frozen=True, slots=True)
class FailedArrived:
    """Loading failed, and it said so."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """It should finish what it has and go."""

    cause: DeathCause = DeathCause.STOPPED


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing is left in it."""


@dataclass(frozen=True, slots=True)
class GraceOver:
    """The grace that was armed last has passed."""


@dataclass(frozen=True, slots=True)
class KillAsked:
    """It must go now."""

    cause: DeathCause


@dataclass(frozen=True, slots=True)
class Exited:
    """Its exit was seen."""


# --- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendLoad:
    """Send the load message."""


@dataclass(frozen=True, slots=True)
class AnnounceReady:
    """Requests can be submitted."""


@dataclass(frozen=True, slots=True)
class SendDrain:
    """Send the drain message."""


@dataclass(frozen=True, slots=True)
class SendShutdown:
    """Send the shutdown message."""


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send SIGTERM."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL to the whole group."""


@dataclass(frozen=True, slots=True)
class ArmGrace:
    """Post GraceOver when this grace has passed."""

    grace: Grace


_Out = tuple[ProcessState, tuple[object, ...]]


def _connect(state: ProcessState, event: Connected, now: int) -> _Out:
    return replace(state, phase=ProcessPhase.HANDSHAKE), ()


def _hello(state: ProcessState, event: HelloArrived, now: int) -> _Out:
    return replace(state, phase=ProcessPhase.LOADING), (SendLoad(),)


def _ready(state: ProcessState, event: ReadyArrived, now: int) -> _Out:
    return replace(state, phase=ProcessPhase.READY), (AnnounceReady(),)


def _failed(state: ProcessState, event: FailedArrived, now: int) -> _Out:
    after = replace(state, phase=ProcessPhase.TERMINATING, cause=state.cause or DeathCause.LOAD_FAILED)
    return after, (SendShutdown(), ArmGrace(Grace.EXIT))


def _stop_early(state: ProcessState, event: StopAsked, now: int) -> _Out:
    after = replace(state, phase=ProcessPhase.TERMINATING, cause=state.cause or event.cause, signalled=True)
    return after, (Terminate(), ArmGrace(Grace.TERMINATE))


def _stop_ready(state: ProcessState, event: StopAsked, now: int) -> _Out:
    after = replace(state, phase=ProcessPhase.DRAINING, cause=state.cause or event.cause)
    # Armed before it is told: one that is empty is drained within the telling, which arms the next grace.
    return after, (ArmGrace(Grace.DRAIN), SendDrain())


def _drained(state: ProcessState, event: Drained, now: int) -> _Out:
    return replace(state, phase=ProcessPhase.TERMINATING), (SendShutdown(), ArmGrace(Grace.EXIT))


def _terminate(state: ProcessState, event: GraceOver, now: int) -> _Out:
    if state.signalled:
        return replace(state, phase=ProcessPhase.KILLING), (Kill(),)
    after = replace(state, phase=ProcessPhase.TERMINATING, signalled=True)
    return after, (Terminate(), ArmGrace(Grace.TERMINATE))


def _kill(state: ProcessState, event: KillAsked, now: int) -> _Out:
    return replace(state, phase=ProcessPhase.KILLING, cause=state.cause or event.cause), (Kill(),)


def _no_change(state: ProcessState, event: object, now: int) -> _Out:
    return state, ()


def _exit(state: ProcessState, event: Exited, now: int) -> _Out:
    return replace(state, phase=ProcessPhase.EXITED, cause=state.cause or DeathCause.CRASHED), ()


_S, _H, _L, _R = ProcessPhase.SPAWNED, ProcessPhase.HANDSHAKE, ProcessPhase.LOADING, ProcessPhase.READY
_D, _T, _K, _X = ProcessPhase.DRAINING, ProcessPhase.TERMINATING, ProcessPhase.KILLING, ProcessPhase.EXITED

PROCESS: Table[ProcessState] = Table(
    "process",
    {
        (_S, Connected): Row((_H,), _connect),
        (_H, HelloArrived): Row((_L,), _hello),
        (_L, ReadyArrived): Row((_R,), _ready),
        (_L, FailedArrived): Row((_T,), _failed),
        (_S, StopAsked): Row((_T,), _stop_early),
        (_H, StopAsked): Row((_T,), _stop_early),
        (_L, StopAsked): Row((_T,), _stop_early),
        (_R, StopAsked): Row((_D,), _stop_ready),
        (_T, StopAsked): Row((_T,), _no_change),
        (_K, StopAsked): Row((_K,), _no_change),
        (_D, Drained): Row((_T,), _drained),
        (_D, GraceOver): Row((_T,), _terminate),
        (_T, GraceOver): Row((_T, _K), _terminate),
        # It was to go before its task had begun to attend its pipes.
        (_T, Connected): Row((_T,), _no_change),
        (_K, Connected): Row((_K,), _no_change),
        # Frames that were under way when we decided to end it.
        (_T, HelloArrived): Row((_T,), _no_change),
        (_T, ReadyArrived): Row((_T,), _no_change),
        (_T, FailedArrived): Row((_T,), _no_change),
        (_K, HelloArrived): Row((_K,), _no_change),
        (_K, ReadyArrived): Row((_K,), _no_change),
        (_K, FailedArrived): Row((_K,), _no_change),
        **{(phase, KillAsked): Row((_K,), _kill) for phase in (_S, _H, _L, _R, _D, _T)},
        (_K, KillAsked): Row((_K,), _no_change),
        (_K, GraceOver): Row((_K,), _no_change),
        **{(phase, Exited): Row((_X,), _exit) for phase in (_H, _L, _R, _D, _T, _K)},
        (_X, StopAsked): Row((_X,), _no_change),
        (_X, KillAsked): Row((_X,), _no_change),
    },
)
