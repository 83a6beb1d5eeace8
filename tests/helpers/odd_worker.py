"""A worker that is deaf to SIGTERM, or that isn't one at all.

Used as the interpreter of a supervisor, through `as_interpreter`: it gets a worker's command line.
"""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path

from infervisor.worker import __main__ as worker

WORKER_ARGUMENTS = 3
"""`-P -m infervisor.worker`, which stand before the arguments proper."""


def as_interpreter(directory: Path, script: str) -> Path:
    """Return an executable that runs a shell script in which `$PYTHON` is this interpreter."""
    path = directory / "interpreter"
    path.write_text(f"#!/bin/sh\nPYTHON={shlex.quote(sys.executable)}\n{script}\n")
    path.chmod(0o755)
    return path


def deaf_to_sigterm(directory: Path) -> Path:
    """Return an interpreter whose worker ignores SIGTERM."""
    return as_interpreter(
        directory, f'shift {WORKER_ARGUMENTS}\nexec "$PYTHON" -P {shlex.quote(__file__)} "$@"'
    )


def main() -> None:
    """Be a worker that ignores SIGTERM."""
    set_signals = worker._set_signals

    def set_signals_and_ignore() -> None:
        set_signals()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    worker._set_signals = set_signals_and_ignore
    worker.main()


if __name__ == "__main__":
    main()
