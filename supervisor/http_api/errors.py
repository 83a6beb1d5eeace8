"""The one table of errors: code → HTTP status, type in OpenAI's terms, and when to try again.

Codes of requests are the end reasons of the library; those of the service itself stand beside them. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

from infervisor import InfervisorError, InvalidRequest


@dataclass(frozen=True, slots=True)
class Kind:
    """What a client is told. retry_after_s: seconds, None if trying again is no use or needs no wait."""

    status: int
    type: str
    retry_after_s: int | None = None


_REQUEST, _SERVER = "invalid_request_error", "server_error"

KINDS: Mapping[str, Kind] = {
    # The request itself.
    "invalid_request": Kind(400, _REQUEST),
    "invalid_json": Kind(400, _REQUEST),
    "invalid_http": Kind(400, _REQUEST),
    "not_found": Kind(404, _REQUEST),
    "model_not_found": Kind(404, _REQUEST),
    "request_not_found": Kind(404, _REQUEST),
    "method_not_allowed": Kind(405, _REQUEST),
    "request_timeout": Kind(408, _REQUEST),
    "body_too_large": Kind(413, _REQUEST),
    "unsupported_media_type": Kind(415, _REQUEST),
    "headers_too_large": Kind(431, _REQUEST),
    # Its worker died of it twice: the same again would be no better.
    "poisoned": Kind(422, _REQUEST),
    # Who asks.
    "invalid_api_key": Kind(401, "authentication_error"),
    "forbidden_host": Kind(403, "permission_error"),
    "forbidden_origin": Kind(403, "permission_error"),
    # Stopped: by another client's cancel, or because its own is gone.
    "cancelled": Kind(499, "request_cancelled"),
    "client_disconnected": Kind(499, "request_cancelled"),
    # Too much at once.
    "overloaded": Kind(429, "rate_limit_error", 1),
    "queue_timeout": Kind(503, "rate_limit_error", 1),
    "too_many_requests": Kind(503, "rate_limit_error", 1),
    # No worker.
    "unavailable": Kind(503, _SERVER, 5),
    "shutting_down": Kind(503, _SERVER, 5),
    "startup_timeout": Kind(503, _SERVER, 5),
    "worker_killed": Kind(503, _SERVER, 1),
    "worker_spawn": Kind(503, _SERVER),
    "model_load": Kind(503, _SERVER),
    # Too slow.
    "first_token_timeout": Kind(504, "timeout_error"),
    "stall_timeout": Kind(504, "timeout_error"),
    "total_timeout": Kind(504, "timeout_error"),
    "consumer_timeout": Kind(504, "timeout_error"),
    "deadline": Kind(504, "timeout_error"),
    # Failed.
    "engine_error": Kind(500, _SERVER),
    "internal_error": Kind(500, _SERVER),
    "worker_crashed": Kind(502, _SERVER),
    "worker_unresponsive": Kind(502, _SERVER),
    "protocol_error": Kind(502, _SERVER),
}
"""One row for each code that a client can meet."""


OWN_DEADLINES = frozenset({"total_timeout", "consumer_timeout"})
"""The client's own: what it asked for took too long, or it didn't read. The same again would be no better."""


class HttpRefused(InfervisorError):
    """The service refuses a request before anything was computed. headers: for the answer."""

    def __init__(
        self, code: str, message: str, field: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.field = field
        self.headers = dict(headers or {})


def name_as_body(error: InvalidRequest, field_of: Callable[[str | None], str | None]) -> None:
    """Let an error of the library name its field as the body does. field_of: from one name to the other."""
    field, error.field = error.field, field_of(error.field)
    if field is not None and error.field != field:
        message = str(error)
        # Where it begins with the field, as most do.
        if message.startswith(field):
            error.args = (f"{error.field}{message.removeprefix(field)}",)


def code_of(error: BaseException) -> str:
    """Return the code that stands for an error in the table."""
    code = error.code if isinstance(error, InfervisorError) else "internal_error"
    if code in KINDS:
        return code
    # A model can fail to load for many reasons, each with a code of its own.
    return "model_load" if type(error).__name__ == "ModelLoadError" else "internal_error"


def kind_of(error: BaseException) -> Kind:
    """Return what a client is told of an error."""
    return KINDS[code_of(error)]


def error_body(error: BaseException) -> dict[str, Any]:
    """Return the error in OpenAI's shape. What nobody foresaw is in the log, not in the answer."""
    code = code_of(error)
    if code == "internal_error":
        message = "The service failed at this request. Its log has the details, under the request's id."
    else:
        message = str(error)
    field = getattr(error, "field", None)
    return {"error": {"message": message, "type": KINDS[code].type, "param": field, "code": code}}


def error_headers(error: BaseException) -> dict[str, str]:
    """Return the headers of an answer that is an error: when to try again, and whether."""
    kind = kind_of(error)
    headers = dict(getattr(error, "headers", {}))
    retryable = getattr(error, "retryable", False) or kind.retry_after_s is not None
    code = code_of(error)
    if code in ("unavailable", "model_load") and not getattr(error, "retryable", False):
        # The breaker is open for good: waiting alone doesn't help.
        retryable = False
    if code in OWN_DEADLINES:
        retryable = False
    if retryable and kind.retry_after_s is not None:
        headers.setdefault("Retry-After", str(kind.retry_after_s))
    # What OpenAI's clients go by, before the status.
    headers["X-Should-Retry"] = "true" if retryable else "false"
    return headers


def error_answer(
    error: BaseException, *, request_id: str | None = None, report: list[dict[str, Any]] | None = None
) -> JSONResponse:
    """Return the whole answer for an error. report: of the requests that ended with it."""
    body = error_body(error)
    headers = error_headers(error)
    if request_id is not None:
        headers["X-Request-Id"] = request_id
    if report:
        body["x_infervisor"] = report
    return JSONResponse(body, kind_of(error).status, headers)
