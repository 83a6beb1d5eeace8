"""The command `supervise`, and `python -m infervisor.supervisor.cli`.

Imports nothing before `main` runs, so that a Ctrl-C in the first moment ends as quietly as a later one.
"""

from __future__ import annotations

import sys

CANCELLED = 130
"""`ExitCode.CANCELLED`, which can't be imported yet."""


def main() -> None:
    """Run the command line and exit."""
    try:
        from infervisor.supervisor.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(CANCELLED)
    run()


if __name__ == "__main__":
    main()
