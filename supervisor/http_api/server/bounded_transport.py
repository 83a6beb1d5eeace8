"""A connection's transport whose end has a bound, and the settings of its socket.

asyncio's `close()` waits until what was written is read, however long that takes: a client that stops reading
would hold its connection, and the answer's memory, for ever. Owns one timer. Runs in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from typing import Any, cast

SEND_BUFFER_BYTES = 16 << 10
"""The kernel doubles it. More would hide a stopped reader behind many events that nobody reads."""
WRITE_BUFFER_BYTES = 1
"""A write that the kernel doesn't take at once makes the next one wait. With 0 asyncio's TLS waits for ever."""
READ_BYTES = 32 << 10
"""Bytes parsed in one turn of the loop: a body in chunks of one byte costs some microseconds for each."""


class BoundedTransport:
    """Stand in for a transport; `close()` becomes `abort()` when the client takes nothing for `bound_s`."""

    def __init__(self, transport: asyncio.Transport, bound_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._bound_s = bound_s
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write, unless the connection is lost: asyncio would warn of each further write."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Close once everything is written, or the client has stopped taking it."""
        if self._is_closing:
            return  # asyncio's TLS forgets its state when it is closed twice
        self._is_closing = True
        self._transport.close()
        self._look(self._transport.get_write_buffer_size() + 1)

    def forget(self) -> None:
        """Stop the timer: the connection is gone, and its transport may not be asked any more."""
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, before_bytes: int) -> None:
        left_bytes = self._transport.get_write_buffer_size()
        if left_bytes == 0:
            return
        if left_bytes >= before_bytes:
            self._transport.abort()
            return
        self._timer = self._loop.call_later(self._bound_s, self._look, left_bytes)


def tune(transport: asyncio.Transport) -> None:
    """Let a stopped reader be felt soon, a vanished peer be noticed, and small events leave at once."""
    transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
    if hasattr(transport, "max_size"):  # asyncio's socket transports; they read 256 KiB a turn otherwise
        cast(Any, transport).max_size = READ_BYTES
    sock = transport.get_extra_info("socket")
    if sock is None:
        return
    options = [(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)]
    if sock.family != socket.AF_UNIX:
        options += [
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        ]
        if sys.platform == "linux":
            options += [
                (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
                (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, SEND_BUFFER_BYTES),
            ]
    with contextlib.suppress(OSError):  # the peer is gone already; reading will tell
        for level, option, value in options:
            sock.setsockopt(level, option, value)
