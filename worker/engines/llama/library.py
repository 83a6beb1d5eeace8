"""Bring llama.cpp into the process: import it late, keep its log, and own the flag that stops a step.

The native library is one per process, so the log is too. Its callback runs in whichever thread logs.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections import deque
from collections.abc import MutableMapping
from typing import Any

from infervisor.protocol.quoting import printable
from infervisor.worker.engine import LoadRefused

KEPT_LINES = 200
SPIN_COUNT = "2000"
_DEBUG, _WARNING, _ERROR, _CONTINUED = 1, 3, 4, 5


class NativeLog:
    """The last lines that llama.cpp logged. Warnings and errors also go to standard error, escaped.

    Its debug lines, thousands for one model, are dropped: they would push out those that say something.
    quiet: keep lines without printing them, for a step that is being interrupted on purpose.
    """

    def __init__(self) -> None:
        self.quiet = False
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._problems: deque[str] = deque(maxlen=KEPT_LINES)
        self._level = 0

    def write(self, level: int, text: bytes) -> None:
        """Take what llama.cpp logs: a line, or a piece of one."""
        if level != _CONTINUED:
            self._level = level
        if self._level == _DEBUG:
            return
        line = printable(text.decode("utf-8", "replace").rstrip("\n"))
        if not line or set(line) == {"."}:
            return  # the dots of a progress bar
        self._lines.append(line)
        if self._level in (_WARNING, _ERROR):
            self._problems.append(line)
            if not self.quiet:
                print(f"llama.cpp: {line}", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Forget everything, before something whose own lines matter."""
        self._lines.clear()
        self._problems.clear()

    def find(self, pattern: str) -> re.Match[str] | None:
        """Return the last match of a regular expression in the lines kept, upper and lower case alike."""
        matches = (re.search(pattern, line, re.IGNORECASE) for line in reversed(self._lines))
        return next((match for match in matches if match is not None), None)

    def tail(self, lines: int = 12) -> str:
        """Return the last warnings and errors, or the last lines if there are none."""
        return "\n".join(list(self._problems or self._lines)[-lines:])


class AbortFlag:
    """What llama.cpp asks before every graph node, answered without Python.

    The callback is libc's `strlen` and its argument a two-byte buffer: "" is 0, go on, and "\\x01" is 1,
    stop. A Python callback would take the GIL some five hundred times a step.
    """

    def __init__(self, llama_cpp: Any) -> None:
        self._buffer = ctypes.create_string_buffer(2)
        self.callback = ctypes.cast(ctypes.CDLL(None).strlen, llama_cpp.ggml_abort_callback)
        self.argument = ctypes.cast(self._buffer, ctypes.c_void_p)

    def set(self) -> None:
        """Stop the running call. Any thread: it is one store."""
        self._buffer[0] = b"\x01"

    def clear(self) -> None:
        """Let the next call run."""
        self._buffer[0] = b"\x00"


class _Library:
    """The one import of the process and what must live as long as it."""

    module: Any = None
    log = NativeLog()
    callback: Any = None


def load_library() -> tuple[Any, NativeLog]:
    """Import llama_cpp, once per process; return it and its log.

    Raises `LoadRefused` (code engine_import) naming the interpreter if it can't be imported.
    """
    if _Library.module is None:
        # Read once by the native library when it starts. No debugger on an abort: it means 19 s of silence.
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        _set_openmp_waiting(os.environ)
        try:
            import llama_cpp
        except ImportError as error:
            raise LoadRefused(
                f"{sys.executable} can't import llama_cpp ({error}): "
                "run `pip install llama-cpp-python` with that interpreter, or name another with python=",
                "engine_import",
            ) from error
        except (OSError, RuntimeError) as error:
            raise LoadRefused(
                f"{sys.executable} has llama_cpp, but its native library doesn't load ({error}): "
                "run `pip install --force-reinstall --no-cache-dir llama-cpp-python` with that interpreter",
                "engine_import",
            ) from error
        _start_log(llama_cpp)
        llama_cpp.llama_backend_init()
        _Library.module = llama_cpp
    return _Library.module, _Library.log


def _set_openmp_waiting(environment: MutableMapping[str, str]) -> None:
    """Let threads that wait for each other spin for some microseconds, then sleep; the user's choice wins.

    Threads that always spin take a core from whoever needs it, most of all the reader of the tokens; threads
    that sleep at once wake up too late some hundred times a step. See docs/adr/0006.
    """
    if not environment.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        environment["OMP_WAIT_POLICY"] = "passive"
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT


def _start_log(llama_cpp: Any) -> None:
    write = _Library.log.write

    def received(level: int, text: bytes | None, _data: Any) -> None:
        write(level, text or b"")

    # The reference lives as long as the process: native threads may log until the end.
    _Library.callback = llama_cpp.llama_log_callback(received)
    llama_cpp.llama_log_set(_Library.callback, None)
