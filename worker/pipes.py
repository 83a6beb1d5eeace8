"""The control pipe, read by a thread of its own so that a cancel is seen while a step runs.

Cancels take effect here and at once; everything else goes to the work loop through the inbox. The end of
the pipe is the end of the parent, and so of this process.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from infervisor.protocol.codec import Decoder
from infervisor.protocol.errors import RemoteProtocolError
from infervisor.protocol.messages import Cancel, Message, Shutdown, Submit
from infervisor.worker.abort import Abort
from infervisor.worker.exits import Exit, leave, start_thread
from infervisor.worker.inbox import Inbox

READ_BYTES = 1 << 16


class ControlReader:
    """Owns the reading end of the control pipe.

    read: `os.read`, or a stand-in that can block (fault injection).
    """

    def __init__(
        self, fd: int, inbox: Inbox, abort: Abort, read: Callable[[int, int], bytes] = os.read
    ) -> None:
        os.set_blocking(fd, True)
        self._fd = fd
        self._inbox = inbox
        self._abort = abort
        self._read = read
        self._decoder = Decoder.to_worker()
        self._loading = True

    def start(self) -> None:
        """Start the reading thread."""
        start_thread("control", self._run)

    def loaded(self) -> None:
        """Let the work loop see to shutdowns from now on; until then one ends the process at once.

        Race "shutdown just before": it exits without closing the engine, which loses nothing.
        """
        self._loading = False

    def _run(self) -> None:
        while True:
            data = self._read(self._fd, READ_BYTES)
            if not data:
                leave(Exit.ASKED_FOR)
            try:
                messages = self._decoder.feed(data)
            except RemoteProtocolError as error:
                leave(Exit.BROKEN_CONTROL, f"worker: the control stream is broken: {error}")
            for message in messages:
                self._take(message)

    def _take(self, message: Message) -> None:
        match message:
            case Cancel():
                self._abort.cancel(message.id)
            case Submit() if not self._abort.admit(message.id):
                leave(
                    Exit.BROKEN_CONTROL,
                    f"worker: the control stream is broken: attempt {message.id} was submitted twice",
                )
            case Shutdown():
                if self._loading:
                    leave(Exit.ASKED_FOR)
                self._abort.stop_all()
        self._inbox.put(message)
