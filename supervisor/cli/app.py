"""The commands of `supervise` and their options. Heavy imports wait until a command runs.

Help and messages of this file are ASCII, so that they look the same in every locale.
"""

from __future__ import annotations

import platform
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NoReturn

import typer

import infervisor
from infervisor import OnCrash
from infervisor.supervisor.cli import arguments
from infervisor.supervisor.cli.exit_codes import ExitCode, help_text
from infervisor.supervisor.cli.terminal import for_terminal, repair_standard_streams

_has_input = True
"""Whether standard input was open when the program began."""

app = typer.Typer(
    name="supervise",
    help="Run a local language model in a crash-isolated worker.",
    epilog=help_text(),
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> NoReturn:
    """Run the command line and exit with a code of the table in `exit_codes`."""
    global _has_input
    _has_input = repair_standard_streams()
    try:
        app(prog_name="supervise")
    except KeyboardInterrupt:
        # Before or after the time in which a command takes signals itself.
        sys.exit(ExitCode.CANCELLED)
    except OSError as error:
        # Help, version and messages of usage errors; what commands write has ends of its own.
        sys.exit(ExitCode.READER_GONE if isinstance(error, ConnectionError) else ExitCode.OUTPUT_FAILED)
    except Exception as error:
        sys.exit(_tell(error))
    sys.exit(ExitCode.OK)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"supervise {infervisor.__version__} (Python {platform.python_version()})")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


# --- options that the commands share ---------------------------------------------------------------


def _seconds(help_line: str) -> Any:
    return typer.Option(metavar="SECONDS", help=help_line)


EngineFlag = Annotated[str, typer.Option(help="Engine of the worker: llama, or scripted (needs no model).")]
CtxFlag = Annotated[int | None, typer.Option("--ctx", metavar="TOKENS", help="Context of the model.")]
ThreadsFlag = Annotated[int | None, typer.Option(metavar="N", help="Threads of the llama engine.")]
GpuLayersFlag = Annotated[int | None, typer.Option(metavar="N", help="Layers on the GPU; -1 is all.")]
OptionFlag = Annotated[
    list[str] | None,
    typer.Option(
        "-o", "--option", metavar="NAME=VALUE", help="An option of the engine; a JSON value, or else text."
    ),
]
PythonFlag = Annotated[
    str | None, typer.Option(metavar="PATH", help="Interpreter for the worker, with infervisor in it.")
]
VerboseFlag = Annotated[
    bool, typer.Option("--verbose", "-v", help="Tell every event on standard error, and tracebacks.")
]
ModelFlag = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="PATH", help="The model; the argument is the prompt then."),
]


# --- run -------------------------------------------------------------------------------------------


@app.command(epilog=help_text())
def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL|PROMPT",
            show_default=False,
            help="MODEL: a .gguf file; without it the embedded default. PROMPT: text; without it standard input. "
            "A single argument is the model if it ends in .gguf or exists as a file.",
        ),
    ] = None,
    model: ModelFlag = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message of the chat.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="At most N tokens; until the context is full otherwise.")
    ] = None,
    temperature: Annotated[float, typer.Option(metavar="X", help="0 is greedy; 0 to 100.")] = 0.8,
    top_k: Annotated[int, typer.Option(metavar="N", help="0 is off.")] = 40,
    top_p: Annotated[float, typer.Option(metavar="X", help="1 is off; 0 to 1.")] = 0.95,
    min_p: Annotated[float, typer.Option(metavar="X", help="0 is off; 0 to 1.")] = 0.05,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="0 to 4294967295; drawn at random otherwise.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End the answer before this text. Repeatable.")
    ] = None,
    window: Annotated[int, typer.Option(metavar="N", help="Tokens computed ahead of the output.")] = 32,
    queue_timeout: Annotated[str, _seconds("Waiting in the queue.")] = "none",
    startup_timeout: Annotated[str, _seconds("Loading without progress.")] = "120",
    first_token_timeout: Annotated[str, _seconds("From submit to the first token.")] = "none",
    stall_timeout: Annotated[str, _seconds("Between two tokens.")] = "none",
    total_timeout: Annotated[str, _seconds("The whole request, loading not included.")] = "none",
    consumer_timeout: Annotated[str, _seconds("Output that takes nothing.")] = "none",
    on_crash: Annotated[
        OnCrash, typer.Option(help="When the worker dies: go on in a new one where it was, or fail.")
    ] = OnCrash.RESUME,
    standby: Annotated[
        int, typer.Option(min=0, max=8, metavar="N", help="Further workers, loaded, that take over at once.")
    ] = 0,
    ctx: CtxFlag = None,
    threads: ThreadsFlag = None,
    gpu_layers: GpuLayersFlag = None,
    option: OptionFlag = None,
    engine: EngineFlag = "llama",
    python: PythonFlag = None,
    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="JSON lines on standard output: progress, token, interrupted, resumed, report or error.",
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress, no notes, no report line.")
    ] = False,
    verbose: VerboseFlag = False,
) -> None:
    """Answer one prompt: tokens to standard output as they come, one report line to standard error.

    Ctrl-C cancels, a second one kills the worker, a third one leaves at once. A deadline of 0 or none is no
    limit, and no limit is the default where none is shown.
    """
    if len(words or ()) > 2:
        raise typer.BadParameter("at most two arguments, MODEL and PROMPT: quote a prompt of several words")
    model_word, prompt_word = arguments.model_and_prompt(words or (), model)
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template, which --raw leaves out")
    options = arguments.llama_options(engine, ctx, threads, gpu_layers) | arguments.engine_options(
        option or ()
    )
    generation = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "stop": [arguments.text_of(text, "a stop string") for text in stop or ()],
    }
    system = None if system is None else arguments.text_of(system, "the system message")
    path = arguments.model_path(model_word, engine)
    unnamed = model_word if model is None else None
    prompt = arguments.prompt_of(prompt_word, model=unnamed, has_input=_has_input, raw=raw)

    from infervisor import Deadlines
    from infervisor.supervisor.cli import run as run_command

    deadlines = Deadlines(
        **{
            f"{name}_s": arguments.seconds_or_none(f"--{name.replace('_', '-')}-timeout", text)
            for name, text in (
                ("queue", queue_timeout),
                ("startup", startup_timeout),
                ("first_token", first_token_timeout),
                ("stall", stall_timeout),
                ("total", total_timeout),
                ("consumer", consumer_timeout),
            )
        }
    )
    settings = run_command.RunSettings(
        model=path,
        prompt=prompt,
        system=system,
        raw=raw,
        engine=engine,
        options=options,
        generation=generation,
        window=window,
        deadlines=deadlines,
        python=python,
        on_crash=on_crash.value,
        standby=standby,
        json=json,
        quiet=quiet,
        verbose=verbose,
    )
    _run(lambda: run_command.run(settings))


# --- probe -----------------------------------------------------------------------------------------


@app.command(epilog=help_text())
def probe(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", show_default=False, help="A .gguf file, or the embedded default."),
    ] = None,
    step_timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest time of each step.")] = 60.0,
    ctx: CtxFlag = None,
    threads: ThreadsFlag = None,
    gpu_layers: GpuLayersFlag = None,
    option: OptionFlag = None,
    engine: EngineFlag = "llama",
    python: PythonFlag = None,
    json: Annotated[bool, typer.Option("--json", help="JSON lines on standard output, one a step.")] = False,
    verbose: VerboseFlag = False,
) -> None:
    """Try everything once, timed: load, stream, slow reader, cancel, kill -9 and resume, exit."""
    options = arguments.llama_options(engine, ctx, threads, gpu_layers) | arguments.engine_options(
        option or ()
    )
    path = arguments.model_path(model, engine)

    from infervisor.supervisor.cli import probe as probe_command

    settings = probe_command.ProbeSettings(
        model=path,
        engine=engine,
        options=options,
        python=python,
        step_timeout_s=step_timeout,
        json=json,
        verbose=verbose,
    )
    _run(lambda: probe_command.probe(settings))


# --- around every command --------------------------------------------------------------------------


def _run(command: Callable[[], Awaitable[ExitCode]]) -> NoReturn:
    """Run a command in an event loop and exit with its code."""
    import anyio

    sys.exit(anyio.run(command))


def _tell(error: BaseException) -> ExitCode:
    """Say in one line what nothing below has caught. A traceback is for those who ask for it."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, infervisor.ConfigurationError):
        sys.stderr.write(for_terminal(f"supervise: {error.code}: {error}\n"))
        return ExitCode.USAGE
    hint = " (--verbose shows the traceback)"
    if not {"-v", "--verbose"}.isdisjoint(sys.argv):
        hint = ""
        sys.stderr.write(for_terminal("".join(traceback.format_exception(error))))
    sys.stderr.write(for_terminal(f"supervise: internal error: {type(error).__name__}: {error}{hint}\n"))
    return ExitCode.INTERNAL
