"""Why a request ended: one enum, told apart to the caller, in the log, in metrics and over HTTP.

The parent alone names a reason, in the order in which it processes events; the first one wins.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class EndClass(enum.StrEnum):
    """What kind of end it was. Only a natural end is a whole answer."""

    NATURAL = "natural"
    CALLER = "caller"
    DEADLINE = "deadline"
    FAULT = "fault"
    REFUSAL = "refusal"


class EndReason(enum.StrEnum):
    """Why a request ended."""

    # natural
    STOP = "stop"
    """The model ended its answer."""
    STOP_SEQUENCE = "stop_sequence"
    """A stop string was completed."""
    LENGTH = "length"
    """max_tokens were computed."""
    CONTEXT_FULL = "context_full"
    """Prompt and answer fill the context."""
    # caller
    CANCELLED = "cancelled"
    CLIENT_DISCONNECTED = "client_disconnected"
    # deadline
    QUEUE_TIMEOUT = "queue_timeout"
    STARTUP_TIMEOUT = "startup_timeout"
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"
    STALL_TIMEOUT = "stall_timeout"
    TOTAL_TIMEOUT = "total_timeout"
    CONSUMER_TIMEOUT = "consumer_timeout"
    # fault
    WORKER_CRASHED = "worker_crashed"
    WORKER_UNRESPONSIVE = "worker_unresponsive"
    WORKER_KILLED = "worker_killed"
    """The worker was killed for no fault of this request: for another one's sake, or for its memory."""
    ENGINE_ERROR = "engine_error"
    PROTOCOL_ERROR = "protocol_error"
    POISONED = "poisoned"
    """Its worker died twice with nobody else in it."""
    # refusal
    OVERLOADED = "overloaded"
    INVALID_REQUEST = "invalid_request"
    UNAVAILABLE = "unavailable"
    SHUTTING_DOWN = "shutting_down"

    @property
    def end_class(self) -> EndClass:
        """The class of this reason."""
        return _CLASS_OF[self]

    @property
    def is_natural(self) -> bool:
        """Whether the answer is whole."""
        return _CLASS_OF[self] is EndClass.NATURAL


_CLASSES: Mapping[EndClass, tuple[EndReason, ...]] = {
    EndClass.NATURAL: (
        EndReason.STOP,
        EndReason.STOP_SEQUENCE,
        EndReason.LENGTH,
        EndReason.CONTEXT_FULL,
    ),
    EndClass.CALLER: (EndReason.CANCELLED, EndReason.CLIENT_DISCONNECTED),
    EndClass.DEADLINE: (
        EndReason.QUEUE_TIMEOUT,
        EndReason.STARTUP_TIMEOUT,
        EndReason.FIRST_TOKEN_TIMEOUT,
        EndReason.STALL_TIMEOUT,
        EndReason.TOTAL_TIMEOUT,
        EndReason.CONSUMER_TIMEOUT,
    ),
    EndClass.FAULT: (
        EndReason.WORKER_CRASHED,
        EndReason.WORKER_UNRESPONSIVE,
        EndReason.WORKER_KILLED,
        EndReason.ENGINE_ERROR,
        EndReason.PROTOCOL_ERROR,
        EndReason.POISONED,
    ),
    EndClass.REFUSAL: (
        EndReason.OVERLOADED,
        EndReason.INVALID_REQUEST,
        EndReason.UNAVAILABLE,
        EndReason.SHUTTING_DOWN,
    ),
}
_CLASS_OF: Mapping[EndReason, EndClass] = {
    reason: end_class for end_class, reasons in _CLASSES.items() for reason in reasons
}
