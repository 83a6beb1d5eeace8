"""One event loop in a thread of its own, with a supervisor in it, for callers that have no loop.

Owns the thread and anyio's blocking portal into it. Runs calls there for any other thread, which waits; a caller
that is interrupted while it waits (Ctrl-C) takes its call back. Decides nothing about requests.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import anyio
from anyio.from_thread import BlockingPortal
from anyio.lowlevel import current_token

from infervisor.protocol.errors import ShuttingDown, UsageError
from infervisor.supervisor.supervisor import Supervisor

T = TypeVar("T")

POLL_S = 0.001
SUBMITTED_WITHIN_S = 5.0
"""How long a call may be on its way into the loop; for ever only if its thread was interrupted just there."""


class LoopClosed(ShuttingDown):
    """The loop has ended with its supervisor: nothing changes any more."""


class LoopThread:
    """Made for one supervisor, whose whole life is in the thread that `open` starts."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._lock = threading.Lock()  # held for moments, never while anything waits
        self._pid = os.getpid()
        self._submitting = 0
        self._is_closed = False
        self._failure: BaseException | None = None
        self._started = threading.Event()
        self._entered: Future[None] = Future()
        # A daemon: the interpreter joins all others before it runs the exit hook that ends this one.
        self._thread = threading.Thread(target=self._run, name="infervisor", daemon=True)

    # --- from other threads ----------------------------------------------------------------------

    def open(self) -> None:
        """Start the thread and return when the supervisor is entered. Raises what kept it from that."""
        atexit.register(self._close_at_exit)
        try:
            self._thread.start()
        except Exception:
            # There is no thread, so nothing to wait for and nothing to leave.
            atexit.unregister(self._close_at_exit)
            self._is_closed = True
            self._started.set()
            raise
        except BaseException:
            # Race "interrupted while the thread starts": it runs already.
            self.close()
            raise
        try:
            self._entered.result()
        except BaseException:
            # Also when the caller was interrupted while it waited.
            self.close()
            raise

    def close(self) -> None:
        """Leave the supervisor and return when the thread has ended. Idempotent; any number of threads may."""
        self._started.wait()
        with contextlib.suppress(LoopClosed):
            self._submit(self._begin_to_leave)
        if self._thread.ident is not None:
            self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _close_at_exit(self) -> None:
        with contextlib.suppress(UsageError):  # in a forked child: it is its parent's
            self._supervisor._check_process()
            self.close()

    def let_go(self) -> bool:
        """Leave soon and wait for nothing: for finalizers, in any thread. Return whether it was open."""
        mailbox = self._supervisor._mailbox
        if self._is_closed or mailbox is None or os.getpid() != self._pid:
            return False
        mailbox.post(self._leave.set)
        return True

    def run(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Run a coroutine function in the loop, wait, and return or raise what it does.

        Raises `LoopClosed` once the loop has ended, and `UsageError` in a thread that runs an event loop.
        """
        check_may_block()
        if not self._entered.done() and not self._is_closed:
            raise UsageError("this supervisor isn't entered yet: wait until its 'with' has begun")
        call = _Call(function, arguments)
        try:
            return self._submit(call.run).result()
        finally:
            if not call.is_over and self._supervisor._mailbox is not None:
                call.is_withdrawn = True
                self._supervisor._mailbox.post(call.cancel)

    def _submit(self, function: Callable[[], Awaitable[T]]) -> Future[T]:
        # Race "the loop ends while a call is on its way into it": the loop waits for those that are.
        with self._lock:
            if self._is_closed:
                raise LoopClosed("the supervisor is closed; make a new one")
            self._submitting += 1
        try:
            return self._portal.start_task_soon(function)
        finally:
            with self._lock:
                self._submitting -= 1

    # --- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            anyio.run(self._main)
        except BaseException as error:
            self._failure = error
        finally:
            self._is_closed = True
            self._started.set()
            atexit.unregister(self._close_at_exit)
            if not self._entered.done():
                # The failure is raised once: by whoever waits for the start.
                failure, self._failure = self._failure, None
                self._entered.set_exception(
                    failure or ShuttingDown("the supervisor was stopped while it started")
                )

    async def _main(self) -> None:
        async with BlockingPortal() as self._portal:
            self._leave = anyio.Event()
            self._starting = anyio.CancelScope()
            self._started.set()
            try:
                with self._starting:
                    async with self._supervisor:
                        self._entered.set_result(None)
                        await self._leave.wait()
            except BaseException as error:
                # Not through the portal, which would wrap it in a group.
                self._failure = error
            with self._lock:
                self._is_closed = True
            with anyio.move_on_after(SUBMITTED_WITHIN_S):
                while self._submitting:  # noqa: ASYNC110 (over in a moment, and nothing tells of it)
                    await anyio.sleep(POLL_S)

    async def _begin_to_leave(self) -> None:
        if self._entered.done():
            self._leave.set()
        else:
            self._starting.cancel()


class _Call(Generic[T]):
    """One call for another thread. Unlike the portal's future it can be withdrawn before it is there."""

    def __init__(self, function: Callable[..., Awaitable[T]], arguments: tuple[Any, ...]) -> None:
        self.is_withdrawn = False
        self.is_over = False
        self._function = function
        self._arguments = arguments
        self._scope: anyio.CancelScope | None = None

    async def run(self) -> T:
        """Run it, in the loop."""
        try:
            with anyio.CancelScope() as self._scope:
                if not self.is_withdrawn:
                    return await self._function(*self._arguments)
            raise ShuttingDown("the caller was interrupted")  # and so hears nothing of this
        finally:
            self.is_over = True

    def cancel(self) -> None:
        """End it if it runs, in the loop's thread."""
        if self._scope is not None:
            self._scope.cancel()


def check_may_block() -> None:
    """Raise `UsageError` in a thread that runs an event loop, which a waiting call would stop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        try:
            current_token()
        except RuntimeError:
            return
    raise UsageError(
        "this call would block the event loop that runs in this thread: use 'async with Supervisor(...)' here, "
        "or call it in another thread"
    )
