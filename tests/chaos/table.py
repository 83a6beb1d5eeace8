"""The chaos table: fault × phase → what becomes of the requests, and of the worker. Data alone.

Every cell is there: either what is expected (`cells.py` makes it happen and looks), or why there is nothing to see.
docs/faults.md is written from it (`page.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from infervisor import EndReason
from infervisor.protocol.machines.process import DeathCause
from tests.chaos.faults import FAULTS


class Phase(enum.StrEnum):
    """What the worker is at when it happens."""

    SPAWN = "spawn"
    HANDSHAKE = "handshake"
    LOAD = "load"
    IDLE = "idle"
    PREPARING = "preparing"
    PREFILL = "prefill"
    DECODE = "decode"
    PAUSED = "paused"
    ENDING = "ending"
    CANCELLING = "cancelling"
    DRAINING = "draining"
    CLOSING = "closing"


ABOUT_PHASES: Mapping[Phase, str] = {
    Phase.SPAWN: "the process was just started",
    Phase.HANDSHAKE: "it hasn't said hello",
    Phase.LOAD: "it loads the model",
    Phase.IDLE: "it has nothing to do",
    Phase.PREPARING: "it renders and tokenises a request, in a thread beside the others' steps",
    Phase.PREFILL: "it reads prompts",
    Phase.DECODE: "it computes tokens",
    Phase.PAUSED: "its readers have taken nothing for a while, so it has no credit",
    Phase.ENDING: "an answer is complete, but its place isn't free yet",
    Phase.CANCELLING: "a request was cancelled, and the worker hasn't obeyed yet",
    Phase.DRAINING: "it is being replaced, and finishes what it has",
    Phase.CLOSING: "the supervisor closes",
}


class End(enum.StrEnum):
    """What becomes of the requests."""

    UNHARMED = "unharmed"
    WAITED = "waits"
    RESUMED = "goes on"
    ENDED = "stands"
    CANCELLED = "released"
    FAILED = "ends"
    POISONED = "poisoned"
    REFUSED = "refused"
    CLOSED = "closed"


ABOUT_ENDS: Mapping[End, str] = {
    End.UNHARMED: "Nobody notices: the same worker goes on.",
    End.WAITED: "Nothing was in it: requests wait for the next worker and are answered by it.",
    End.RESUMED: "The stream pauses and goes on in the next worker, no token twice and none missing; "
    'with `on_crash="fail"` it ends with the reason.',
    End.ENDED: "A complete answer stays one. Its neighbours go on in the next worker.",
    End.CANCELLED: "Who cancelled is told at once, and released by the worker's end. Its neighbours go on in the "
    "next worker.",
    End.FAILED: "The requests of that step, or the one that is being prepared, end with the reason, whatever "
    "`on_crash` says. The worker goes on.",
    End.POISONED: "The request ends as `poisoned` once it was alone in two workers that died. The others go on.",
    End.REFUSED: "Requests are refused as `unavailable` at once, until the cause is gone.",
    End.CLOSED: "Requests end as `shutting_down`, and closing ends within its graces.",
}


@dataclass(frozen=True)
class Expected:
    """A cell in which something happens. cause: the worker's death is told with it, None if it lives on.

    reason: what ends requests that can't go on.
    """

    end: End
    cause: DeathCause | None = None
    reason: EndReason | None = None

    @property
    def restarts(self) -> Mapping[str, int]:
        """How restarts are counted by cause."""
        return {} if self.cause is None or self.cause.is_ours else {str(self.cause): 1}


@dataclass(frozen=True)
class NotHere:
    """A cell in which nothing can happen, or that is proved elsewhere. test: file and name of the test there."""

    why: str
    test: tuple[str, str] | None = None


Cell = Expected | NotHere
Row = Mapping[Phase, Cell]

_CRASHED, _HUNG, _BROKEN = DeathCause.CRASHED, DeathCause.UNRESPONSIVE, DeathCause.PROTOCOL_ERROR

_NO_ENGINE = NotHere("no engine runs yet")
_NOT_CALLED = NotHere("the engine isn't called: nothing of its own can go wrong")
_LIKE_DECODE = NotHere("the engine's step is like any other: see decode")
_STANDS_ALREADY = NotHere("it is inside a step that doesn't end: nothing else can go wrong in it")

_LOOP_WRITES = NotHere("no thread that prepares writes frames: see decode")

_FLOODS_ENOUGH = NotHere("output is drained by a task of its own, whatever else goes on: see decode")

UNHARMED = Expected(End.UNHARMED)
CLOSED = Expected(End.CLOSED, DeathCause.STOPPED)


def _dies(cause: DeathCause) -> Row:
    """A death that can come at any time."""
    return {
        **dict.fromkeys((Phase.SPAWN, Phase.HANDSHAKE, Phase.LOAD, Phase.IDLE), Expected(End.WAITED, cause)),
        **dict.fromkeys(
            (Phase.PREPARING, Phase.PREFILL, Phase.DECODE, Phase.PAUSED, Phase.DRAINING),
            Expected(End.RESUMED, cause),
        ),
        Phase.ENDING: Expected(End.ENDED, cause),
        Phase.CANCELLING: Expected(End.CANCELLED, cause),
        Phase.CLOSING: CLOSED,
    }


def _engine_dies(cause: DeathCause) -> Row:
    """A death that comes out of the engine, while it runs."""
    return {
        Phase.SPAWN: _NO_ENGINE,
        Phase.HANDSHAKE: _NO_ENGINE,
        Phase.LOAD: Expected(End.WAITED, cause),
        Phase.IDLE: _NOT_CALLED,
        **dict.fromkeys(
            (Phase.PREPARING, Phase.PREFILL, Phase.DECODE, Phase.DRAINING), Expected(End.RESUMED, cause)
        ),
        Phase.PAUSED: _NOT_CALLED,
        Phase.ENDING: Expected(End.ENDED, cause),
        Phase.CANCELLING: _STANDS_ALREADY,
        Phase.CLOSING: _STANDS_ALREADY,
    }


def _breaks_frames(cause: DeathCause) -> Row:
    """A death that comes from what is written into the frames pipe while the engine runs."""
    return {**_engine_dies(cause), Phase.PREPARING: _LOOP_WRITES}


def _only(why: NotHere, cells: Row) -> Row:
    return {phase: cells.get(phase, why) for phase in Phase}


_EARLY_EXIT = {Phase.HANDSHAKE: Expected(End.WAITED, _CRASHED)}
_STUCK_EARLY = Expected(End.WAITED, DeathCause.STARTUP_TIMEOUT)
_BROKEN_EARLY = {Phase.HANDSHAKE: Expected(End.WAITED, _BROKEN)}
_ORPHANS = "tests/attacks/test_orphans.py"
_HOST_KILLED = NotHere(
    "nobody is left to see it: the worker ends by itself",
    (_ORPHANS, "test_no_worker_outlives_a_parent_that_is_killed_whatever_it_is_doing"),
)

TABLE: Mapping[str, Row] = {
    "sigkill": _dies(_CRASHED),
    "sigterm": _dies(_CRASHED),
    "sigsegv": _dies(_CRASHED),
    "sigabrt": _dies(_CRASHED),
    "sigbus": _dies(_CRASHED),
    "exit_0": {**_engine_dies(_CRASHED), **_EARLY_EXIT},
    "exit_1": {**_engine_dies(_CRASHED), **_EARLY_EXIT},
    "out_of_memory": _engine_dies(_CRASHED),
    "memory_error": _only(
        _LIKE_DECODE,
        {
            Phase.PREPARING: Expected(End.FAILED, reason=EndReason.ENGINE_ERROR),
            Phase.PREFILL: Expected(End.FAILED, reason=EndReason.ENGINE_ERROR),
            Phase.DECODE: Expected(End.FAILED, reason=EndReason.ENGINE_ERROR),
        },
    ),
    "raise": {
        **_engine_dies(_CRASHED),
        Phase.LOAD: Expected(End.WAITED, DeathCause.LOAD_FAILED),
        **dict.fromkeys(
            (Phase.PREPARING, Phase.PREFILL, Phase.DECODE, Phase.DRAINING),
            Expected(End.FAILED, reason=EndReason.ENGINE_ERROR),
        ),
    },
    "load_refused_once": _only(
        NotHere("the model is loaded by then, or isn't being loaded yet"),
        {Phase.LOAD: Expected(End.WAITED, DeathCause.LOAD_FAILED)},
    ),
    "load_refused": _only(
        NotHere("the model is loaded by then, or isn't being loaded yet"),
        {Phase.LOAD: Expected(End.REFUSED, DeathCause.LOAD_FAILED, EndReason.UNAVAILABLE)},
    ),
    "stop_shortly": {
        **dict.fromkeys(Phase, UNHARMED),
        Phase.CLOSING: CLOSED,
    },
    "stop_for_good": {
        **dict.fromkeys((Phase.SPAWN, Phase.HANDSHAKE, Phase.LOAD), _STUCK_EARLY),
        **dict.fromkeys(
            (Phase.IDLE, Phase.PREPARING, Phase.PREFILL, Phase.DECODE, Phase.DRAINING),
            Expected(End.RESUMED, _HUNG),
        ),
        # Found out when the readers take again, which gives it credit and so something to do.
        Phase.PAUSED: Expected(End.RESUMED, _HUNG),
        Phase.ENDING: Expected(End.ENDED, _HUNG),
        Phase.CANCELLING: Expected(End.CANCELLED, DeathCause.CANCEL_KILL),
        Phase.CLOSING: CLOSED,
    },
    "hang": {
        **_engine_dies(_HUNG),
        Phase.HANDSHAKE: _STUCK_EARLY,
        Phase.LOAD: _STUCK_EARLY,
        Phase.CANCELLING: Expected(End.CANCELLED, DeathCause.CANCEL_KILL),
        Phase.CLOSING: CLOSED,
    },
    "hang_gil": {
        **_engine_dies(_HUNG),
        Phase.LOAD: _STUCK_EARLY,
        Phase.CANCELLING: Expected(End.CANCELLED, DeathCause.CANCEL_KILL),
        Phase.CLOSING: CLOSED,
    },
    "host_blocked": {
        **dict.fromkeys(Phase, UNHARMED),
        Phase.SPAWN: NotHere("starting is a blocking call itself"),
        Phase.HANDSHAKE: NotHere("nothing comes out of it yet: see load"),
        Phase.ENDING: NotHere("the end lies in the pipe meanwhile: see decode"),
        Phase.CLOSING: CLOSED,
    },
    "garbage": {**_breaks_frames(_BROKEN), **_BROKEN_EARLY},
    "partial_frame": {
        **_breaks_frames(_HUNG),
        Phase.HANDSHAKE: _STUCK_EARLY,
        Phase.LOAD: _STUCK_EARLY,
    },
    "torn_frame": {**_breaks_frames(_CRASHED), **_EARLY_EXIT},
    "oversized_frame": {**_breaks_frames(_BROKEN), **_BROKEN_EARLY},
    "forged_id": _breaks_frames(_BROKEN),
    "credit_violation": {
        **_breaks_frames(_BROKEN),
        Phase.LOAD: NotHere("there is no request to overdraw"),
        Phase.ENDING: NotHere("tokens after the end are refused in the same way: see forged ids"),
    },
    "close_frames": {**_breaks_frames(_BROKEN), **_BROKEN_EARLY},
    "close_control": _only(
        NotHere("seen at the next message, which comes with a request or with credit: see decode"),
        {
            Phase.DECODE: Expected(End.RESUMED, _CRASHED),
            Phase.DRAINING: Expected(End.RESUMED, _CRASHED),
        },
    ),
    "deaf": _only(
        NotHere("seen when credit or a request doesn't arrive: see decode"),
        {
            Phase.DECODE: Expected(End.RESUMED, _HUNG),
            Phase.DRAINING: Expected(End.RESUMED, _HUNG),
        },
    ),
    "flood_stdout": _only(_FLOODS_ENOUGH, dict.fromkeys((Phase.LOAD, Phase.PREFILL, Phase.DECODE), UNHARMED)),
    "flood_stderr": _only(_FLOODS_ENOUGH, dict.fromkeys((Phase.LOAD, Phase.PREFILL, Phase.DECODE), UNHARMED)),
    "grandchild": _only(
        NotHere("whether a child is there makes no difference to the rest: see killed from outside"),
        {
            Phase.LOAD: Expected(End.WAITED, _CRASHED),
            Phase.PREFILL: Expected(End.RESUMED, _CRASHED),
            Phase.DECODE: Expected(End.RESUMED, _CRASHED),
        },
    ),
    "ignored_cancel": _only(
        NotHere("nobody cancels"),
        {Phase.CANCELLING: Expected(End.CANCELLED, DeathCause.CANCEL_KILL), Phase.CLOSING: CLOSED},
    ),
    "ignored_sigterm": _only(NotHere("nobody sends it"), {Phase.CLOSING: CLOSED}),
    "memory_limit": _only(
        NotHere("it grows while it computes, and is looked at now and then: see decode"),
        {Phase.DECODE: Expected(End.RESUMED, DeathCause.MEMORY_LIMIT)},
    ),
    "poison": _only(
        NotHere("no prompt is at work"),
        dict.fromkeys(
            (Phase.PREPARING, Phase.PREFILL, Phase.DECODE),
            Expected(End.POISONED, _CRASHED, EndReason.POISONED),
        ),
    ),
    "host_killed": dict.fromkeys(Phase, _HOST_KILLED),
}


def cells() -> list[tuple[str, Phase, Expected]]:
    """Return every cell in which something happens."""
    return [
        (name, phase, cell)
        for name in FAULTS
        for phase, cell in TABLE[name].items()
        if isinstance(cell, Expected)
    ]
