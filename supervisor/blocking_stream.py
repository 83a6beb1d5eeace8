"""A stream for code without an event loop: what `BlockingSupervisor.stream` returns.

Holds the asynchronous `Stream` and carries every call into the loop's thread, where a chunk is taken, and credit
given, only when a reader asks for it. One thread reads, any may cancel.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from infervisor.protocol.endings import EndClass, EndReason
from infervisor.protocol.errors import UsageError
from infervisor.supervisor.loop_thread import LoopClosed, LoopThread
from infervisor.supervisor.report import Report
from infervisor.supervisor.request import Chunk
from infervisor.supervisor.stream import Answer, Stream
from infervisor.supervisor.streams import Streams

if TYPE_CHECKING:
    from infervisor.protocol.tool_calls import ToolCall
    from infervisor.supervisor.blocking import BlockingSupervisor

T = TypeVar("T")

MOST_ASKED = 8
"""How many cancels and kills are kept to be repeated in order; the first of each kind is what counts."""


class BlockingStream:
    """One request. Made by `BlockingSupervisor.stream`; enters the queue when it is entered or first read.

    One thread reads it at a time; any thread may cancel it meanwhile. One that is dropped without being left is
    cancelled when it is collected. Each chunk costs a change of threads there and back: some 0.15 ms more than in
    an event loop; `text` costs that once.
    """

    def __init__(self, supervisor: BlockingSupervisor, loop: LoopThread, stream: Stream) -> None:
        # A stream in use keeps its supervisor from being collected.
        self._supervisor = supervisor
        self._loop = loop
        self._stream = stream
        self._reader = threading.Lock()
        self._turn = anyio.Lock(fast_acquire=True)
        self._asked: deque[Callable[[], None]] = deque()
        self._handed: deque[Chunk] = deque()
        """Taken in the loop for a reader that may have been interrupted before it got them."""

    def __repr__(self) -> str:
        return f"<Blocking{repr(self._stream)[1:]}"

    # --- as a context manager --------------------------------------------------------------------

    def __enter__(self) -> BlockingStream:
        """Enter the queue. Raises `Overloaded`, `Unavailable` or `ShuttingDown`; nothing is left then."""
        self._check_process()
        try:
            self._run(self._stream.__aenter__)
        except LoopClosed:
            if not self._stream._admitted:
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel if it hasn't ended, and wait until its resources are free, at most the ladder's graces."""
        self._check_process()
        with contextlib.suppress(LoopClosed):  # which released everything
            self._run(self._stream.__aexit__, None, None, None)

    # --- as an iterator --------------------------------------------------------------------------

    def __iter__(self) -> BlockingStream:
        return self

    def __next__(self) -> Chunk:
        """Return the next chunk.

        Ends quietly after a natural end and after the caller's own cancel; look at `report.end_reason` to tell
        them apart. Raises the error of any other end, after the chunks that arrived before it.
        """
        chunk = self.read()
        if chunk is None:
            raise StopIteration
        return chunk

    def read(self, timeout: float | None = None) -> Chunk | None:
        """Return the next chunk, or None where an iteration would end.

        Raises TimeoutError after `timeout` seconds (0 doesn't wait), which changes nothing: the request goes on
        and the next read goes on waiting. What shall end the request is a matter of its deadlines.
        """
        with self._only_reader():
            if not self._handed:
                try:
                    self._run(self._take, timeout)
                except LoopClosed:
                    return self._left_over()
            return self._handed.popleft() if self._handed else None

    @contextlib.contextmanager
    def _only_reader(self) -> Iterator[None]:
        self._check_process()
        if not self._reader.acquire(blocking=False):
            raise UsageError("this stream is being read by another thread; one reader at a time")
        try:
            yield
        finally:
            self._reader.release()

    async def _take(self, timeout: float | None) -> None:
        # Race "the call of a reader that was interrupted is still being withdrawn": after it.
        async with self._turn:
            if self._handed:
                return  # what the interrupted call took after all: no second one ahead of the reader
            with anyio.fail_after(timeout), contextlib.suppress(StopAsyncIteration):
                self._handed.append(await anext(self._stream))

    def _left_over(self) -> Chunk | None:
        """Return the next of what had arrived when the supervisor was stopped. Its thread has ended."""
        self._loop.close()
        request, dispatcher = self._stream._request, self._stream._dispatcher
        chunk = self._stream._next_now()
        if chunk is not None:
            return chunk
        if request.state.reason is None:
            raise LoopClosed("the supervisor is closed; make a new one")
        if request.state.reason.end_class in (EndClass.NATURAL, EndClass.CALLER):
            return None
        raise dispatcher.end_error(request)

    def text(self) -> str:
        """Return the rest of the answer as one string.

        Raises the error of every end that isn't natural, a cancel included: a fragment never looks like an
        answer. The error's `report` tells the rest.
        """
        with self._only_reader():
            try:
                rest = self._run(self._read_text)
            except LoopClosed:
                rest = "".join(chunk.text for chunk in iter(self._left_over, None))
                reason = self.end_reason
                if reason is None or not reason.is_natural:
                    raise self._stream._dispatcher.end_error(self._stream._request) from None
            before = "".join(chunk.text for chunk in self._handed)
            self._handed.clear()
            return before + rest

    async def _read_text(self) -> str:
        async with self._turn:
            return await self._stream.text()

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls in what was read so far. Waits for nothing."""
        return self._stream.tool_calls

    # --- ending it -------------------------------------------------------------------------------

    def cancel(self, reason: EndReason = EndReason.CANCELLED) -> None:
        """Stop it now; returns at once. From any thread, any number of times, also after the end.

        reason: `cancelled` or `client_disconnected`. A thread that reads it wakes up. Wait for `released()` to
        know when the worker is free. Also for event loops and `on_event`.
        """
        asked_ns = time.monotonic_ns()
        self._stream.cancel(reason)
        self._also_in_order(partial(self._stream._cancel_since, reason, asked_ns))

    def kill(self) -> None:
        """Cancel with the last rung of the ladder at once: the worker is killed and replaced. As `cancel`."""
        self._stream.kill()
        self._also_in_order(self._stream.kill)

    def _also_in_order(self, again: Callable[[], None]) -> None:
        # A few are enough: they come twice, and all but the first change nothing.
        if len(self._asked) < MOST_ASKED:
            self._asked.append(again)

    def released(self) -> Report:
        """Wait until its resources are free and return the complete report.

        After an end the wait is bounded by the ladder's graces; a report that then still says `is_released`
        False belongs to a release that is being forced and is late.
        """
        self._check_process()
        try:
            return self._run(self._stream.released)
        except LoopClosed:
            return self.report

    @property
    def phase(self) -> str:
        """Where it is: see `Stream.phase`. Waits for nothing."""
        return self._stream.phase

    @property
    def report(self) -> Report:
        """What is known of it now; complete once it is released. Waits for nothing."""
        return self._stream.report

    @property
    def end_reason(self) -> EndReason | None:
        """Why it ended, or None while it hasn't. Waits for nothing."""
        return self._stream.end_reason

    def _check_process(self) -> None:
        self._supervisor._running()

    def _run(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        in_order: Callable[[], Awaitable[T]] = partial(self._in_order, function, *arguments)
        return self._loop.run(in_order)

    async def _in_order(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        # Race "a later call overtakes the cancel", which goes another way into the loop: as its thread made them.
        while self._asked:
            self._asked.popleft()()
        return await function(*arguments)


class BlockingStreams:
    """The answers to one prompt, for threads. Made by `BlockingSupervisor.streams`; see `Streams`.

    Each may have a reader of its own. One that isn't read stands still once its window is full.
    """

    def __init__(self, streams: Sequence[BlockingStream]) -> None:
        self._streams = tuple(streams)

    def __repr__(self) -> str:
        return f"<BlockingStreams {', '.join(repr(stream) for stream in self._streams)}>"

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[BlockingStream]:
        return iter(self._streams)

    def __getitem__(self, index: int) -> BlockingStream:
        return self._streams[index]

    def __enter__(self) -> BlockingStreams:
        """Enter the queue with all of them. Raises what refuses one; then none is left there."""
        try:
            for stream in self._streams:
                stream.__enter__()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel those that haven't ended, and wait until all are released, at most the ladder's graces."""
        # All of them before the first wait: their ladders run side by side.
        self.cancel()
        for stream in self._streams:
            stream.__exit__(None, None, None)

    def cancel(self, reason: EndReason = EndReason.CANCELLED) -> None:
        """Stop all of them now; returns at once. From any thread: see `BlockingStream.cancel`."""
        for stream in self._streams:
            stream.cancel(reason)

    def answers(self) -> list[Answer]:
        """Read all of them side by side and return the whole answers, in order: see `Streams.answers`."""
        streams = Streams([stream._stream for stream in self._streams])
        return self._streams[0]._run(streams.answers)
