"""`supervise embed`, `tokenize` and `count`: what a model makes of texts. Uses the public API alone.

Results go to standard output, everything else to standard error, as `run` does it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from infervisor.supervisor.cli import answer_arguments, arguments, flags
from infervisor.supervisor.cli.exit_codes import ExitCode, code_of, exit_with

if TYPE_CHECKING:
    from infervisor import Event, InfervisorError, Supervisor
    from infervisor.supervisor.cli.presentation import Diagnostics

BATCH_TEXTS = 256
"""Embedded in one request: results come while the rest is computed."""


@dataclass(frozen=True, slots=True)
class _Worker:
    """The worker that is asked."""

    model: str | None
    engine: str
    options: dict[str, Any]
    python: str | None
    quiet: bool
    verbose: bool


def embed(
    context: typer.Context,
    texts: flags.Texts = None,
    model: flags.TextModel = None,
    file: flags.File = None,
    vectors: flags.Vectors = flags.VectorFormat.JSON,
    no_normalise: flags.NotNormalised = False,
    ctx: flags.Ctx = None,
    threads: flags.Threads = None,
    gpu_layers: flags.GpuLayers = None,
    option: flags.Option = None,
    engine: flags.Engine = "llama",
    python: flags.Python = None,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> None:
    """Turn each text into a vector of length 1: one line a text, in their order."""
    options = arguments.llama_options(engine, ctx, threads, gpu_layers)
    asked = _worker(model, engine, options, option, python, quiet, verbose)
    if texts and file is not None:
        raise typer.BadParameter("texts are given as arguments and with --file: leave one of the two out")
    if texts:
        given = [arguments.text_of(text, "a text") for text in texts]
    else:
        given = arguments.lines_of(file or "-", "--file" if file else "no text", has_input=context.obj)
    if not given or not all(given):
        raise typer.BadParameter("a text is empty" if given else "there is no text: no line holds one")

    async def lines(supervisor: Supervisor, say: Diagnostics) -> AsyncIterator[str]:
        dimensions = tokens = 0
        for first in range(0, len(given), BATCH_TEXTS):
            embedded = await supervisor.embed(given[first : first + BATCH_TEXTS], normalise=not no_normalise)
            dimensions, tokens = embedded.dimensions, tokens + embedded.report.usage.prompt_tokens
            for index, vector in enumerate(embedded.vectors, first):
                # Nine digits tell 32-bit numbers apart.
                numbers = [f"{number:.9g}" for number in vector]
                if vectors is flags.VectorFormat.TSV:
                    yield "\t".join(numbers)
                else:
                    yield f'{{"index": {index}, "vector": [{", ".join(numbers)}]}}'
        if not quiet:
            say.line(f"{len(given)} texts · {tokens} tokens · {dimensions} dimensions")

    _answer(asked, lines)


def tokenize(
    context: typer.Context,
    text: flags.Text = None,
    model: flags.TextModel = None,
    no_special: flags.Special = False,
    option: flags.Option = None,
    engine: flags.Engine = "llama",
    python: flags.Python = None,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> None:
    """Tell the ids of a text's tokens, and of nothing but it, as a list in JSON."""
    asked = _worker(model, engine, {}, option, python, quiet, verbose)
    given = arguments.prompt_of(text, model=None, has_input=context.obj, raw=False, name="text")

    async def lines(supervisor: Supervisor, say: Diagnostics) -> AsyncIterator[str]:
        yield json.dumps(await supervisor.tokenize(given, special=not no_special))

    _answer(asked, lines)


def count(
    context: typer.Context,
    text: flags.Text = None,
    messages: flags.Messages = None,
    tools: flags.Tools = None,
    model: flags.TextModel = None,
    no_special: flags.Special = False,
    option: flags.Option = None,
    engine: flags.Engine = "llama",
    python: flags.Python = None,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> None:
    """Count the tokens that a prompt takes: of a raw one, or of a chat with what its template adds."""
    asked = _worker(model, engine, {}, option, python, quiet, verbose)
    prompt: dict[str, Any] = {"special": not no_special}
    if messages is None:
        prompt["prompt"] = arguments.prompt_of(text, model=None, has_input=context.obj, raw=True, name="text")
    elif text is not None:
        raise typer.BadParameter("give a text or --messages, not both")
    else:
        prompt["messages"] = answer_arguments.json_file(messages, "--messages", has_input=context.obj)
    if tools is not None:
        prompt["tools"] = answer_arguments.json_file(tools, "--tools")

    async def lines(supervisor: Supervisor, say: Diagnostics) -> AsyncIterator[str]:
        yield str(await supervisor.count_tokens(**prompt))

    _answer(asked, lines, check=lambda supervisor: supervisor.stream(**prompt))


def _worker(
    model: str | None,
    engine: str,
    options: dict[str, Any],
    option: list[str] | None,
    python: str | None,
    quiet: bool,
    verbose: bool,
) -> _Worker:
    path = arguments.model_path(model, engine)
    return _Worker(path, engine, options | arguments.engine_options(option or ()), python, quiet, verbose)


# --- the run -----------------------------------------------------------------------------------------


def _answer(
    asked: _Worker,
    lines: Callable[[Supervisor, Diagnostics], AsyncIterator[str]],
    check: Callable[[Supervisor], object] = lambda supervisor: None,
) -> None:
    """Load, write the lines, and exit. check: raises `InvalidRequest` for what can be refused before the load."""
    exit_with(lambda: _whole(asked, lines, check))


async def _whole(
    asked: _Worker,
    lines: Callable[[Supervisor, Diagnostics], AsyncIterator[str]],
    check: Callable[[Supervisor], object],
) -> ExitCode:
    import anyio

    from infervisor import ConfigurationError, InfervisorError, RestartPolicy, Supervisor
    from infervisor.supervisor.cli.interrupts import Interrupts
    from infervisor.supervisor.cli.load_bar import LoadBar
    from infervisor.supervisor.cli.output import Output
    from infervisor.supervisor.cli.presentation import FLUSH_S, Diagnostics
    from infervisor.supervisor.events import LoadProgress, WorkerBecameReady

    stdout, stderr = Output(1), Output(2)
    say, bar = Diagnostics(stderr, verbose=asked.verbose), LoadBar(stderr, quiet=asked.quiet)

    def told(event: Event) -> None:
        if isinstance(event, LoadProgress):
            bar.show(event)
        elif isinstance(event, WorkerBecameReady):
            bar.clear()
        say.event(event)

    def note(line: str) -> None:
        bar.clear()
        if not asked.quiet:
            say.line(f"supervise: {line}")

    async def write(supervisor: Supervisor) -> ExitCode:
        try:
            check(supervisor)
        except InfervisorError as error:
            say.error(error)
            return ExitCode.USAGE
        try:
            await supervisor.wait_ready()
        except InfervisorError as error:
            bar.clear()
            say.error(error)
            return ExitCode.LOAD_FAILED
        try:
            async for line in lines(supervisor, say):
                await stdout.write(line.encode() + b"\n")
        except InfervisorError as error:
            say.error(error)
            return _code(error)
        except OSError as error:
            if isinstance(error, ConnectionError):
                return ExitCode.READER_GONE
            say.line(f"supervise: output_failed: the result can't be written: {error.strerror}")
            return ExitCode.OUTPUT_FAILED
        return ExitCode.OK

    interrupts = Interrupts(note)
    code: ExitCode | None = None
    async with anyio.create_task_group() as tasks:
        await tasks.start(interrupts.watch_signals)
        tasks.start_soon(interrupts.watch_reader, stdout)
        try:
            supervisor = Supervisor(
                asked.model,
                engine=asked.engine,
                options=asked.options,
                python=asked.python,
                restart=RestartPolicy(max_failed_starts=0),
                snapshots=None,
                on_event=told,
                wait_until_ready=False,
            )
        except ConfigurationError as error:
            say.error(error)
            code = ExitCode.USAGE
        else:
            async with supervisor:
                with anyio.CancelScope() as working:
                    interrupts.guard(working)
                    code = await write(supervisor)
                interrupts.leaving()
        tasks.cancel_scope.cancel()
    await stderr.flush(FLUSH_S)
    return interrupts.code or ExitCode.CANCELLED if code is None else code


def _code(error: InfervisorError) -> ExitCode:
    from infervisor import AdmissionError, DeadlineExceeded, InvalidRequest

    reason = None if error.report is None else error.report.end_reason
    if reason is not None:
        return code_of(reason)
    if isinstance(error, (AdmissionError, InvalidRequest)):
        return ExitCode.REFUSED
    return ExitCode.DEADLINE if isinstance(error, DeadlineExceeded) else ExitCode.FAULT
