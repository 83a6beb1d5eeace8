"""How a run with one answer is shown to people, and any run as JSON lines; several answers: `board`, `in_turn`.

People: the answer alone goes to standard output, everything else to standard error. JSON: everything but
diagnostics of `--verbose` goes to standard output, one object a line, in ASCII:

    {"type": "progress", "phase": "load", "fraction": 0.5, "worker_pid": 77}
    {"type": "token", "text": " day", "index": 7, "token_ids": [1194], "t_ns": 123}
    {"type": "interrupted", "cause": "crashed", "worker_pid": 77, "delivered_tokens": 7}
    {"type": "resumed", "worker_pid": 78, "pause_s": 0.4, "restored_tokens": 20}
    {"type": "report", …the fields of `Report.to_dict`…, "exit_code": 0}
    {"type": "error", "code": "model_load", "message": "…", "detail": "…", "exit_code": 6}

A token has `logprobs` and `tool_calls` where there are some. Interrupted and resumed: the worker is gone, and
the answer goes on in another one. With several answers, all but the first and the last type say whose they are:
"stream" is 1 for the first. A run ends with a report for each answer, or with one error, which means that there
was no request to report on.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from infervisor import Chunk, Event, Report, Stream
from infervisor.supervisor.cli.beside_text import LogprobTable, call_line, chunk_as_dict
from infervisor.supervisor.cli.exit_codes import ExitCode
from infervisor.supervisor.cli.load_bar import LoadBar
from infervisor.supervisor.cli.output import Output
from infervisor.supervisor.cli.terminal import for_terminal
from infervisor.supervisor.events import (
    LoadProgress,
    RequestInterrupted,
    RequestReleased,
    RequestResumed,
    WorkerBecameReady,
)

DETAIL_LINES = 20
FLUSH_S = 2.0


class Presentation(Protocol):
    """What a run shows. Answers are numbered from 0 here."""

    def begin(self, streams: Sequence[Stream]) -> None:
        """Take the streams that are about to be read. Without it there was no request."""
        ...

    async def draw(self) -> None:
        """Task: draw what changes by itself, until cancelled."""
        ...

    def event(self, event: Event) -> None:
        """Show an event. Called by the supervisor in the loop's thread: must not block."""
        ...

    def note(self, line: str) -> None:
        """Say something to a person who waits."""
        ...

    async def token(self, number: int, chunk: Chunk) -> None:
        """Show a piece of an answer; return when the next one may come. Raises OSError if it can't be written."""
        ...

    async def ended(self, number: int) -> None:
        """No more of this answer comes; return when all of it is written. Raises OSError if it can't be."""
        ...

    async def report(self, number: int, report: Report, error: Exception | None, code: ExitCode) -> None:
        """Show how a request ended, or keep it for the end."""
        ...

    async def finish(self) -> None:
        """All requests are reported: show what was kept."""
        ...

    async def failure(self, error: Exception, code: ExitCode) -> None:
        """Show why there was no request."""
        ...


class Diagnostics:
    """Lines on standard error."""

    def __init__(self, stderr: Output, *, verbose: bool) -> None:
        self.stderr = stderr
        self.elsewhere: Callable[[str], None] | None = None
        """Takes the lines, made harmless, while something is drawn on the same terminal."""
        self._verbose = verbose
        self._started_s = time.monotonic()

    def line(self, text: str) -> None:
        """Say one line, or several that belong together."""
        if self.elsewhere is not None:
            self.elsewhere(for_terminal(text))
            return
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

    def told(
        self, report: Report, error: Exception | None, logprobs: LogprobTable, *, quiet: bool, whose: str = ""
    ) -> None:
        """Say how an answer ended: what went wrong, and unless quiet its probabilities, warnings and report line.

        whose: what begins the lines, if there are several answers.
        """
        if error is not None:
            self.error(error, whose)
        if quiet:
            return
        for line in logprobs.lines():
            self.line(whose + line)
        for warning in report.warnings:
            self.line(f"supervise: {whose}warning: {warning}")
        self.line(whose + report.to_line())

    def error(self, error: Exception, whose: str = "") -> None:
        """Say what went wrong, and what the worker said before it did."""
        self.line(f"supervise: {whose}{getattr(error, 'code', 'error')}: {error}")
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
        self._bar = LoadBar(diagnostics.stderr, quiet=quiet)
        self._waits = True
        """Whether the answer waits for a worker: a standby that loads beside it draws nothing."""
        self._column_0 = True
        self._logprobs = LogprobTable()

    def begin(self, streams: Sequence[Stream]) -> None:
        """There is one."""

    async def draw(self) -> None:
        """Nothing changes by itself."""

    def event(self, event: Event) -> None:
        """Draw the progress bar; say when the answer loses its worker, and when it goes on."""
        # What had arrived is still being written while the answer waits: no bar over a line of it.
        if isinstance(event, LoadProgress):
            if self._waits and self._column_0:
                self._bar.show(event)
        elif isinstance(event, WorkerBecameReady):
            self._waits = False
            self._bar.clear()
        elif isinstance(event, RequestInterrupted):
            self._waits = True
            self.note(f"worker {event.pid} is gone ({event.cause}); the answer goes on in another one …")
        elif isinstance(event, RequestResumed):
            self._waits = False
            pause_s = event.resume.pause_s or 0.0
            self.note(f"… worker {event.pid} goes on with it after {pause_s:.2f} s")
        self._say.event(event)

    def note(self, line: str) -> None:
        """Say a line on standard error."""
        self._bar.clear()
        if not self._quiet:
            self._leave_answer()
            self._say.line(f"supervise: {line}")

    def _leave_answer(self) -> None:
        """Where answer and notes go to the same place, no note follows the last word of the answer."""
        if not self._column_0 and self._say.stderr.is_same_as(self._stdout):
            self._say.stderr.post(b"\n")
            self._column_0 = True

    async def token(self, number: int, chunk: Chunk) -> None:
        """Write a piece of the answer, unchanged unless a terminal would act on it; calls are lines of JSON."""
        self._logprobs.add(chunk.logprobs)
        text = for_terminal(chunk.text) if self._stdout.is_terminal else chunk.text
        for call in chunk.tool_calls:
            text += ("" if text.endswith("\n") or (self._column_0 and not text) else "\n") + call_line(call)
        if text:
            self._bar.clear()
            self._column_0 = text.endswith("\n")
            await self._stdout.write(text.encode())

    async def ended(self, number: int) -> None:
        """Each piece was written when it came."""

    async def report(self, number: int, report: Report, error: Exception | None, code: ExitCode) -> None:
        """Say the report line, after what went wrong."""
        self._bar.clear()
        if self._stdout.is_terminal and not self._column_0:
            self._stdout.post(b"\n")
            await self._stdout.flush(FLUSH_S)
            self._column_0 = True
        if error is not None or not self._quiet:
            self._leave_answer()
        self._say.told(report, error, self._logprobs, quiet=self._quiet)

    async def finish(self) -> None:
        """Let it be read."""
        await self._say.stderr.flush(FLUSH_S)

    async def failure(self, error: Exception, code: ExitCode) -> None:
        """Say what went wrong."""
        self._bar.clear()
        self._say.error(error)
        await self._say.stderr.flush(FLUSH_S)


class AsJson:
    """One JSON object a line on standard output. several: lines say whose they are."""

    def __init__(self, stdout: Output, diagnostics: Diagnostics, *, several: bool) -> None:
        self._stdout = stdout
        self._say = diagnostics
        self._several = several
        self._numbers: dict[int, int] = {}
        """Of the streams, by the ids of their requests."""

    def begin(self, streams: Sequence[Stream]) -> None:
        """Take whose they are."""
        self._numbers = {stream.report.request_id: number for number, stream in enumerate(streams)}

    async def draw(self) -> None:
        """Nothing changes by itself."""

    def event(self, event: Event) -> None:
        """Write load progress and what becomes of a lost worker's answer; it is dropped if the reader is too
        slow for it."""
        if isinstance(event, LoadProgress):
            place = {"phase": event.phase, "fraction": event.fraction, "worker_pid": event.pid}
            self._stdout.post(as_line({"type": "progress", **place}))
        elif isinstance(event, RequestInterrupted):
            gone = {"cause": event.cause, "worker_pid": event.pid, "delivered_tokens": event.delivered_tokens}
            self._stdout.post(as_line({"type": "interrupted", **self._whose(event.request_id), **gone}))
        elif isinstance(event, RequestResumed):
            resume = event.resume
            back = {
                "worker_pid": event.pid,
                "pause_s": resume.pause_s,
                "restored_tokens": resume.restored_tokens,
            }
            self._stdout.post(as_line({"type": "resumed", **self._whose(event.request_id), **back}))
        self._say.event(event)

    def _whose(self, request_id: int) -> dict[str, Any]:
        return self._stream(self._numbers[request_id]) if request_id in self._numbers else {}

    def _stream(self, number: int) -> dict[str, Any]:
        return {"stream": number + 1} if self._several else {}

    def note(self, line: str) -> None:
        """Say nothing: what is said to people is in the report."""

    async def token(self, number: int, chunk: Chunk) -> None:
        """Write a token line."""
        await self._stdout.write(as_line({"type": "token", **self._stream(number), **chunk_as_dict(chunk)}))

    async def ended(self, number: int) -> None:
        """Each line was written when it came."""

    async def report(self, number: int, report: Report, error: Exception | None, code: ExitCode) -> None:
        """Write the last line of an answer, with the error in it."""
        last = {"type": "report", **self._stream(number), **report.to_dict(), "exit_code": code}
        if error is not None:
            last["error"] = _error_as_dict(error)
        self._stdout.post(as_line(last))

    async def finish(self) -> None:
        """Let it be read."""
        await self._stdout.flush(FLUSH_S)
        await self._say.stderr.flush(FLUSH_S)

    async def failure(self, error: Exception, code: ExitCode) -> None:
        """Write the last line of a run without a request."""
        self._stdout.post(as_line({"type": "error", **_error_as_dict(error), "exit_code": code}))
        await self.finish()


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
