"""Output that never blocks the event loop, however slow its reader is.

One thread per stream writes, so that order is kept. It is a daemon: a write that blocks for ever doesn't hold
up the end of the process.
"""

from __future__ import annotations

import fcntl
import os
import queue
import select
import stat
import threading
import time

import anyio
import anyio.from_thread
import anyio.lowlevel

MIN_COLUMNS = 44
"""What a progress bar takes."""
MIN_LINES = 24
PIECE_BYTES = 4096
"""Written at once: a reader who takes that much, however slowly, isn't stuck."""
MAX_WAITING = 1000
"""Pieces that `post` may leave in the queue; more are dropped, since nobody reads them."""


class Output:
    """One descriptor that is written to in order. Make it inside the event loop."""

    def __init__(self, fd: int) -> None:
        self.is_terminal = os.isatty(fd)
        self.draws = self.is_terminal and os.environ.get("TERM") != "dumb" and _size(fd)[0] >= MIN_COLUMNS
        """Whether a line can be drawn over again."""
        self.dropped = 0
        self._fd = fd
        self._error: OSError | None = None
        self._stands_since_s: float | None = None
        """When the write that is under way began, or last got further."""
        self._waiting: queue.SimpleQueue[tuple[bytes, anyio.Event | None]] = queue.SimpleQueue()
        self._token = anyio.lowlevel.current_token()
        threading.Thread(target=self._write_forever, name=f"output {fd}", daemon=True).start()

    def is_same_as(self, other: Output) -> bool:
        """Whether both write to the same terminal, pipe or file."""
        return os.path.sameopenfile(self._fd, other._fd)

    async def write(self, data: bytes) -> None:
        """Return when `data` and everything before it is written. Raises OSError from then on if it can't be.

        Cancelling stops the wait, not the write.
        """
        written = anyio.Event()
        self._waiting.put((data, written))
        await written.wait()
        if self._error is not None:
            raise self._error

    def post(self, data: bytes) -> None:
        """Write `data` some time; lose it if the stream is broken or too much waits already."""
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put((data, None))
        else:
            self.dropped += 1

    async def stuck(self, for_s: float) -> None:
        """Return when a reader has taken nothing of what waits for it for so many seconds."""
        while True:
            since_s = self._stands_since_s
            left_s = for_s if since_s is None else since_s + for_s - time.monotonic()
            if left_s <= 0:
                return
            await anyio.sleep(left_s)

    def size(self) -> tuple[int, int]:
        """Return the columns and lines of a terminal."""
        return _size(self._fd)

    async def flush(self, within_s: float) -> None:
        """Wait until everything is written, but not for longer than `within_s` seconds."""
        with anyio.move_on_after(within_s, shield=True):
            try:
                await self.write(b"")
            except OSError:
                return

    def _write_forever(self) -> None:
        while True:
            data, written = self._waiting.get()
            try:
                if self._error is None:
                    self._write_all(data)
            except OSError as error:
                self._error = error
            self._stands_since_s = None
            if written is not None:
                try:
                    anyio.from_thread.run_sync(written.set, token=self._token)
                except RuntimeError:
                    return  # the loop is over: nobody waits any more

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        self._stands_since_s = time.monotonic()
        while view:
            try:
                view = view[os.write(self._fd, view[:PIECE_BYTES]) :]
                self._stands_since_s = time.monotonic()
            except BlockingIOError:
                # Another process has made the stream that we share with it non-blocking.
                select.select([], [self._fd], [])

    async def reader_gone(self) -> None:
        """Return when the reading end of a pipe is closed; never for anything else.

        So a request is cancelled at once even in the middle of its prefill, when nothing is being written.
        """
        if not _is_write_end_of_pipe(self._fd):
            await anyio.sleep_forever()
        # The writing end of a pipe never gets readable; what wakes this is its error condition.
        await anyio.wait_readable(self._fd)


def _size(fd: int) -> tuple[int, int]:
    try:
        columns, lines = os.get_terminal_size(fd)
    except OSError:
        columns = lines = 0
    return columns or MIN_COLUMNS, lines or MIN_LINES  # 0 is unknown


def _is_write_end_of_pipe(fd: int) -> bool:
    only_written = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
    return only_written and stat.S_ISFIFO(os.fstat(fd).st_mode)
