"""`python -m infervisor.supervisor.cli` is `supervise`."""

from __future__ import annotations

from infervisor.supervisor.cli.app import main

if __name__ == "__main__":
    main()
