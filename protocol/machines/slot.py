"""A slot: the place for a worker, which is filled again when one dies.

starting | running | backoff | open | half_open | stopped. Restarts wait exponentially longer, with jitter,
never longer than the period. More than max_restarts within the period, more than max_failed_starts deaths in
a row before ready, or a failure that can't heal open the breaker: requests are refused at once. After a
cool-down the next request tries one start (half-open); what can't heal by itself stays open until its cause
is gone or somebody asks for a start. Names after OTP's restart intensity and period.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from infervisor.protocol.machines.table import Row, Table


class SlotPhase(enum.StrEnum):
    """Phases of a slot."""

    STARTING = "starting"
    RUNNING = "running"
    BACKOFF = "backoff"
    OPEN = "open"
    HALF_OPEN = "half_open"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class RestartRules:
    """The limits that a slot goes by. All times in nanoseconds; jitter is a share of the delay."""

    max_restarts: int
    period_ns: int
    max_failed_starts: int
    backoff_initial_ns: int
    backoff_max_ns: int
    jitter: float
    cooldown_ns: int


@dataclass(frozen=True, slots=True)
class SlotState:
    """Where a slot stands. restarts_ns: when it was refilled within the period, oldest first."""

    rules: RestartRules
    phase: SlotPhase = SlotPhase.STARTING
    restarts_ns: tuple[int, ...] = ()
    failed_starts: int = 0
    closes_ns: int = 0
    """While open: from when a request may try again."""
    is_permanent: bool = False
    """While open: no request may try; the cause has to go first."""


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The worker is ready."""


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """The worker's exit was collected.

    ours: we ended a healthy worker. permanent: trying again without a change is pointless. luck: a random
    number from 0 to 1 for the jitter.
    """

    ours: bool
    permanent: bool
    luck: float


@dataclass(frozen=True, slots=True)
class BackoffOver:
    """The delay has passed."""


@dataclass(frozen=True, slots=True)
class WorkerWanted:
    """A request asks for a worker."""


@dataclass(frozen=True, slots=True)
class ResetAsked:
    """Somebody says that the cause is gone: close the breaker, forget the count, and start."""


@dataclass(frozen=True, slots=True)
class CauseGone:
    """What made starting pointless has changed, as the model's file has. Only of what is open for good."""


@dataclass(frozen=True, slots=True)
class SlotStopAsked:
    """No worker is wanted here any more."""


# --- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a worker process."""


@dataclass(frozen=True, slots=True)
class ArmBackoff:
    """Post BackoffOver after this delay."""

    delay_ns: int


@dataclass(frozen=True, slots=True)
class BreakerOpened:
    """Refuse what waits."""


_Out = tuple[SlotState, tuple[object, ...]]


def backoff_ns(rules: RestartRules, restarts: int, luck: float) -> int:
    """Return the delay before restart number `restarts` (from 1): doubling, jittered, within the period."""
    doubled = rules.backoff_initial_ns * (1 << min(max(restarts - 1, 0), 40))
    jittered = min(doubled, rules.backoff_max_ns) * (1 + rules.jitter * (2 * luck - 1))
    return int(min(jittered, rules.period_ns))


def _ready(state: SlotState, event: WorkerReady, now: int) -> _Out:
    return replace(state, phase=SlotPhase.RUNNING, failed_starts=0), ()


def _open(state: SlotState, event: WorkerDied, now: int) -> _Out:
    closes_ns = now + state.rules.cooldown_ns
    after = replace(
        state,
        phase=SlotPhase.OPEN,
        closes_ns=closes_ns,
        is_permanent=event.permanent,
        restarts_ns=(),
        failed_starts=0,
    )
    return after, (BreakerOpened(),)


def _died(state: SlotState, event: WorkerDied, now: int) -> _Out:
    if event.permanent:
        return _open(state, event, now)
    if event.ours:
        return replace(state, phase=SlotPhase.STARTING), (Spawn(),)
    rules = state.rules
    failed_starts = state.failed_starts + (state.phase is SlotPhase.STARTING)
    restarts = (*(at for at in state.restarts_ns if now - at < rules.period_ns), now)
    if len(restarts) > rules.max_restarts or failed_starts > rules.max_failed_starts:
        return _open(state, event, now)
    delay_ns = backoff_ns(rules, len(restarts), event.luck)
    after = replace(state, phase=SlotPhase.BACKOFF, restarts_ns=restarts, failed_starts=failed_starts)
    return after, (ArmBackoff(delay_ns),)


def _died_in_trial(state: SlotState, event: WorkerDied, now: int) -> _Out:
    if event.ours and not event.permanent:
        return replace(state, phase=SlotPhase.HALF_OPEN), (Spawn(),)
    return _open(state, event, now)


def _start(state: SlotState, event: object, now: int) -> _Out:
    return replace(state, phase=SlotPhase.STARTING), (Spawn(),)


def _reset(state: SlotState, event: ResetAsked | CauseGone, now: int) -> _Out:
    return SlotState(state.rules), (Spawn(),)


def _try_again(state: SlotState, event: WorkerWanted, now: int) -> _Out:
    if state.is_permanent or now < state.closes_ns:
        return state, ()
    return replace(state, phase=SlotPhase.HALF_OPEN), (Spawn(),)


def _stop(state: SlotState, event: SlotStopAsked, now: int) -> _Out:
    return replace(state, phase=SlotPhase.STOPPED), ()


def _no_change(state: SlotState, event: object, now: int) -> _Out:
    return state, ()


_S, _R, _B = SlotPhase.STARTING, SlotPhase.RUNNING, SlotPhase.BACKOFF
_O, _H, _X = SlotPhase.OPEN, SlotPhase.HALF_OPEN, SlotPhase.STOPPED

SLOT: Table[SlotState] = Table(
    "slot",
    {
        (_S, WorkerReady): Row((_R,), _ready),
        (_S, WorkerDied): Row((_S, _B, _O), _died),
        (_S, WorkerWanted): Row((_S,), _no_change),
        (_S, ResetAsked): Row((_S,), _no_change),
        (_R, WorkerDied): Row((_S, _B, _O), _died),
        (_R, WorkerWanted): Row((_R,), _no_change),
        (_B, BackoffOver): Row((_S,), _start),
        (_B, WorkerWanted): Row((_B,), _no_change),
        (_B, ResetAsked): Row((_S,), _reset),
        (_O, WorkerWanted): Row((_O, _H), _try_again),
        (_O, ResetAsked): Row((_S,), _reset),
        (_O, CauseGone): Row((_S,), _reset),
        (_O, BackoffOver): Row((_O,), _no_change),
        (_H, WorkerReady): Row((_R,), _ready),
        (_H, WorkerDied): Row((_O, _H), _died_in_trial),
        (_H, WorkerWanted): Row((_H,), _no_change),
        (_H, ResetAsked): Row((_H,), _no_change),
        # A reset took the slot out of backoff before its delay had passed.
        (_S, BackoffOver): Row((_S,), _no_change),
        (_R, BackoffOver): Row((_R,), _no_change),
        (_H, BackoffOver): Row((_H,), _no_change),
        **{(phase, SlotStopAsked): Row((_X,), _stop) for phase in (_S, _R, _B, _O, _H)},
        (_X, WorkerDied): Row((_X,), _no_change),
        (_X, ResetAsked): Row((_X,), _no_change),
    },
)
