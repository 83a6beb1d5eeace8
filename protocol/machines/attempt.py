"""An attempt: one run of a request on one worker, as the parent knows it from frames.

submitted → prefill → decode ⇄ paused → ending → released. A frame without a row here is the worker's
protocol error. The rows also say which of the request's clocks run.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from infervisor.protocol.deadlines import Budget
from infervisor.protocol.machines.table import Row, Table


class AttemptPhase(enum.StrEnum):
    """Phases of an attempt."""

    SUBMITTED = "submitted"
    PREFILL = "prefill"
    DECODE = "decode"
    PAUSED = "paused"
    ENDING = "ending"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class AttemptState:
    """Where an attempt stands."""

    phase: AttemptPhase = AttemptPhase.SUBMITTED

    @property
    def is_runnable(self) -> bool:
        """Whether the worker owes a step: it has something to compute and may."""
        return self.phase in (AttemptPhase.SUBMITTED, AttemptPhase.PREFILL, AttemptPhase.DECODE)


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Began:
    """`started` arrived. credit_left: whether the worker may compute a token once the prompt is read.

    Not so after a resume, while the reader still has a whole window to take.
    """

    credit_left: bool


@dataclass(frozen=True, slots=True)
class TokensArrived:
    """`tokens` arrived. credit_left: whether the worker may compute another one."""

    credit_left: bool


@dataclass(frozen=True, slots=True)
class CreditSent:
    """The limit was raised."""


@dataclass(frozen=True, slots=True)
class EndArrived:
    """`ended` arrived."""


@dataclass(frozen=True, slots=True)
class ReleaseArrived:
    """`released` arrived."""


@dataclass(frozen=True, slots=True)
class ProcessGone:
    """The worker's exit was collected: whatever it held is free."""


# --- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RestartClock:
    """Give the budget anew and let it run."""

    budget: Budget


@dataclass(frozen=True, slots=True)
class StopClock:
    """This budget plays no part now."""

    budget: Budget


@dataclass(frozen=True, slots=True)
class FreePlace:
    """The place in the worker can be given away; the release is complete."""


_Out = tuple[AttemptState, tuple[object, ...]]
_IN = {phase: AttemptState(phase) for phase in AttemptPhase}
_RUN_STALL = RestartClock(Budget.STALL)
_STOP_STALL = StopClock(Budget.STALL)
_STOP_FIRST = StopClock(Budget.FIRST_TOKEN)


def _begin(state: AttemptState, event: Began, now: int) -> _Out:
    if event.credit_left:
        return _IN[AttemptPhase.PREFILL], ()
    return _IN[AttemptPhase.PAUSED], (_STOP_FIRST,)


def _first_tokens(state: AttemptState, event: TokensArrived, now: int) -> _Out:
    after, effects = _tokens(state, event, now)
    return after, (_STOP_FIRST, *effects)


def _tokens(state: AttemptState, event: TokensArrived, now: int) -> _Out:
    if event.credit_left:
        return _IN[AttemptPhase.DECODE], (_RUN_STALL,)
    return _IN[AttemptPhase.PAUSED], (_STOP_STALL,)


def _resume(state: AttemptState, event: CreditSent, now: int) -> _Out:
    return _IN[AttemptPhase.DECODE], (_RUN_STALL,)


def _no_change(state: AttemptState, event: object, now: int) -> _Out:
    return state, ()


def _end(state: AttemptState, event: EndArrived, now: int) -> _Out:
    return _IN[AttemptPhase.ENDING], (_STOP_FIRST, _STOP_STALL)


def _release(state: AttemptState, event: ReleaseArrived | ProcessGone, now: int) -> _Out:
    return _IN[AttemptPhase.RELEASED], (_STOP_FIRST, _STOP_STALL, FreePlace())


_S, _P, _D = AttemptPhase.SUBMITTED, AttemptPhase.PREFILL, AttemptPhase.DECODE
_W, _E, _R = AttemptPhase.PAUSED, AttemptPhase.ENDING, AttemptPhase.RELEASED

ATTEMPT: Table[AttemptState] = Table(
    "attempt",
    {
        (_S, Began): Row((_P, _W), _begin),
        # After a resume the reader still takes what the attempt before had delivered.
        (_S, CreditSent): Row((_S,), _no_change),
        (_S, EndArrived): Row((_E,), _end),
        (_S, ProcessGone): Row((_R,), _release),
        (_P, TokensArrived): Row((_D, _W), _first_tokens),
        (_P, CreditSent): Row((_P,), _no_change),
        (_P, EndArrived): Row((_E,), _end),
        (_P, ProcessGone): Row((_R,), _release),
        (_D, TokensArrived): Row((_D, _W), _tokens),
        (_D, CreditSent): Row((_D,), _no_change),
        (_D, EndArrived): Row((_E,), _end),
        (_D, ProcessGone): Row((_R,), _release),
        (_W, CreditSent): Row((_D,), _resume),
        (_W, EndArrived): Row((_E,), _end),
        (_W, ProcessGone): Row((_R,), _release),
        (_E, ReleaseArrived): Row((_R,), _release),
        (_E, CreditSent): Row((_E,), _no_change),
        (_E, ProcessGone): Row((_R,), _release),
    },
)
