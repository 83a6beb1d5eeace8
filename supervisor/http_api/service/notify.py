"""What is told to systemd: datagrams to the socket that NOTIFY_SOCKET names, as sd_notify(3) describes them.

Without that variable nothing is sent. A service manager that doesn't listen never holds the service up: a datagram
that can't be sent at once is dropped. Runs in the event loop's thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping

import anyio

US_PER_S = 1_000_000
MAX_STATUS_CHARACTERS = 300


class Notifier:
    """The way to the service manager. `is_wanted` is false where there is none; then nothing does anything."""

    def __init__(self, environment: Mapping[str, str], pid: int | None = None) -> None:
        """environment: of this process. pid: of this process; WATCHDOG_PID may name another one."""
        self._address = _address(environment.get("NOTIFY_SOCKET", ""))
        self._socket: socket.socket | None = None
        self.watchdog_s = _watchdog_s(environment, os.getpid() if pid is None else pid)
        """How long the service manager waits for a sign of life; None where it doesn't."""
        if self._address is None:
            self.watchdog_s = None
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | getattr(socket, "SOCK_CLOEXEC", 0))
        self._socket.setblocking(False)

    @property
    def is_wanted(self) -> bool:
        """Whether anybody listens."""
        return self._socket is not None

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # --- what can be said --------------------------------------------------------------------------

    def ready(self, status: str) -> None:
        """The service serves: after the start, and after a reload."""
        self._send("READY=1", f"STATUS={_line(status)}")

    def status(self, status: str) -> None:
        """A line for `systemctl status`."""
        self._send(f"STATUS={_line(status)}")

    def reloading(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Workers are being replaced, as SIGHUP asked. The time tells this reload from one before it."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={clock_ns() // 1000}", "STATUS=replacing workers")

    def stopping(self, status: str) -> None:
        """The end has begun."""
        self._send("STOPPING=1", f"STATUS={_line(status)}")

    def extend_timeout(self, seconds: float) -> None:
        """Starting or stopping goes on: ask for so many seconds from now."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * US_PER_S)}")

    def alive(self) -> None:
        """A sign of life for the watchdog."""
        self._send("WATCHDOG=1")

    async def keep_alive(self) -> None:
        """Task: give a sign of life at half of the time, in the event loop, so that a hung loop gives none."""
        if self.watchdog_s is None:
            return
        while True:
            self.alive()
            await anyio.sleep(self.watchdog_s / 2)

    def _send(self, *lines: str) -> None:
        if self._socket is None or self._address is None:
            return
        # Not there, full, or gone: the service goes on.
        with contextlib.suppress(OSError):
            self._socket.sendto("\n".join(lines).encode(errors="backslashreplace"), self._address)


def _address(text: str) -> str | bytes | None:
    """Return the socket's address: a path, or an abstract name after "@"."""
    if text.startswith("/"):
        return text
    return b"\0" + os.fsencode(text[1:]) if text.startswith("@") and len(text) > 1 else None


def _watchdog_s(environment: Mapping[str, str], pid: int) -> float | None:
    # WATCHDOG_PID says whom it is meant for: a child that inherited the variable must not answer.
    wanted = environment.get("WATCHDOG_PID")
    microseconds = environment.get("WATCHDOG_USEC", "")
    if not microseconds.isascii() or not microseconds.isdigit() or int(microseconds) == 0:
        return None
    return None if wanted not in (None, "", str(pid)) else int(microseconds) / US_PER_S


def _line(text: str) -> str:
    """Return one line: a line break in a status would begin another assignment."""
    return " ".join(text.split())[:MAX_STATUS_CHARACTERS]
