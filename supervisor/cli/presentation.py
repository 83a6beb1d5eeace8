"""How a run is shown: to people, or as JSON lines.

People: the answer alone goes to standard output, everything else to standard error. JSON: everything but
diagnostics of `--verbose` goes to standard output, one object a line, in ASCII:

    {"type": "progress", "phase": "load", "fraction": 0.5, "worker_pid": 77}
    {"type": "token", "text": " day", "index": 7, "token_ids": [1194], "t_ns": 123}
    {"type": "interrupted", "cause": "crashed", "worker_pid": 77, "delivered_tokens": 7}
    {"type": "resumed", "worker_pid": 78, "pause_s": 0.4, "restored_tokens": 20}
    {"type": "report", …the fields of `Report.to_dict`…, "exit_code": 0}
    {"type": "error", "code": "model_load", "message": "…", "detail": "…", "exit_code": 6}

Interrupted and resumed: the worker is gone, and the answer goes on in another one. A run ends with exactly one
of the last two; error means that there was no request to report on.
"""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any, Protocol

from infervisor import Chunk, Event, Report
from infervisor.supervisor.cli.exit_codes import ExitCode
from infervisor.supervisor.cli.output import Output
from infervisor.supervisor.cli.terminal import for_terminal
from infervisor.supervisor.events import (
    LoadProgress,
    RequestInterrupted,
    RequestReleased,
    RequestResumed,
    WorkerBecameReady,
)

BAR_CELLS = 24
DETAIL_LINES = 20
FLUSH_S = 2.0
_CLEAR_LINE = b"\r\x1b[K"


class Presentation(Protocol):
    """What a run shows."""

    def event(self, event: Event) -> None:
        """Show an event. Called by the supervisor in the loop's thread: must not block."""
        ...

    def note(self, line: str) -> None:
        """Say something to a person who waits."""
        ...

    async def token(self, chunk: Chunk) -> None:
        """Show a piece of the answer; return when it is written. Raises OSError if it can't be."""
        ...

    async def report(self, report: Report, error: Exception | None, code: ExitCode) -> None:
        """Show how the request ended."""
        ...

    async def failure(self, error: Exception, code: ExitCode) -> None:
        """Show why there was no request."""
        ...


class Diagnostics:
    """Lines on standard error."""

    def __init__(self, stderr: Output, *, verbose: bool) -> None:
        self.stderr = stderr
        self._verbose = verbose
        self._started_s = time.monotonic()

    def line(self, text: str) -> None:
        """Say one line, or several that belong together."""
        self.stderr.post(for_terminal(text).encode(errors="backslashreplace") + b"\n")

    def event(self, event: Event) -> None:
        """Tell an event, if that is wanted."""
        if not self._verbose:
            return
        if isinstance(event, RequestReleased):
            shown = event.report.to_line()
        else:
            shown = " ".join(
                f"{f.name}={getattr(event, f.name)!s:.300}" for f in dataclasses.fields(event)
            ).replace("\n", " | ")
        self.line(f"[{time.monotonic() - self._started_s:8.3f} s] {type(event).__name__} {shown}")

    def error(self, error: Exception) -> None:
        """Say what went wrong, and what the worker said before it did."""
        self.line(f"supervise: {getattr(error, 'code', 'error')}: {error}")
        # A detail is a traceback of the worker's: for those who ask. The last output of a dead worker is all
        # that is left of it.
        shown = detail_of(error) if self._verbose else getattr(error, "output_tail", "")
        for line in shown.splitlines()[-DETAIL_LINES:]:
            self.line(f"  {line}")


def detail_of(error: Exception) -> str:
    """Return the worker's traceback or last output lines that an error carries, or nothing."""
    return getattr(error, "detail", "") or getattr(error, "output_tail", "") or ""


class ForPeople:
    """The answer alone on standard output; progress (on a terminal), errors and one report line beside it."""

    def __init__(self, stdout: Output, diagnostics: Diagnostics, *, quiet: bool) -> None:
        self._stdout = stdout
        self._say = diagnostics
        self._quiet = quiet
        self._bar_shown = False
        self._waits = True
        """Whether the answer waits for a worker: a standby that loads beside it draws nothing."""
        self._column_0 = True

    def event(self, event: Event) -> None:
        """Draw the progress bar; say when the answer loses its worker, and when it goes on."""
        shows_bar = self._say.stderr.draws and not self._quiet and self._waits
        # What had arrived is still being written while the answer waits: no bar over a line of it.
        if shows_bar and self._column_0 and isinstance(event, LoadProgress):
            done = round(event.fraction * BAR_CELLS)
            bar = "█" * done + "░" * (BAR_CELLS - done)
            text = f"loading {bar} {event.fraction:4.0%} {for_terminal(event.phase)}"
            self._say.stderr.post(_CLEAR_LINE + text.encode())
            self._bar_shown = True
        elif isinstance(event, WorkerBecameReady):
            self._waits = False
            self._clear_bar()
        elif isinstance(event, RequestInterrupted):
            self._waits = True
            self.note(f"worker {event.pid} is gone ({event.cause}); the answer goes on in another one …")
        elif isinstance(event, RequestResumed):
            self._waits = False
            pause_s = event.resume.pause_s or 0.0
            self.note(f"… worker {event.pid} goes on with it after {pause_s:.2f} s")
        self._say.event(event)

    def _clear_bar(self) -> None:
        if self._bar_shown:
            self._say.stderr.post(_CLEAR_LINE)
            self._bar_shown = False

    def note(self, line: str) -> None:
        """Say a line on standard error."""
        self._clear_bar()
        if not self._quiet:
            self._leave_answer()
            self._say.line(f"supervise: {line}")

    def _leave_answer(self) -> None:
        """Where answer and notes go to the same place, no note follows the last word of the answer."""
        if not self._column_0 and self._say.stderr.is_same_as(self._stdout):
            self._say.stderr.post(b"\n")
            self._column_0 = True

    async def token(self, chunk: Chunk) -> None:
        """Write a piece of the answer, unchanged unless a terminal would act on it."""
        text = for_terminal(chunk.text) if self._stdout.is_terminal else chunk.text
        if text:
            self._clear_bar()
            self._column_0 = text.endswith("\n")
            await self._stdout.write(text.encode())

    async def report(self, report: Report, error: Exception | None, code: ExitCode) -> None:
        """Say the report line, after what went wrong."""
        self._clear_bar()
        if self._stdout.is_terminal and not self._column_0:
            self._stdout.post(b"\n")
            await self._stdout.flush(FLUSH_S)
            self._column_0 = True
        if error is not None or not self._quiet:
            self._leave_answer()
        if error is not None:
            self._say.error(error)
        if not self._quiet:
            for warning in report.warnings:
                self._say.line(f"supervise: warning: {warning}")
            self._say.line(report.to_line())
        await self._say.stderr.flush(FLUSH_S)

    async def failure(self, error: Exception, code: ExitCode) -> None:
        """Say what went wrong."""
        self._clear_bar()
        self._say.error(error)
        await self._say.stderr.flush(FLUSH_S)


class AsJson:
    """One JSON object a line on standard output."""

    def __init__(self, stdout: Output, diagnostics: Diagnostics) -> None:
        self._stdout = stdout
        self._say = diagnostics

    def event(self, event: Event) -> None:
        """Write load progress and what becomes of a lost worker's answer; it is dropped if the reader is too
        slow for it."""
        if isinstance(event, LoadProgress):
            place = {"phase": event.phase, "fraction": event.fraction, "worker_pid": event.pid}
            self._stdout.post(as_line({"type": "progress", **place}))
        elif isinstance(event, RequestInterrupted):
            gone = {"cause": event.cause, "worker_pid": event.pid, "delivered_tokens": event.delivered_tokens}
            self._stdout.post(as_line({"type": "interrupted", **gone}))
        elif isinstance(event, RequestResumed):
            resume = event.resume
            back = {"pause_s": resume.pause_s, "restored_tokens": resume.restored_tokens}
            self._stdout.post(as_line({"type": "resumed", "worker_pid": event.pid, **back}))
        self._say.event(event)

    def note(self, line: str) -> None:
        """Say nothing: what is said to people is in the report."""

    async def token(self, chunk: Chunk) -> None:
        """Write a token line."""
        await self._stdout.write(as_line({"type": "token", **dataclasses.asdict(chunk)}))

    async def report(self, report: Report, error: Exception | None, code: ExitCode) -> None:
        """Write the last line, with the error in it."""
        last = {"type": "report", **report.to_dict(), "exit_code": code}
        if error is not None:
            last["error"] = _error_as_dict(error)
        await self._last(last)

    async def failure(self, error: Exception, code: ExitCode) -> None:
        """Write the last line of a run without a request."""
        await self._last({"type": "error", **_error_as_dict(error), "exit_code": code})

    async def _last(self, line: dict[str, Any]) -> None:
        self._stdout.post(as_line(line))
        await self._stdout.flush(FLUSH_S)
        await self._say.stderr.flush(FLUSH_S)


def _error_as_dict(error: Exception) -> dict[str, Any]:
    return {
        "code": getattr(error, "code", "error"),
        "message": str(error),
        "detail": detail_of(error),
        "field": getattr(error, "field", None),
    }


def as_line(value: dict[str, Any]) -> bytes:
    """Return one line of JSON in ASCII: no character of an answer can end it early or reach a terminal."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, default=str).encode() + b"\n"
