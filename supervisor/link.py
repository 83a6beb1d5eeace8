"""The parent's side of one worker's pipes. Moves bytes; decides nothing.

`send` writes at once if the pipe takes it and leaves the rest to one writer task, which never runs inside a
caller's cancel scope, so that a frame is never torn by a cancel. Cancel and credit overtake submits and queries
that wait.
`read_frames` and `read_output` return what is there without waiting; tasks call them whenever there is more.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable

import anyio

from infervisor.protocol.codec import Decoder, encode
from infervisor.protocol.errors import RemoteProtocolError
from infervisor.protocol.messages import Credit, Message, Query, Submit
from infervisor.supervisor.output_ring import OutputRing
from infervisor.supervisor.process import WorkerProcess
from infervisor.supervisor.readable import whenever_readable

READ_BYTES = 1 << 16
READS_A_TURN = 16
"""How many reads one wake-up may make before other tasks get their turn: enough to empty a full pipe once."""
TURN_NS = 10_000_000
"""And for how long: a pipe full of the smallest frames takes a third of a second to apply."""


class Link:
    """One worker's pipes. `on_message` and `on_broken` are called in the event loop's thread."""

    def __init__(
        self,
        process: WorkerProcess,
        on_message: Callable[[Message], None],
        on_broken: Callable[[RemoteProtocolError], None],
    ) -> None:
        self._process = process
        self._on_message = on_message
        self._on_broken = on_broken
        self._decoder = Decoder.from_worker()
        self._now = bytearray()
        self._first: deque[bytes] = deque()
        self._credits: dict[int, bytes] = {}
        self._waiting: deque[tuple[str, int, bytes]] = deque()
        """Submits and queries that haven't left: name, id, frame. They may be large, and may be taken back."""
        self._more_to_write = anyio.Event()
        self._writable = True
        self._closed = False
        self.frames_ended = False
        self.output = OutputRing()

    # --- writing ---------------------------------------------------------------------------------

    def send(self, message: Message) -> int:
        """Queue a message and write what the pipe takes now; return its bytes.

        Raises `LocalProtocolError` if it can't be sent.
        """
        frame = encode(message)
        if isinstance(message, (Submit, Query)):
            self._waiting.append((message.name, message.id, frame))
        elif isinstance(message, Credit):
            # A limit is absolute: one that hasn't left yet is replaced, so that a worker that doesn't read, and
            # says tokens without text for which it gets more and more credit, costs one frame an attempt.
            self._credits[message.id] = frame
        else:
            self._first.append(frame)
        self._flush()
        return len(frame)

    def withdraw(self, attempt_id: int, name: str = Submit.name) -> bool:
        """Take back a submit, or a query, of which no byte was written. Returns whether that was so."""
        for index, (waiting_name, waiting_id, _) in enumerate(self._waiting):
            if (waiting_name, waiting_id) == (name, attempt_id):
                del self._waiting[index]
                return True
        return False

    def send_urgent(self, attempt_id: int) -> None:
        """Write an id into the urgent pipe, past anything that jams control."""
        # A full urgent pipe holds hundreds of ids that the worker hasn't read: the kill is the next stage.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._process.urgent, attempt_id.to_bytes(8, "big"))

    def _flush(self) -> None:
        while self._writable and not self._closed:
            if not self._now:
                if self._first:
                    self._now += self._first.popleft()
                elif self._credits:
                    self._now += self._credits.pop(next(iter(self._credits)))
                elif self._waiting:
                    self._now += self._waiting.popleft()[2]
                else:
                    return
            try:
                written = os.write(self._process.control, self._now)
            except BlockingIOError:
                self._more_to_write.set()
                return
            except BrokenPipeError:
                # The worker is gone or going; its exit tells the rest.
                self._writable = False
                return
            del self._now[:written]

    async def write_forever(self) -> None:
        """Task: write what the pipe didn't take at once, until cancelled."""
        while True:
            await self._more_to_write.wait()
            self._more_to_write = anyio.Event()
            if self._now and self._writable:
                await anyio.wait_writable(self._process.control)
                self._flush()

    # --- reading ---------------------------------------------------------------------------------

    async def read_frames_forever(self) -> None:
        """Task: deliver frames until the pipe ends or breaks."""
        await whenever_readable(self._process.frames, self._read_a_turn)

    def _read_a_turn(self) -> bool:
        until_ns = time.monotonic_ns() + TURN_NS
        for _ in range(READS_A_TURN):
            # A short read was all that there is; what comes meanwhile makes the pipe readable again.
            if self._read_once() < READ_BYTES or time.monotonic_ns() > until_ns:
                break
        return not self.frames_ended

    def read_frames(self, reads: int) -> None:
        """Deliver what is in the frames pipe now; at most so many reads."""
        while reads > 0 and self._read_once():
            reads -= 1

    def _read_once(self) -> int:
        """Deliver the frames of one read; return its bytes, 0 if there are none."""
        if self.frames_ended or self._closed:
            return 0
        try:
            data = os.read(self._process.frames, READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self.frames_ended = True
            return 0
        try:
            messages = self._decoder.feed(data)
        except RemoteProtocolError as error:
            self.frames_ended = True
            for message in error.before:
                self._on_message(message)  # type: ignore[arg-type]
            self._on_broken(error)
            return 0
        for message in messages:
            self._on_message(message)
        return len(data)

    @property
    def has_torn_frame(self) -> bool:
        """Whether the frames ended in the middle of one."""
        return self._decoder.buffered_bytes > 0

    async def read_output_forever(self) -> None:
        """Task: drain standard output and error into the ring until they end."""
        await whenever_readable(self._process.output, self.read_output)

    def read_output(self, reads: int = READS_A_TURN) -> bool:
        """Drain what is there now into the ring. Returns whether there can be more."""
        for _ in range(0 if self._closed else reads):
            try:
                data = os.read(self._process.output, READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.output.feed(data)
        return True

    def close(self) -> None:
        """Touch the pipes no more. Call it after the tasks have ended."""
        self._closed = True
