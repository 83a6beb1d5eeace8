"""Frames to the parent: whole, in order, from one thread at a time.

The main thread sends: first while loading, then from the work loop; the thread that answers queries does, too. A
write may block while the parent is slow, but never for long: credit bounds the tokens in flight, beats are
coalesced (built when sent, never queued) and logs are dropped and counted when there are too many.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping

from infervisor.protocol.codec import encode
from infervisor.protocol.messages import Beat, FromWorker, Log
from infervisor.worker.exits import Exit, leave

BEAT_INTERVAL_NS = 100_000_000
LOG_BURST = 20
LOG_INTERVAL_NS = 100_000_000
"""Logs: a burst of 20, then one every 100 ms."""
LOG_TEXT_CHARACTERS = 8192


def sendable(text: str) -> str:
    """Return `text` with what UTF-8 can't hold (lone surrogates, as in undecodable paths) escaped."""
    return text.encode(errors="backslashreplace").decode()


class Outbox:
    """Owns the writing end of the frames pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._writing = threading.Lock()
        self._log_tokens = float(LOG_BURST)
        self._log_refilled_ns = time.monotonic_ns()
        self._logs_dropped = 0
        self._next_beat_ns = 0

    def send(self, message: FromWorker) -> None:
        """Write one frame. Raises `LocalProtocolError`, with nothing written, if it can't be encoded.

        Ends the process quietly when the parent's end of the pipe is gone.
        """
        frame = memoryview(encode(message))
        try:
            with self._writing:
                while frame:
                    frame = frame[os.write(self._fd, frame) :]
        except BrokenPipeError:
            leave(Exit.ASKED_FOR)

    def log(self, level: str, text: str) -> None:
        """Send a line worth telling, unless there were too many lately; the next one says how many."""
        now_ns = time.monotonic_ns()
        earned = (now_ns - self._log_refilled_ns) / LOG_INTERVAL_NS
        self._log_tokens = min(LOG_BURST, self._log_tokens + earned)
        self._log_refilled_ns = now_ns
        if self._log_tokens < 1:
            self._logs_dropped += 1
            return
        self._log_tokens -= 1
        self.send(Log(now_ns, level, sendable(text)[:LOG_TEXT_CHARACTERS], self._logs_dropped))
        self._logs_dropped = 0

    def beat_due_in_s(self) -> float:
        """Return in how many seconds the next beat may go out; 0 if now."""
        return max(0, self._next_beat_ns - time.monotonic_ns()) / 1e9

    def beat(self, steps: int, longest_ns: Mapping[str, int], active: int, waiting: int) -> None:
        """Send the state of the work loop as it is now. Ask `beat_due_in_s` first."""
        now_ns = time.monotonic_ns()
        self._next_beat_ns = now_ns + BEAT_INTERVAL_NS
        self.send(Beat(now_ns, steps, dict(longest_ns), active, waiting))
