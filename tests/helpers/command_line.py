"""The command `supervise` as a real process, and ways to wait for what it says. Nothing here sleeps blindly."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil

COMMAND = (sys.executable, "-m", "infervisor.supervisor.cli")
WITHIN_S = 60.0
ASCII_LOCALE = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def scripted(**options: Any) -> list[str]:
    """Return the arguments that choose the scripted engine with these options."""
    given = [("-o", f"{name}={json.dumps(value)}") for name, value in options.items()]
    return ["--engine", "scripted", *(word for pair in given for word in pair)]


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment without what would change how output looks."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "PYTHONUTF8")}
    return {**kept, **changes}


def supervise(
    *arguments: str | bytes, stdin: bytes | int = b"", env: dict[str, str] | None = None, **settings: Any
) -> subprocess.CompletedProcess[bytes]:
    """Run the command to its end."""
    given: dict[str, Any] = {"stdin": stdin} if isinstance(stdin, int) else {"input": stdin}
    return subprocess.run(
        [*COMMAND, *arguments],
        **given,
        stdout=settings.pop("stdout", subprocess.PIPE),
        stderr=settings.pop("stderr", subprocess.PIPE),
        env=env or environment(),
        timeout=WITHIN_S,
        check=False,
        **settings,
    )


class Running:
    """The command while it runs. Keeps all that was read from its standard output and error."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.out = bytearray()
        self.err = bytearray()

    def read_until(self, stream: str, wanted: str) -> re.Match[bytes]:
        """Read "out" or "err" until it matches a pattern; return the match."""
        taken: bytearray = getattr(self, stream)
        pipe = self.process.stdout if stream == "out" else self.process.stderr
        assert pipe is not None
        pattern = re.compile(wanted.encode(), re.DOTALL)
        deadline = time.monotonic() + WITHIN_S
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while True:
                found = pattern.search(taken)
                if found is not None:
                    return found
                assert selector.select(max(0.0, deadline - time.monotonic())), self._story(wanted)
                piece = os.read(pipe.fileno(), 1 << 16)
                assert piece, self._story(wanted)
                taken += piece

    def _story(self, wanted: str) -> str:
        return f"never saw {wanted!r}; stdout {bytes(self.out[-2000:])!r}, stderr {bytes(self.err[-2000:])!r}"

    def worker_pid(self) -> int:
        """Return the worker's pid, as `--verbose` tells it."""
        return int(self.read_until("err", r"WorkerSpawned pid=(\d+)")[1])

    def interrupt(self) -> None:
        """Send SIGINT to the whole process group, as a terminal does on Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def finish(self) -> int:
        """Read the rest and return the exit code."""
        out, err = self.process.communicate(timeout=WITHIN_S)
        self.out += out or b""
        self.err += err or b""
        return self.process.returncode

    def close_stdout(self) -> None:
        """Leave, as `head` does when it has enough."""
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process.stdout = None

    @property
    def report(self) -> str:
        """The last line on standard error that is a report."""
        lines = [line for line in self.err.decode().splitlines() if line.startswith("queued ")]
        assert len(lines) == 1, self.err.decode()
        return lines[0]


@contextmanager
def running(
    *arguments: str, prefix: Sequence[str] = (), env: dict[str, str] | None = None
) -> Iterator[Running]:
    """Start the command in a session of its own; it is killed if the block leaves it running."""
    process = subprocess.Popen(
        [*prefix, *COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env or environment(),
        start_new_session=True,
    )
    try:
        yield Running(process)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(WITHIN_S)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def assert_gone(pid: int) -> None:
    """Fail unless the process ends within a moment. A zombie that nobody collects yet counts as gone."""
    deadline = time.monotonic() + 10
    while True:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.01)
