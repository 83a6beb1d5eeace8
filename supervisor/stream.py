"""What a caller holds of a request: an async context manager and iterator over chunks.

Leaving it early cancels and waits for the release, shielded and bounded. `cancel` may be called from any
thread, twice, and after the end. A stream that is dropped without being left is cancelled when it is collected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import anyio

from infervisor.protocol.endings import EndClass, EndReason
from infervisor.protocol.errors import UsageError
from infervisor.protocol.timeline import NS_PER_S
from infervisor.supervisor.dispatcher import Dispatcher
from infervisor.supervisor.logprobs import TokenLogprob
from infervisor.supervisor.mailbox import Mailbox
from infervisor.supervisor.report import Report
from infervisor.supervisor.request import Chunk, Request
from infervisor.supervisor.tool_reading import ToolReading

if TYPE_CHECKING:
    from infervisor.protocol.tool_calls import ToolCall

RELEASE_MARGIN_S = 5.0
"""Beyond the graces of the ladder: collecting a killed process."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `str(answer)` is its text.

    logprobs: of the tokens that its text stands for, if they were asked for. tool_calls: what the model wants to be
    called; the text is without them.
    """

    text: str
    report: Report
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()

    def __str__(self) -> str:
        return self.text


class Stream:
    """One request. Made by `Supervisor.stream`; enters the queue when it is entered or first read."""

    def __init__(self, dispatcher: Dispatcher, mailbox: Mailbox, request: Request) -> None:
        self._dispatcher = dispatcher
        self._mailbox = mailbox
        self._request = request
        self._admitted = False
        self._reading = False
        self._read_up = False
        self._tools: ToolReading | None = None
        self._tools_known = False

    def __repr__(self) -> str:
        state = self._request.state
        return f"<Stream {self._request.id} {state.reason or state.phase}>"

    # --- as a context manager --------------------------------------------------------------------

    async def __aenter__(self) -> Stream:
        """Enter the queue. Raises `Overloaded`, `Unavailable` or `ShuttingDown`; nothing is left then."""
        self._admit()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel if it hasn't ended, and wait until its resources are free, at most the ladder's graces."""
        self._check_here()
        self._dispatcher.abandon(self._request, EndReason.CANCELLED)
        await self.released()

    def _admit(self) -> None:
        # A stream that was admitted may be read to its end even when the supervisor is closed by then.
        self._check_here()
        if not self._admitted:
            self._admitted = True
            if not self._request.has_ended:
                self._dispatcher.admit(self._request)

    def _check_here(self) -> None:
        if not self._mailbox.is_here():
            raise UsageError(
                "use this stream in the thread of its event loop; only cancel and kill go anywhere"
            )

    def __del__(self) -> None:
        # A collector may run this in the middle of a decision, or in another thread: post, don't act.
        request = getattr(self, "_request", None)
        if request is not None and self._admitted and not request.has_ended:
            dispatcher = self._dispatcher
            self._mailbox.post(lambda: dispatcher.abandon(request, EndReason.CANCELLED))

    # --- as an iterator --------------------------------------------------------------------------

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Chunk:
        """Return the next chunk.

        Ends quietly after a natural end and after the caller's own cancel; look at `report.end_reason` to tell
        them apart. Raises the error of any other end, after the chunks that arrived before it. Chunks that lie
        in the buffer come without a checkpoint, at most a window of them in a row. Safe to cancel: no chunk is
        lost.
        """
        self._admit()
        if self._reading:
            raise UsageError("this stream is being read by another task; one reader at a time")
        request = self._request
        self._reading = True
        try:
            while True:
                chunk = self._next_now()
                if chunk is not None:
                    return chunk
                if request.has_ended:
                    reason = request.state.reason
                    assert reason is not None
                    if reason.end_class in (EndClass.NATURAL, EndClass.CALLER):
                        self._read_up = True
                        raise StopAsyncIteration
                    raise self._dispatcher.end_error(request)
                await request.news.wait()
        finally:
            self._reading = False

    def _next_now(self) -> Chunk | None:
        """Return the next chunk that can be had without waiting, or None."""
        request = self._request
        while request.has_chunk:
            chunk = self._dispatcher.take(request)
            if not self._tools_known:
                # Not before: which model has it, and how that writes calls, is known by now.
                self._tools_known, self._tools = True, ToolReading.of(request)
            shown = chunk if self._tools is None else self._tools.feed(chunk)
            if shown is not None:
                return shown
        reason = request.state.reason
        if self._tools is None or reason is None or reason.end_class is EndClass.CALLER:
            return None
        return self._tools.finish()

    async def text(self) -> str:
        """Return the rest of the answer as one string.

        Raises the error of every end that isn't natural, a cancel included: a fragment never looks like an
        answer. The error's `report` tells the rest.
        """
        return "".join(chunk.text for chunk in await self._rest())

    async def _rest(self) -> list[Chunk]:
        if self._read_up:
            raise UsageError("this stream was read to its end before; its text is with whoever read it")
        chunks = [chunk async for chunk in self]
        if self._request.state.reason is None or not self._request.state.reason.is_natural:
            raise self._dispatcher.end_error(self._request)
        return chunks

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls in what was read so far."""
        return () if self._tools is None else self._tools.calls

    # --- ending it -------------------------------------------------------------------------------

    def cancel(self, reason: EndReason = EndReason.CANCELLED) -> None:
        """Stop it now; returns at once. From any thread, any number of times, also after the end.

        reason: `cancelled` or `client_disconnected`. Wait for `released()` to know when the worker is free.
        """
        if not isinstance(reason, EndReason) or reason.end_class is not EndClass.CALLER:
            raise UsageError(f"a caller can cancel as cancelled or client_disconnected, not as {reason}")
        self._cancel_since(reason, time.monotonic_ns())

    def _cancel_since(self, reason: EndReason, asked_ns: int) -> None:
        """Stop it for a caller who said so at `asked_ns`: a blocked loop is part of the release latency."""
        self._in_loop(lambda: self._dispatcher.abandon(self._request, reason, asked_ns))

    def kill(self) -> None:
        """Cancel with the last rung of the ladder at once: the worker is killed and replaced."""
        asked_ns = time.monotonic_ns()
        self._in_loop(lambda: self._dispatcher.kill(self._request, EndReason.CANCELLED, asked_ns))

    def _in_loop(self, action: Callable[[], None]) -> None:
        if self._mailbox.is_here():
            action()
        else:
            self._mailbox.post(action)

    async def released(self) -> Report:
        """Wait until its resources are free and return the complete report.

        After an end the wait is shielded from cancellation and bounded by the ladder's graces; a report that
        then still says `is_released` False belongs to a release that is being forced and is late.
        """
        request = self._request
        self._check_here()
        if not self._admitted and not request.has_ended:
            raise UsageError("this stream was never started: enter it or read it first")
        while not request.has_ended:
            await request.news.wait()
        if not request.released.is_set():
            now = time.monotonic_ns()
            bound_s = self._dispatcher.escalator.bound_ns(request) / NS_PER_S + RELEASE_MARGIN_S
            ended_ns = request.timeline.ended_ns or now
            # A time-out may be the end of a standstill of this process, in which nothing could be read: one more.
            for wait_s in (max(0.1, bound_s - (now - ended_ns) / NS_PER_S), RELEASE_MARGIN_S):
                with anyio.move_on_after(wait_s, shield=True):
                    await request.released.wait()
                if request.released.is_set():
                    break
        return request.report()

    @property
    def phase(self) -> str:
        """Where it is: new, queued, prefill, decode, paused (its reader is behind), ending or released."""
        request = self._request
        if request.released.is_set():
            return "released"
        if request.has_ended:
            return "ending"
        if not self._admitted:
            return "new"
        attempt = self._dispatcher.attempts.get(request.id)
        return "queued" if attempt is None else attempt.told_phase

    @property
    def report(self) -> Report:
        """What is known of it now; complete once it is released."""
        return self._request.report()

    @property
    def end_reason(self) -> EndReason | None:
        """Why it ended, or None while it hasn't."""
        return self._request.state.reason


def answer_of(chunks: Sequence[Chunk], report: Report) -> Answer:
    """Return the answer that these chunks make up."""
    return Answer(
        text="".join(chunk.text for chunk in chunks),
        report=report,
        logprobs=tuple(told for chunk in chunks for told in chunk.logprobs),
        tool_calls=tuple(call for chunk in chunks for call in chunk.tool_calls),
    )
