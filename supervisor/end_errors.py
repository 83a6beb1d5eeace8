"""Which error a caller gets for which end reason: one table, and its sentences. It raises none itself."""

from __future__ import annotations

from collections.abc import Mapping

from infervisor.protocol.blame import Suspicion
from infervisor.protocol.endings import EndReason
from infervisor.protocol.errors import (
    DeadlineExceeded,
    EngineError,
    InfervisorError,
    InvalidRequest,
    Overloaded,
    Poisoned,
    ProtocolError,
    RequestCancelled,
    ShuttingDown,
    Unavailable,
    WorkerDied,
    WorkerUnresponsive,
)
from infervisor.supervisor.report import ErrorInfo

ERROR_OF: Mapping[EndReason, type[InfervisorError]] = {
    EndReason.CANCELLED: RequestCancelled,
    EndReason.CLIENT_DISCONNECTED: RequestCancelled,
    EndReason.QUEUE_TIMEOUT: DeadlineExceeded,
    EndReason.STARTUP_TIMEOUT: DeadlineExceeded,
    EndReason.FIRST_TOKEN_TIMEOUT: DeadlineExceeded,
    EndReason.STALL_TIMEOUT: DeadlineExceeded,
    EndReason.TOTAL_TIMEOUT: DeadlineExceeded,
    EndReason.CONSUMER_TIMEOUT: DeadlineExceeded,
    EndReason.WORKER_CRASHED: WorkerDied,
    EndReason.WORKER_UNRESPONSIVE: WorkerUnresponsive,
    EndReason.WORKER_KILLED: WorkerDied,
    EndReason.ENGINE_ERROR: EngineError,
    EndReason.PROTOCOL_ERROR: ProtocolError,
    EndReason.POISONED: Poisoned,
    EndReason.OVERLOADED: Overloaded,
    EndReason.INVALID_REQUEST: InvalidRequest,
    EndReason.UNAVAILABLE: Unavailable,
    EndReason.SHUTTING_DOWN: ShuttingDown,
}
"""Every reason but the natural ones."""

_SENTENCES: Mapping[EndReason, str] = {
    EndReason.CANCELLED: "the request was cancelled",
    EndReason.CLIENT_DISCONNECTED: "the client that wanted the answer is gone",
    EndReason.QUEUE_TIMEOUT: "the request waited in the queue for longer than deadlines.queue_s",
    EndReason.STARTUP_TIMEOUT: "no worker became ready within deadlines.startup_s",
    EndReason.FIRST_TOKEN_TIMEOUT: "no token came within deadlines.first_token_s",
    EndReason.STALL_TIMEOUT: "no further token came within deadlines.stall_s",
    EndReason.TOTAL_TIMEOUT: "the answer wasn't complete within deadlines.total_s",
    EndReason.CONSUMER_TIMEOUT: "nobody read the answer for deadlines.consumer_s",
    EndReason.POISONED: "the request's workers died with nobody else in them; it is not tried again",
    EndReason.SHUTTING_DOWN: "the supervisor is closing",
}


def sentence_of(reason: EndReason) -> str:
    """Return what a person reads if nothing more exact is known."""
    return _SENTENCES.get(reason, reason.replace("_", " "))


def poisoned_sentence(suspicion: Suspicion) -> str:
    """Return how often and how the workers of a poisoned request died, and that it isn't tried again."""
    deaths, alone = len(suspicion.deaths), suspicion.died_alone
    when = ("both times" if deaths == 2 else "every time") if alone == deaths else f"in {alone} of them"
    hows = ", ".join(death.how or "unknown" for death in suspicion.deaths)
    return (
        f"the request was in {deaths} workers when they died, alone {when}: {hows}; it is not tried again: "
        "change it, or report the crash with the last lines that the workers wrote"
    )


def error_of(reason: EndReason, info: ErrorInfo | None) -> InfervisorError:
    """Return a fresh error for an end that isn't natural, with the reason as its code."""
    message = info.message if info is not None else sentence_of(reason)
    cls = ERROR_OF[reason]
    if cls is EngineError:
        error: InfervisorError = EngineError(message, info.detail if info is not None else "")
    elif cls is Poisoned:
        error = Poisoned(message, info.detail if info is not None else "")
    elif cls is InvalidRequest:
        error = InvalidRequest(message, info.field if info is not None else None)
    else:
        error = cls(message)
    error.code = reason.value
    return error
