"""The log of the service: how a line looks, and the line of each HTTP request that asked a model.

Answers and keys are in none of them; prompts only if somebody asked for that. Written with `logging`, to standard
error; that it is closed or that its reader is gone never fails a request. Runs in the event loop's thread.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from infervisor.supervisor.http_api.ledger import Entry

LOGGER = "infervisor.serve"
NS_PER_MS = 1_000_000
MAX_TEXT_CHARACTERS = 2000


def set_up(log_format: str, level: str, stream: TextIO | None = None) -> logging.Logger:
    """Send what this service and its server log to a stream, standard error; return the service's logger."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    # What can't be written is lost: nobody reads a traceback about it either.
    handler.handleError = lambda record: None  # type: ignore[method-assign]
    for name in ("infervisor", "uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        # Libraries tell of what is told here already, or of a client's mistakes.
        logger.setLevel(level.upper() if name == "infervisor" else max("WARNING", level.upper(), key=_rank))
    return logging.getLogger(LOGGER)


def _rank(level: str) -> int:
    return logging.getLevelNamesMapping()[level]


def announce(logger: logging.Logger, text: str) -> None:
    """Log a line whatever the level is."""
    logger.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 0, text, (), None))


class TextLines(logging.Formatter):
    """Time, level, message, and then name=value for what belongs to it. Control characters are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line; a traceback follows in lines of its own."""
        values = getattr(record, "values", {})
        told = " ".join(
            f"{name}={_shown(value)}" for name, value in values.items() if value not in (None, (), [])
        )
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = f"{when}.{int(record.msecs):03d}Z {record.levelname.lower()} {_printable(record.getMessage())}"
        line = f"{line} {told}" if told else line
        if record.exc_info:
            trace = self.formatException(record.exc_info).split("\n")
            line = "\n".join([line, *(f"  {_printable(part)}" for part in trace)])
        return line


class JsonLines(logging.Formatter):
    """An object a line, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        told: dict[str, Any] = {
            "t_s": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "values", {}),
        }
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    plain = text.isprintable() and text and not any(mark in text for mark in ' ="')
    return text if plain else json.dumps(text, ensure_ascii=not text.isprintable())


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# --- what is logged --------------------------------------------------------------------------------


def log_request(logger: logging.Logger, entry: Entry, *, prompts: bool) -> None:
    """Log a finished request. Called by the ledger, once for each."""
    values = request_values(entry)
    if prompts:
        asked = entry.asked
        values["prompt"] = None if asked is None else _shortened(asked.messages or asked.prompts)
    logger.info("request", extra={"values": values})


def request_values(entry: Entry) -> dict[str, Any]:
    """Return what a line tells of a request: times in ms from its start, of several answers the longest."""
    reports = [stream.report for stream in entry.streams]
    lines = [report.timeline for report in reports]

    def longest(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return round(max(known) * 1000, 1) if known else None

    return {
        "id": entry.id,
        "client_request_id": entry.client_request_id,
        "endpoint": entry.endpoint,
        "model": entry.model,
        "status": entry.status,
        "end_reason": _joined(report.end_reason for report in reports),
        "prompt_tokens": max((report.usage.prompt_tokens for report in reports), default=0),
        "tokens": sum(max(r.usage.completion_tokens, r.timeline.tokens) for r in reports),
        "ttft_ms": longest(line.ttft_s for line in lines),
        "total_ms": longest(line.total_s for line in lines),
        "release_ms": longest(line.release_s for line in lines),
        "stage": _joined(report.stage for report in reports),
        "resumes": sum(len(report.resumes) for report in reports) or None,
    }


def _joined(values: Iterable[object]) -> str | None:
    """Return the different ones of several answers' values, in order."""
    return ",".join(dict.fromkeys(str(value) for value in values if value is not None)) or None


def _shortened(asked: object) -> str:
    text = json.dumps(asked, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_TEXT_CHARACTERS else text[:MAX_TEXT_CHARACTERS] + "…"
