"""Posts from other threads, finalizers and reentrant places into the event loop's thread.

`post` may be called from any thread at any time, also from `__del__` in the middle of something: it appends to
a deque and writes one byte. The loop's task runs what was posted, in order. Works the same on every anyio
back end, because it needs nothing of them but a readable descriptor.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

import anyio

from infervisor.protocol.errors import UsageError


class Mailbox:
    """Owned by the thread that made it; `run` is its task."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._pid = os.getpid()
        self._posts: deque[Callable[[], None]] = deque()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._closed = False

    def is_here(self) -> bool:
        """Whether the caller is in the owning thread. Raises `UsageError` in a forked child."""
        if os.getpid() != self._pid:
            # The child has copies of the descriptors: what it wrote would reach its parent's worker.
            raise UsageError("this stream belongs to another process; a forked child can't use it")
        return threading.get_ident() == self._thread

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` soon in the owning thread. After `close`, and in a forked child, nothing happens."""
        if self._closed or os.getpid() != self._pid:
            return
        self._posts.append(action)
        try:
            os.write(self._write, b"!")
        except (BlockingIOError, OSError):
            # Full: a wake-up is under way. Closed in this very moment: nobody is left to do it.
            return

    async def run(self) -> None:
        """Carry out posts until cancelled."""
        while True:
            await anyio.wait_readable(self._read)
            try:
                os.read(self._read, 4096)
            except BlockingIOError:
                continue
            while self._posts:
                self._posts.popleft()()

    def close(self) -> None:
        """Take no more posts. Idempotent."""
        if not self._closed:
            self._closed = True
            os.close(self._read)
            os.close(self._write)
