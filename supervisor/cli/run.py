"""`supervise run`: one request or several side by side, from the load to the report. Uses the public API alone.

The writer takes a chunk only when the one before is written, so that a slow reader holds the worker back: it
computes at most a window, and a pipe's worth, ahead.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
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
    RestartPolicy,
    Stream,
    Supervisor,
    WorkerUnresponsive,
)
from infervisor.supervisor.cli.exit_codes import ExitCode, code_of, worst
from infervisor.supervisor.cli.interrupts import Interrupts
from infervisor.supervisor.cli.output import Output
from infervisor.supervisor.cli.presentation import FLUSH_S, AsJson, Diagnostics, ForPeople, Presentation
from infervisor.supervisor.cli.terminal import for_terminal

RESTARTS = 5
LAST_WORDS_S = 1.0
"""For how long the output may take nothing after a deadline or a fault has ended the answer."""
TITLE_CHARACTERS = 60


class OutputLost(InfervisorError):
    """Standard output can't be written to."""

    code = "output_failed"


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What the command line asks for. generation: what `Supervisor.stream` takes beside the prompt.

    answers: how many to each prompt; more than one to a single prompt only. slots: None is the engine's default.
    """

    model: str | None
    prompts: Sequence[str]
    answers: int = 1
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
    slots: int | None = None
    step_budget_s: float | None = None
    json: bool = False
    quiet: bool = False
    verbose: bool = False

    @property
    def streams(self) -> int:
        """How many answers there will be."""
        return len(self.prompts) * self.answers


async def run(settings: RunSettings) -> ExitCode:
    """Answer the prompts and return the exit code."""
    stdout, stderr = Output(1), Output(2)
    if stderr.is_same_as(stdout):
        # One writer for both: a note and the words before and after it stay in their order.
        stderr = stdout
    show = _presentation(settings, stdout, Diagnostics(stderr, verbose=settings.verbose))
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


def _presentation(settings: RunSettings, stdout: Output, diagnostics: Diagnostics) -> Presentation:
    several = settings.streams > 1
    if settings.json:
        return AsJson(stdout, diagnostics, several=several)
    if not several:
        return ForPeople(stdout, diagnostics, quiet=settings.quiet)
    titles = [_title(prompt) for prompt in settings.prompts] * settings.answers
    if stdout.draws:
        # Only here: it loads rich.
        from infervisor.supervisor.cli.board import Board

        return Board(stdout, diagnostics, titles, quiet=settings.quiet)
    from infervisor.supervisor.cli.several import InTurn

    return InTurn(stdout, diagnostics, titles, quiet=settings.quiet)


def _title(prompt: str) -> str:
    """Return the first words of a prompt, harmless to a terminal."""
    words = for_terminal(" ".join(prompt[: 4 * TITLE_CHARACTERS].split()))
    if len(words) <= TITLE_CHARACTERS:
        return words
    return words[:TITLE_CHARACTERS].rpartition(" ")[0].rstrip() + " …"


@dataclass(slots=True)
class _Answer:
    """One answer while it is read. failure: what went wrong. reading: cancelled when nobody waits for the rest."""

    number: int
    stream: Stream
    reading: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    failure: InfervisorError | None = None
    all_written: bool = False


class _Run:
    """One run. `whole` goes through its stages."""

    def __init__(
        self, settings: RunSettings, show: Presentation, interrupts: Interrupts, stdout: Output
    ) -> None:
        self._settings = settings
        self._show = show
        self._interrupts = interrupts
        self._stdout = stdout

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
                slots=settings.slots,
                step_budget_s=settings.step_budget_s,
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
            self._streams(supervisor, chat=not self._settings.raw)
        except InvalidRequest as error:
            return await self._fail(error, ExitCode.USAGE)
        try:
            facts = await self._load(supervisor)
        except InfervisorError as error:
            late = isinstance(error, WorkerUnresponsive)
            return await self._fail(error, ExitCode.DEADLINE if late else ExitCode.LOAD_FAILED)
        if facts is None:
            return self._interrupts.code or ExitCode.CANCELLED
        try:
            streams = self._streams(supervisor, chat=self._is_chat(facts))
        except ConfigurationError as error:
            return await self._fail(error, ExitCode.USAGE)
        answers = [_Answer(number, stream) for number, stream in enumerate(streams)]
        self._show.begin(streams)
        codes = await self._read_all(answers)
        await self._show.finish()
        return worst(codes)

    async def _fail(self, error: InfervisorError, code: ExitCode) -> ExitCode:
        await self._show.failure(error, code)
        return code

    async def _load(self, supervisor: Supervisor) -> Mapping[str, Any] | None:
        """Return the facts of the loaded model, or None if it was interrupted. Raises what kept it from loading."""
        with anyio.CancelScope() as loading:
            self._interrupts.guard(loading)
            return await supervisor.wait_ready()
        return None

    def _is_chat(self, facts: Mapping[str, Any]) -> bool:
        if self._settings.raw:
            return False
        if facts.get("has_chat_template"):
            return True
        why = facts.get("extra", {}).get("template_error")
        lacks = f"a chat template that can't be used ({why})" if why else "no chat template"
        for name, flag in (
            ("system", self._settings.system),
            ("tools", self._settings.generation.get("tools")),
        ):
            if flag is not None:
                raise ConfigurationError(f"the model has {lacks}, so --{name} has no place: leave it out")
        self._show.note(f"the model has {lacks}: the prompt is continued as it is")
        return False

    def _streams(self, supervisor: Supervisor, *, chat: bool) -> list[Stream]:
        settings = self._settings
        generation = settings.generation
        streams: list[Stream] = []
        for prompt in settings.prompts:
            given: dict[str, Any] = {"prompt": prompt}
            if chat:
                messages = [{"role": "user", "content": prompt}]
                if settings.system is not None:
                    messages.insert(0, {"role": "system", "content": settings.system})
                given = {"messages": messages}
            if settings.answers > 1:
                streams += supervisor.streams(n=settings.answers, **given, **generation)
            else:
                streams.append(supervisor.stream(**given, **generation))
        return streams

    # --- the answers -----------------------------------------------------------------------------

    async def _read_all(self, answers: Sequence[_Answer]) -> list[ExitCode]:
        """Write the answers, wait for the release of their requests, and return an exit code for each."""
        codes: list[ExitCode] = []

        async def one(answer: _Answer) -> None:
            await self._read(answer)
            code = self._code(answer)
            codes.append(code)
            await self._show.report(answer.number, answer.stream.report, answer.failure, code)

        async with anyio.create_task_group() as drawing:
            drawing.start_soon(self._show.draw)
            async with AsyncExitStack() as entered, anyio.create_task_group() as tasks:
                for answer in answers:
                    try:
                        # In their order, which is that of the queue.
                        await entered.enter_async_context(answer.stream)
                    except InfervisorError as error:
                        answer.failure = error
                self._interrupts.guard(
                    *(answer.reading for answer in answers), streams=[answer.stream for answer in answers]
                )
                for answer in answers:
                    tasks.start_soon(one, answer)
            drawing.cancel_scope.cancel()
        return codes

    async def _read(self, answer: _Answer) -> None:
        """Write one answer and wait for the release of its request. What went wrong is in `failure` then."""
        stream = answer.stream
        try:
            if answer.failure is None:
                with answer.reading:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(self._give_up_late, answer)
                        await self._write(answer)
                        tasks.cancel_scope.cancel()
            if not answer.all_written and answer.failure is None:
                # Nobody waits for the rest of it, but for what ended it: raised unless it was a cancel.
                async for _ in stream:
                    pass
            stream.cancel()  # nothing, unless its output is lost
            await stream.released()
        except InfervisorError as error:
            answer.failure = error

    async def _write(self, answer: _Answer) -> None:
        try:
            try:
                async for chunk in answer.stream:
                    await self._show.token(answer.number, chunk)
            except InfervisorError as error:
                answer.failure = error
            await self._show.ended(answer.number)
            answer.all_written = answer.failure is None
        except OSError as error:
            hung_up = self._stdout.is_terminal and error.errno == errno.EIO
            if hung_up or isinstance(error, ConnectionError):  # which a broken pipe is, too
                self._interrupts.reader_gone()
            else:
                answer.failure = OutputLost(f"the answer can't be written: {error.strerror}")

    async def _give_up_late(self, answer: _Answer) -> None:
        # A deadline must end the program even while standard output takes nothing.
        report = await answer.stream.released()
        reason = report.end_reason
        if reason is not None and reason.end_class in (EndClass.DEADLINE, EndClass.FAULT):
            await self._stdout.stuck(LAST_WORDS_S)
            answer.reading.cancel()

    def _code(self, answer: _Answer) -> ExitCode:
        reason = answer.stream.report.end_reason
        assert reason is not None, "a stream that was left has ended"
        if isinstance(answer.failure, OutputLost):
            return ExitCode.OUTPUT_FAILED
        if reason.is_natural and answer.all_written:
            return ExitCode.OK
        if reason.is_natural or reason.end_class is EndClass.CALLER:
            return self._interrupts.code or ExitCode.CANCELLED
        return code_of(reason)
