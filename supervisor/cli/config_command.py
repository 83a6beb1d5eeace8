"""The command `supervise config`: what the service would be told, and whether it would take that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from infervisor.supervisor.cli import serve_command, serve_flags
from infervisor.supervisor.cli.terminal import for_terminal


@serve_flags.with_settings
def config(
    given: Mapping[str, Any],
    config: serve_flags.Config = None,
    check: Annotated[
        bool, typer.Option("--check", help="Say whether `serve` would start with them: exit code 0 or 2.")
    ] = False,
) -> None:
    """Print the settings of `supervise serve` as a file, and where each comes from.

    Takes the same flags, variables and file. What is printed can be saved and used as the file. Keys are not shown.
    """
    loaded = serve_command.load_settings(given, config)

    for warning in loaded.warnings:
        typer.echo(for_terminal(f"supervise: warning: {warning}"), err=True)
    if not check:
        from infervisor.supervisor.http_api.service import config_file

        typer.echo(for_terminal(config_file.to_file(loaded)), nl=False)
        return
    from infervisor.supervisor.http_api.service import serve_checks

    serve_checks.check(loaded.settings)
    typer.echo("the settings are right")
