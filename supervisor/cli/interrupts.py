"""What can stop a run from outside: Ctrl-C, SIGTERM, and a reader of the output that leaves.

The first Ctrl-C cancels, the second kills the worker, the third leaves at once. Signals are the command
line's business alone: the library installs no handler. The worker has a process group of its own, so that a
Ctrl-C in a terminal reaches only this process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

import anyio
import anyio.abc

from infervisor import EndReason, Stream
from infervisor.supervisor.cli.exit_codes import ExitCode
from infervisor.supervisor.cli.output import Output


class Interrupts:
    """What came, and what it stops. `tell` is called with a line for the person at the keyboard."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.code: ExitCode | None = None
        """The exit code that the first interruption asks for."""
        self._tell = tell
        self._signals = 0
        self._is_leaving = False
        self._streams: Sequence[Stream] = ()
        self._work: Sequence[anyio.CancelScope] = ()

    def guard(self, *work: anyio.CancelScope, streams: Sequence[Stream] = ()) -> None:
        """From now on an interruption cancels `streams` and `work`, and a second Ctrl-C kills their worker."""
        self._work, self._streams = work, tuple(streams)
        if self.code is not None:
            # Race "it came between two guards": what it was meant for has just begun.
            self._stop()

    def leaving(self) -> None:
        """Nothing is left but to stop the worker: from now on any Ctrl-C ends this process at once."""
        self._is_leaving = True
        self._streams = self._work = ()

    async def watch_signals(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Task: take signals until cancelled. What this process was started to ignore stays ignored."""
        wanted = [
            number
            for number in (signal.SIGINT, signal.SIGTERM)
            if signal.getsignal(number) is not signal.SIG_IGN
        ]
        with anyio.open_signal_receiver(*wanted) as received:
            task_status.started()
            async for number in received:
                self._take(number)

    async def watch_reader(self, stdout: Output) -> None:
        """Task: notice that nobody reads any more, even while nothing is being written."""
        await stdout.reader_gone()
        self.reader_gone()

    def reader_gone(self) -> None:
        """Whoever read the output is gone: nobody wants the rest."""
        if self.code is None:
            self.code = ExitCode.READER_GONE
            self._stop()

    def _take(self, number: int) -> None:
        if number != signal.SIGINT:
            # SIGTERM, however often, is a request to end in order: it never kills.
            if self.code is None:
                self.code = ExitCode.TERMINATED
                self._tell("ending, as SIGTERM asks")
                self._stop()
            return
        self._signals += 1
        if self.code is None:
            self.code = ExitCode.CANCELLED
        if self._is_leaving or self._signals > 2 or (self._signals == 2 and not self._streams):
            # The worker ends with this process: its control pipe closes and the system kills it.
            os._exit(self.code)
        if self._signals == 1:
            self._tell(
                "stopping; Ctrl-C again " + ("kills the worker" if self._streams else "leaves at once")
            )
            self._stop()
        elif self._streams:
            self._tell("killing the worker; Ctrl-C again leaves at once")
            for stream in self._streams:
                stream.kill()

    def _stop(self) -> None:
        gone = self.code is ExitCode.READER_GONE
        for stream in self._streams:
            stream.cancel(EndReason.CLIENT_DISCONNECTED if gone else EndReason.CANCELLED)
        for work in self._work:
            work.cancel()
