"""llama-cpp-python's own server in a process of its own: a peer to measure against."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


def check_installed() -> None:
    """Raise SystemExit that says how to get it."""
    if any(
        importlib.util.find_spec(name) is None for name in ("starlette_context", "sse_starlette", "fastapi")
    ):
        raise SystemExit(
            "this benchmark measures against llama-cpp-python's server: python -m pip install -e '.[bench]'"
        )


@dataclass(frozen=True)
class PythonServer:
    """A server that listens on a port of loopback. Its process is the one that computes."""

    pid: int
    port: int


@contextlib.contextmanager
def python_server(model: Path, *, context: int, threads: int) -> Iterator[PythonServer]:
    """Yield a server that is ready, and end it afterwards."""
    command = [
        sys.executable, "-m", "llama_cpp.server", "--model", str(model), "--host", "127.0.0.1", "--port", "0",
        "--n_ctx", str(context), "--n_threads", str(threads), "--n_threads_batch", str(threads),
        "--verbose", "False",
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        # What it says from then on must not fill the pipe.
        rest = threading.Thread(target=process.stderr.read, daemon=True)
        try:
            for line in process.stderr:
                if found := re.search(r"running on http://127\.0\.0\.1:(\d+)", line):
                    break
            else:
                raise RuntimeError(f"llama-cpp-python's server ended with code {process.wait()}")
            rest.start()
            yield PythonServer(process.pid, int(found[1]))
        finally:
            # It waits for its requests at a gentle end, and none of them is of any use any more.
            process.kill()
            if rest.ident is not None:
                rest.join()
