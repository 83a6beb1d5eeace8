"""Several answers for people: what the two ways of showing them share, and the one without a terminal.

Answers come in the order of their prompts, each whole and under a heading, as soon as it and those before it are
done. While something is being written no further token is taken, so that a slow reader holds all of them back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import anyio

from infervisor import Chunk, Event, Report, Stream
from infervisor.supervisor.cli.beside_text import LogprobTable, call_line
from infervisor.supervisor.cli.exit_codes import ExitCode
from infervisor.supervisor.cli.load_bar import LoadBar
from infervisor.supervisor.cli.output import Output
from infervisor.supervisor.cli.presentation import FLUSH_S, Diagnostics
from infervisor.supervisor.cli.terminal import for_terminal
from infervisor.supervisor.events import LoadProgress, RequestInterrupted, RequestResumed, WorkerBecameReady


class Several(ABC):
    """Progress, notes and reports beside several answers; subclasses show the answers. titles: one for each."""

    def __init__(
        self, stdout: Output, diagnostics: Diagnostics, titles: Sequence[str], *, quiet: bool
    ) -> None:
        self._stdout = stdout
        self._say = diagnostics
        self._titles = titles
        self._quiet = quiet
        self._bar = LoadBar(diagnostics.stderr, quiet=quiet)
        self._streams: Sequence[Stream] = ()
        self._logprobs = [LogprobTable() for _ in titles]
        self._reports: dict[int, tuple[Report, Exception | None]] = {}
        self._error: OSError | None = None
        self._free = anyio.Event()
        """Set unless something is being written."""
        self._free.set()

    def begin(self, streams: Sequence[Stream]) -> None:
        """Take the streams."""
        self._streams = streams
        self._bar.clear()

    async def draw(self) -> None:  # noqa: B027 - nothing to draw is a fine answer
        """Nothing changes by itself."""

    def event(self, event: Event) -> None:
        """Draw the progress bar; say when an answer loses its worker, and when it goes on."""
        if isinstance(event, LoadProgress):
            if not self._streams:
                self._bar.show(event)
        elif isinstance(event, WorkerBecameReady):
            self._bar.clear()
        elif isinstance(event, RequestInterrupted):
            whose = self._whose(event.request_id)
            self.note(
                f"{whose}worker {event.pid} is gone ({event.cause}); the answer goes on in another one …"
            )
        elif isinstance(event, RequestResumed):
            whose, pause_s = self._whose(event.request_id), event.resume.pause_s or 0.0
            self.note(f"{whose}… worker {event.pid} goes on with it after {pause_s:.2f} s")
        self._say.event(event)

    def _whose(self, request_id: int) -> str:
        for number, stream in enumerate(self._streams):
            if stream.report.request_id == request_id:
                return f"{number + 1}: "
        return ""

    def note(self, line: str) -> None:
        """Say a line on standard error."""
        self._bar.clear()
        if not self._quiet:
            self._say.line(f"supervise: {line}")

    async def token(self, number: int, chunk: Chunk) -> None:
        """Take a piece of an answer once nothing is being written."""
        await self._free.wait()
        self._check()
        self._logprobs[number].add(chunk.logprobs)
        self._add(number, chunk.text)
        for call in chunk.tool_calls:
            self._add(number, call_line(call), on_new_line=True)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _write(self, data: bytes) -> None:
        self._free = free = anyio.Event()
        try:
            await self._stdout.write(data)
        except OSError as error:
            self._error = error
            raise
        finally:
            free.set()

    @abstractmethod
    def _add(self, number: int, text: str, *, on_new_line: bool = False) -> None:
        """Take a piece of text."""

    @abstractmethod
    async def ended(self, number: int) -> None:
        """Return when all of it is written."""

    async def report(self, number: int, report: Report, error: Exception | None, code: ExitCode) -> None:
        """Keep it for the end."""
        self._reports[number] = report, error

    async def finish(self) -> None:
        """Say the report lines in the order of the answers."""
        self._bar.clear()
        await self._stdout.flush(FLUSH_S)
        for number in sorted(self._reports):
            report, error = self._reports[number]
            self._say.told(report, error, self._logprobs[number], quiet=self._quiet, whose=f"{number + 1}: ")
        await self._say.stderr.flush(FLUSH_S)

    async def failure(self, error: Exception, code: ExitCode) -> None:
        """Say what went wrong before there was a request."""
        self._bar.clear()
        self._say.error(error)
        await self._say.stderr.flush(FLUSH_S)


class InTurn(Several):
    """One whole answer after the other, for pipes and files, and for terminals that can't be drawn on."""

    def __init__(
        self, stdout: Output, diagnostics: Diagnostics, titles: Sequence[str], *, quiet: bool
    ) -> None:
        super().__init__(stdout, diagnostics, titles, quiet=quiet)
        self._texts: list[list[str]] = [[] for _ in titles]
        self._unwritten = list(range(len(titles)))
        self._turn = 0
        self._past: set[int] = set()
        self._next_turn = anyio.Event()

    def _add(self, number: int, text: str, *, on_new_line: bool = False) -> None:
        pieces = self._texts[number]
        if on_new_line and pieces and not pieces[-1].endswith("\n"):
            text = "\n" + text
        if text:
            pieces.append(for_terminal(text) if self._stdout.is_terminal else text)

    async def ended(self, number: int) -> None:
        """Wait for the answers before it, then write it."""
        try:
            while self._turn != number:
                await self._next_turn.wait()
            self._check()
            # Before the wait: what is cut off in it is written all the same.
            self._unwritten.remove(number)
            await self._write(self._whole(number))
        finally:
            # Also of one that was cut off: those after it don't wait for it.
            self._past.add(number)
            while self._turn in self._past:
                self._turn += 1
            self._next_turn.set()
            self._next_turn = anyio.Event()

    def _whole(self, number: int) -> bytes:
        text = "".join(self._texts[number])
        end = "" if not text or text.endswith("\n") else "\n"
        return f"── {number + 1}: {self._titles[number]} ──\n{text}{end}".encode()

    async def finish(self) -> None:
        """Write what came of answers that were cut off, then the report lines."""
        for number in self._unwritten if self._error is None else ():
            self._stdout.post(self._whole(number))
        await super().finish()
