"""`supervise run`: one request, from the load to the report. Uses the public API alone.

The writer takes a chunk only when the one before is written, so that a slow reader holds the worker back: it
computes at most a window, and a pipe's worth, ahead.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio

from infervisor import (
    ConfigurationError,
    Deadlines,
    EndClass,
    InfervisorError,
    InvalidRequest,
    OnCrash,
    Report,
    RestartPolicy,
    Stream,
    Supervisor,
    WorkerUnresponsive,
)
from infervisor.supervisor.cli.exit_codes import ExitCode, code_of
from infervisor.supervisor.cli.interrupts import Interrupts
from infervisor.supervisor.cli.output import Output
from infervisor.supervisor.cli.presentation import FLUSH_S, AsJson, Diagnostics, ForPeople, Presentation

RESTARTS = 5
LAST_WORDS_S = 1.0
"""How long what is left may take to be written after a deadline or a fault has ended the answer."""


class OutputLost(InfervisorError):
    """Standard output can't be written to."""

    code = "output_failed"


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What the command line asks for. generation: what `Supervisor.stream` takes beside the prompt."""

    model: str | None
    prompt: str
    system: str | None = None
    raw: bool = False
    engine: str = "llama"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    generation: Mapping[str, Any] = field(default_factory=dict[str, Any])
    window: int = 32
    deadlines: Deadlines = field(default_factory=Deadlines)
    python: str | None = None
    on_crash: str = "resume"
    standby: int = 0
    json: bool = False
    quiet: bool = False
    verbose: bool = False


async def run(settings: RunSettings) -> ExitCode:
    """Answer one prompt and return the exit code."""
    stdout, stderr = Output(1), Output(2)
    if stderr.is_same_as(stdout):
        # One writer for both: a note and the words before and after it stay in their order.
        stderr = stdout
    diagnostics = Diagnostics(stderr, verbose=settings.verbose)
    show: Presentation
    if settings.json:
        show = AsJson(stdout, diagnostics)
    else:
        show = ForPeople(stdout, diagnostics, quiet=settings.quiet)
    interrupts = Interrupts(show.note)
    code = ExitCode.INTERNAL
    async with anyio.create_task_group() as tasks:
        await tasks.start(interrupts.watch_signals)
        tasks.start_soon(interrupts.watch_reader, stdout)
        code = await _Run(settings, show, interrupts, stdout).whole()
        tasks.cancel_scope.cancel()
    # The end of the worker was told after the report.
    await stderr.flush(FLUSH_S)
    return code


class _Run:
    """One run. `whole` goes through its stages; each leaves in `failure` what went wrong."""

    def __init__(
        self, settings: RunSettings, show: Presentation, interrupts: Interrupts, stdout: Output
    ) -> None:
        self._settings = settings
        self._show = show
        self._interrupts = interrupts
        self._stdout = stdout
        self._failure: InfervisorError | None = None
        self._all_written = False

    async def whole(self) -> ExitCode:
        """Start, load, answer, report, stop."""
        settings = self._settings
        resumes = settings.on_crash == OnCrash.RESUME
        try:
            supervisor = Supervisor(
                settings.model,
                engine=settings.engine,
                options=settings.options,
                window=settings.window,
                deadlines=settings.deadlines,
                # A worker that dies is replaced for the sake of an answer that goes on, not for one that never
                # began.
                restart=RestartPolicy(max_restarts=RESTARTS if resumes else 0, max_failed_starts=0),
                python=settings.python,
                on_crash=settings.on_crash,
                standby=settings.standby,
                on_event=self._show.event,
                wait_until_ready=False,
            )
        except ConfigurationError as error:
            return await self._fail(error, ExitCode.USAGE)
        async with supervisor:
            code = await self._work(supervisor)
            self._interrupts.leaving()
        return code

    async def _work(self, supervisor: Supervisor) -> ExitCode:
        try:
            # Made to be checked only: bad settings are refused before the load, not after it.
            self._stream(supervisor, chat=not self._settings.raw)
        except InvalidRequest as error:
            return await self._fail(error, ExitCode.USAGE)
        facts = await self._load(supervisor)
        if facts is None:
            if self._failure is None:
                return self._interrupts.code or ExitCode.CANCELLED
            late = isinstance(self._failure, WorkerUnresponsive)
            return await self._fail(self._failure, ExitCode.DEADLINE if late else ExitCode.LOAD_FAILED)
        try:
            stream = self._stream(supervisor, chat=self._is_chat(facts))
        except ConfigurationError as error:
            return await self._fail(error, ExitCode.USAGE)
        await self._answer(stream)
        report = stream.report
        code = self._code(report)
        await self._show.report(report, self._failure, code)
        return code

    async def _fail(self, error: InfervisorError, code: ExitCode) -> ExitCode:
        await self._show.failure(error, code)
        return code

    async def _load(self, supervisor: Supervisor) -> Mapping[str, Any] | None:
        """Return the facts of the loaded model, or None if it failed or was interrupted."""
        with anyio.CancelScope() as loading:
            self._interrupts.guard(loading)
            try:
                return await supervisor.wait_ready()
            except InfervisorError as error:
                self._failure = error
        return None

    def _is_chat(self, facts: Mapping[str, Any]) -> bool:
        if self._settings.raw:
            return False
        if facts.get("has_chat_template"):
            return True
        why = facts.get("extra", {}).get("template_error")
        lacks = f"a chat template that can't be used ({why})" if why else "no chat template"
        if self._settings.system is not None:
            raise ConfigurationError(f"the model has {lacks}, so --system has no place: leave it out")
        self._show.note(f"the model has {lacks}: the prompt is continued as it is")
        return False

    def _stream(self, supervisor: Supervisor, *, chat: bool) -> Stream:
        settings = self._settings
        if not chat:
            return supervisor.stream(settings.prompt, **settings.generation)
        messages = [{"role": "user", "content": settings.prompt}]
        if settings.system is not None:
            messages.insert(0, {"role": "system", "content": settings.system})
        return supervisor.stream(messages=messages, **settings.generation)

    # --- the answer ------------------------------------------------------------------------------

    async def _answer(self, stream: Stream) -> None:
        """Write the answer and wait for the release of the request."""
        try:
            async with stream:
                with anyio.CancelScope() as reading:
                    self._interrupts.guard(reading, stream)
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(self._give_up_late, stream, reading)
                        await self._write(stream)
                        tasks.cancel_scope.cancel()
            if not self._all_written and self._failure is None:
                # Nobody waits for the rest of it, but for what ended it: raised unless it was a cancel.
                async for _ in stream:
                    pass
        except InfervisorError as error:
            self._failure = error

    async def _write(self, stream: Stream) -> None:
        try:
            async for chunk in stream:
                await self._show.token(chunk)
            self._all_written = True
        except InfervisorError as error:
            self._failure = error
        except OSError as error:
            hung_up = self._stdout.is_terminal and error.errno == errno.EIO
            if hung_up or isinstance(error, ConnectionError):  # which a broken pipe is, too
                self._interrupts.reader_gone()
            else:
                self._failure = OutputLost(f"the answer can't be written: {error.strerror}")

    async def _give_up_late(self, stream: Stream, reading: anyio.CancelScope) -> None:
        # A deadline must end the program even while standard output takes nothing.
        report = await stream.released()
        if report.end_reason is not None and report.end_reason.end_class in (
            EndClass.DEADLINE,
            EndClass.FAULT,
        ):
            await anyio.sleep(LAST_WORDS_S)
            reading.cancel()

    def _code(self, report: Report) -> ExitCode:
        reason = report.end_reason
        assert reason is not None, "a stream that was left has ended"
        if isinstance(self._failure, OutputLost):
            return ExitCode.OUTPUT_FAILED
        if reason.is_natural and self._all_written:
            return ExitCode.OK
        if reason.is_natural or reason.end_class is EndClass.CALLER:
            return self._interrupts.code or ExitCode.CANCELLED
        return code_of(reason)
