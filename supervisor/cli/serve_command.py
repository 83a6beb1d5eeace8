"""The command `supervise serve`: settings are read and checked, then the service runs in this process.

In a container, where this is the first process, the service runs in a child of it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from infervisor.supervisor.cli import flags, serve_flags
from infervisor.supervisor.cli.exit_codes import ExitCode, exit_with
from infervisor.supervisor.cli.terminal import for_terminal
from infervisor.supervisor.http_api.service import pid_one

if TYPE_CHECKING:
    from infervisor.supervisor.http_api.service.config_file import Loaded

EXTRA_PACKAGES = ("pydantic", "pydantic_settings", "starlette", "uvicorn", "prometheus_client", "h11")


@serve_flags.with_settings
def serve(
    given: Mapping[str, Any],
    config: serve_flags.Config = None,
    verbose: flags.Verbose = False,
) -> None:
    """Serve models over HTTP, as OpenAI's clients speak it, with a console at /.

    Every setting is also a variable (--max-queue is SUPERVISE_MAX_QUEUE) and a key of the file (max_queue). Flags
    go before variables, variables before the file. Keys come from a file or from SUPERVISE_API_KEYS, never from a
    flag, where everybody on the machine could read them.

    SIGTERM or Ctrl-C: no new requests, and running ones may finish within the grace; a second one ends them, a
    third one leaves at once. SIGHUP replaces the workers without losing a stream.
    """
    # Before anything is started or imported that would have threads.
    pid_one.stand_in_for_init()
    loaded = load_settings(
        given if not verbose or "log_level" in given else {**given, "log_level": "debug"}, config
    )

    from infervisor.supervisor.http_api.service import request_log, serve_checks, service

    settings = loaded.settings
    keys = serve_checks.check(settings)
    logger = request_log.set_up(settings.log_format, settings.log_level)
    for warning in loaded.warnings:
        logger.warning(warning)

    # Who reads a log in JSON finds nothing else in it.
    say = functools.partial(request_log.announce, logger) if settings.log_format == "json" else _say

    async def run() -> ExitCode:
        end = await service.serve(settings, keys, logger=logger, say=say)
        return _CODES[end.value]

    exit_with(run)


def load_settings(given: Mapping[str, Any], config: str | None) -> Loaded:
    """Return the settings. Raises `ConfigurationError`, and exits where the extra isn't installed."""
    try:
        from infervisor.supervisor.http_api.service.config_file import load
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA_PACKAGES:
            raise
        _say(
            f"the package {error.name} isn't installed, which the service needs: install infervisor with its extra "
            "serve (pip install '.[serve]' in its folder)"
        )
        raise typer.Exit(ExitCode.USAGE) from None
    return load(given, config)


_CODES: Mapping[str, ExitCode] = {
    "asked": ExitCode.OK,
    "load_failed": ExitCode.LOAD_FAILED,
    "no_address": ExitCode.NO_ADDRESS,
}


def _say(text: str) -> None:
    """Tell whoever started the service, whatever the log's level and format. Standard error may be gone."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(for_terminal(f"supervise: {text}\n"))
        sys.stderr.flush()
