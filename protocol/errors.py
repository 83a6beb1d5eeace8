"""Every error of the project: one root, a stable `code`, and whether a retry can help.

Owns the exception classes and nothing else. Errors cross the pipe as messages, never as pickles;
`protocol.messages` carries code, text and detail, and the parent raises the class for them.

The names say whose fault it is: configuration and request errors are the caller's, protocol errors
are the other end's, worker errors are the worker's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class InfervisorError(Exception):
    """Root of all errors. `code` is stable and machine-readable; `retryable` says whether to try again.

    `report` is the report of the request that ended with it, if there was one.
    """

    code = "error"
    retryable = False
    report: Any = None


class ConfigurationError(InfervisorError, ValueError):
    """A setting is impossible. Nothing has been started."""

    code = "configuration"


class UsageError(InfervisorError, RuntimeError):
    """The object is used in a way that it can't serve: closed, not entered, in a forked child, twice."""

    code = "usage"


# --- protocol: what one end may not say to the other -------------------------------------------


class ProtocolError(InfervisorError):
    """The rules of the pipe were broken."""

    code = "protocol"


class LocalProtocolError(ProtocolError):
    """This end tried to send or do something that the rules forbid: a defect on this side."""

    code = "protocol_local"


class RemoteProtocolError(ProtocolError):
    """The other end sent something that the rules forbid. Its process is not to be trusted further.

    `before` holds the messages that the same read completed before the bad one.
    """

    code = "protocol_remote"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.before: Sequence[object] = ()


class FrameTooLarge(RemoteProtocolError):
    """A frame declares more bytes than this direction of the pipe allows."""

    code = "frame_too_large"


class FlowControlError(RemoteProtocolError):
    """A token arrived beyond the credit granted for it."""

    code = "flow_control"


# --- admission: refused before any work was done -----------------------------------------------


class AdmissionError(InfervisorError):
    """The request was not taken; nothing was computed for it."""

    code = "admission"
    retryable = True


class Overloaded(AdmissionError):
    """The queue in front of the worker is full."""

    code = "overloaded"


class ShuttingDown(AdmissionError):
    """The supervisor is closing and takes no more requests."""

    code = "shutting_down"
    retryable = False


class Unavailable(AdmissionError):
    """No worker can be had now: the breaker is open. The message says why, and what has to happen.

    Not retryable, on this very error, if waiting alone doesn't help.
    """

    code = "unavailable"


class InvalidRequest(InfervisorError, ValueError):
    """A request is malformed or impossible. `field` names the part at fault, or is None."""

    code = "invalid_request"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


# --- request: how a running request can end badly ----------------------------------------------


class RequestError(InfervisorError):
    """A request that was taken did not end naturally."""

    code = "request"


class RequestCancelled(RequestError):
    """The request was cancelled before its end; what had been said until then is a fragment."""

    code = "cancelled"


class DeadlineExceeded(RequestError):
    """One of the request's budgets ran out; the code says which."""

    code = "deadline"
    retryable = True


class EngineError(RequestError):
    """The engine failed at this request; the worker lives on. `detail` holds the worker's traceback."""

    code = "engine_error"

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class Poisoned(RequestError):
    """The request was alone in its worker twice when that died: it isn't tried again. The message says how.

    `output_tail` holds the last lines that the last of these workers wrote.
    """

    code = "poisoned"

    def __init__(self, message: str, output_tail: str = "") -> None:
        super().__init__(message)
        self.output_tail = output_tail


# --- worker: what can happen to the process ----------------------------------------------------


class WorkerError(InfervisorError):
    """The worker process failed."""

    code = "worker"
    retryable = True


class WorkerSpawnError(WorkerError):
    """The worker process could not be started at all."""

    code = "worker_spawn"
    retryable = False


class ModelLoadError(WorkerError):
    """The engine refused the model or its options. `detail` holds the native log's last lines."""

    code = "model_load"
    retryable = False

    def __init__(self, message: str, code: str = "model_load", detail: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.detail = detail


class WorkerUnresponsive(WorkerError):
    """The worker lived but did not progress, and was replaced."""

    code = "worker_unresponsive"


class WorkerDied(WorkerError):
    """The worker process ended. Exactly one of `exit_code` and `signal_name` is set.

    `output_tail` holds the last lines that the process wrote to its standard output and error.
    """

    code = "worker_crashed"

    def __init__(
        self,
        message: str,
        *,
        exit_code: int | None = None,
        signal_name: str | None = None,
        output_tail: str = "",
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.signal_name = signal_name
        self.output_tail = output_tail
