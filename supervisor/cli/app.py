"""The commands of `supervise` and their options. Heavy imports wait until a command runs.

Help and messages of this file are ASCII, so that they look the same in every locale.
"""

from __future__ import annotations

import platform
import sys
import traceback
from typing import Annotated, NoReturn

import typer

import infervisor
from infervisor.supervisor.cli import (
    arguments,
    config_command,
    flags,
    run_command,
    serve_command,
    text_commands,
)
from infervisor.supervisor.cli.exit_codes import ExitCode, exit_with, help_text
from infervisor.supervisor.cli.terminal import for_terminal, repair_standard_streams

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
    has_input = repair_standard_streams()
    try:
        # Commands find it as their context's object.
        app(prog_name="supervise", obj=has_input)
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


for command in (run_command.run, serve_command.serve, config_command.config):
    app.command(epilog=help_text())(command)


# --- probe -----------------------------------------------------------------------------------------


@app.command(epilog=help_text())
def probe(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", show_default=False, help="A .gguf file, or the embedded default."),
    ] = None,
    step_timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest time of each step.")] = 60.0,
    ctx: flags.Ctx = None,
    threads: flags.Threads = None,
    gpu_layers: flags.GpuLayers = None,
    option: flags.Option = None,
    engine: flags.Engine = "llama",
    python: flags.Python = None,
    json: Annotated[bool, typer.Option("--json", help="JSON lines on standard output, one a step.")] = False,
    verbose: flags.Verbose = False,
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
    exit_with(lambda: probe_command.probe(settings))


for text_command in (text_commands.embed, text_commands.tokenize, text_commands.count):
    app.command(epilog=help_text())(text_command)


# --- around every command --------------------------------------------------------------------------


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
