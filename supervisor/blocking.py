"""The same supervisor for code without an event loop: threads, GUIs, WSGI servers, scripts.

Owns one thread that runs an event loop with the asynchronous `Supervisor` in it; every call goes there through
anyio's blocking portal and waits. Decides nothing and buffers nothing: a chunk is taken, and credit given, when
a reader asks for it. Any thread may call. Never usable where an event loop runs: it would stand still.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import anyio

from infervisor.protocol.endings import EndClass, EndReason
from infervisor.protocol.errors import UsageError
from infervisor.supervisor import events
from infervisor.supervisor.loop_thread import LoopClosed, LoopThread, check_may_block
from infervisor.supervisor.report import Report
from infervisor.supervisor.request import Chunk
from infervisor.supervisor.request_input import ChatMessage
from infervisor.supervisor.settings import Deadlines, Escalation, Liveness, RestartPolicy, StopGraces
from infervisor.supervisor.status import Status
from infervisor.supervisor.stream import Answer, Stream
from infervisor.supervisor.supervisor import Supervisor

T = TypeVar("T")

MOST_ASKED = 8


class BlockingSupervisor:
    """A model in a crash-isolated worker, for threads. Use it as a context manager.

    Takes what `Supervisor` takes, and any thread may use it. Its calls block; what bounds them are the deadlines
    of the request. on_event is called in the supervisor's own thread: it must not block, and of this class it may
    call only what doesn't wait (`status`, `cancel`, `kill`). One that is dropped without being left is stopped
    when it is collected, one that still runs when the interpreter ends is stopped then.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        engine: str = "llama",
        options: Mapping[str, Any] | None = None,
        window: int = 32,
        window_s: float | None = None,
        max_queue: int = 64,
        max_wait_s: float | None = None,
        deadlines: Deadlines | None = None,
        escalation: Escalation | None = None,
        restart: RestartPolicy | None = None,
        graces: StopGraces | None = None,
        liveness: Liveness | None = None,
        python: str | os.PathLike[str] | None = None,
        env: Mapping[str, str | None] | None = None,
        on_event: Callable[[events.Event], None] | None = None,
        wait_until_ready: bool = True,
    ) -> None:
        self._supervisor = Supervisor(
            model,
            engine=engine,
            options=options,
            window=window,
            window_s=window_s,
            max_queue=max_queue,
            max_wait_s=max_wait_s,
            deadlines=deadlines,
            escalation=escalation,
            restart=restart,
            graces=graces,
            liveness=liveness,
            python=python,
            env=env,
            on_event=on_event,
            wait_until_ready=wait_until_ready,
        )
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None

    def __repr__(self) -> str:
        return f"<Blocking{repr(self._supervisor)[1:]}"

    # --- life ------------------------------------------------------------------------------------

    def __enter__(self) -> BlockingSupervisor:
        """Start the worker, and wait until it is ready unless told otherwise. Raises what kept it from that."""
        self._supervisor._check_process()
        check_may_block()
        with self._lock:
            if self._loop is not None:
                raise UsageError("this supervisor was entered before; make a new one")
            self._loop = loop = LoopThread(self._supervisor)
        loop.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close: see `stop`."""
        self.stop()

    def start(self) -> BlockingSupervisor:
        """Do what entering does, for programs without a place for `with`, such as a module that a server loads.

        Call `stop` when the program ends; at the interpreter's end it is done for you. A server that forks must
        call this in each of its processes.
        """
        return self.__enter__()

    def stop(self) -> None:
        """End all requests as `shutting_down`, stop the worker with its graces, and return when it is collected.

        Idempotent, from any thread; leaving the context does it too. Bounded by the graces.
        """
        self._supervisor._check_process()
        check_may_block()
        if self._loop is not None:
            self._loop.close()

    def wait_ready(self, timeout: float | None = None) -> Mapping[str, Any]:
        """Wait until a worker is ready and return its facts.

        Raises what opened the breaker (`ModelLoadError`, `WorkerDied`, `WorkerSpawnError`, …), and TimeoutError
        after `timeout` seconds.
        """

        async def wait() -> Mapping[str, Any]:
            with anyio.fail_after(timeout):
                return await self._supervisor.wait_ready()

        return self._running().run(wait)

    def restart_worker(self) -> None:
        """Replace the worker by a new one once its requests have ended; close an open breaker."""

        async def restart() -> None:
            self._supervisor.restart_worker()

        self._running().run(restart)

    # --- requests --------------------------------------------------------------------------------

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[ChatMessage] | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        ignore_eos: bool = False,
        special: bool = True,
        window: int | None = None,
        deadlines: Deadlines | None = None,
        **sampling: Any,
    ) -> BlockingStream:
        """Return a stream for a raw prompt, or for chat messages through the model's template.

        prompt: continued as it is; with special=True texts of control tokens in it become those tokens.
        messages: objects with role and content; their content is always literal text. max_tokens: at least 1;
        None is until the context is full. stop: up to 64 strings that end the answer and are not part of it.
        seed: 0 to 2**32 − 1; None draws one, which the report tells. window: tokens computed ahead of the
        reader. sampling: the fields of `protocol.generation.Sampling` (temperature, top_k, …).

        Raises `InvalidRequest` naming the field. Nothing happens until the stream is entered or read.
        """
        loop = self._running()

        async def make() -> BlockingStream:
            stream = self._supervisor.stream(
                prompt,
                messages=messages,
                max_tokens=max_tokens,
                stop=stop,
                seed=seed,
                ignore_eos=ignore_eos,
                special=special,
                window=window,
                deadlines=deadlines,
                **sampling,
            )
            return BlockingStream(self, loop, stream)

        return loop.run(make)

    def generate(
        self, prompt: str | None = None, *, messages: Sequence[ChatMessage] | None = None, **options: Any
    ) -> Answer:
        """Return the whole answer. Takes what `stream` takes.

        Raises the error of every end that isn't natural; its `report` tells the rest. Interrupted by Ctrl-C, it
        cancels the request.
        """
        make = partial(self._supervisor.generate, prompt, messages=messages, **options)
        return self._running().run(make)

    # --- looking at it ---------------------------------------------------------------------------

    def status(self) -> Status:
        """Return the state as of now. Waits for nothing: also for event loops and `on_event`."""
        self._running()
        return self._supervisor.status()

    def _running(self) -> LoopThread:
        self._supervisor._check_process()
        if self._loop is None:
            raise UsageError(
                "this supervisor isn't running: use 'with BlockingSupervisor(...) as supervisor'"
            )
        return self._loop

    def __del__(self) -> None:
        # Race "collected in any thread, in the middle of anything": post, don't wait.
        loop: LoopThread | None = getattr(self, "_loop", None)
        if loop is not None and loop.let_go():
            warnings.warn(f"{self!r} was never left: use 'with'", ResourceWarning, stacklevel=2, source=self)


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
        if request.has_chunk:
            return dispatcher.take(request)
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
