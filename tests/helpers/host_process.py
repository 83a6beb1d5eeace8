"""A host program in a process of its own, for what can't be done to the process that runs the tests."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0
STRICT = ("-X", "dev", "-W", "error")
"""Debug mode of asyncio, and every warning an error: also those about what was never awaited or closed."""


class Host:
    """A running host program. It tells what it does in lines on its standard output."""

    def __init__(self, program: str, *arguments: str, flags: Sequence[str] = STRICT) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *flags, "-c", program, *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self._out = self.process.stdout.fileno()
        self._said = b""

    def line(self, within_s: float = PATIENCE_S) -> str:
        """Return the next line that it prints."""
        deadline = time.monotonic() + within_s
        while b"\n" not in self._said:
            readable, _, _ = select.select([self._out], [], [], max(0, deadline - time.monotonic()))
            data = os.read(self._out, 4096) if readable else b""
            if not data:
                self.process.kill()
                _, errors = self.process.communicate()
                raise AssertionError(
                    f"no line came; so far {self._said!r}; it complained:\n{errors.decode()}"
                )
            self._said += data
        line, self._said = self._said.split(b"\n", 1)
        return line.decode()

    def finish(self) -> tuple[int, str, str]:
        """Wait for its end; return its code and the rest of what it said on either stream."""
        out, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, (self._said + out).decode(), errors.decode()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)


@contextlib.contextmanager
def host(program: str, *arguments: str, flags: Sequence[str] = STRICT) -> Iterator[Host]:
    """Yield a host program; afterwards it is gone."""
    running = Host(program, *arguments, flags=flags)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
        running.process.communicate()


def complaints(errors: str) -> list[str]:
    """Return what a host complained of. Its loop's remarks on slow callbacks (the spawn) are none of ours."""
    return [line for line in errors.splitlines() if not line.startswith("Executing <")]
